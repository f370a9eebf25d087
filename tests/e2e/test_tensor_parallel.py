"""Tensor parallel workers each keep their own heads' working sets; the tokens are those of one worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_eagle3, write_tiny_model

# Each worker imports vLLM in a process of its own.
pytestmark = pytest.mark.timeout(600)

SPARSE = {"budget_blocks": 6, "debug_verify": True, "host_pool_bytes": "32MiB"}


@pytest.fixture
def parallel(log_folder: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(log_folder / "parallel.log")
    yield process
    process.close()


def in_parallel(engine: dict[str, Any], size: int) -> dict[str, Any]:
    return engine | {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}


def test_two_workers_give_the_tokens_of_one(backend: EngineProcess, parallel: EngineProcess, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", num_heads=8, num_kv_heads=4)
    drafter = write_tiny_eagle3(tmp_path / "eagle3", model)
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "block_size": 16,
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1},
    }
    requests = random_requests([37, 201, 333], 24)
    reply = parallel.run(in_parallel(engine, 2), requests, settings=SPARSE)
    assert reply.tokens == backend.run(engine, requests, settings=SPARSE).tokens
    assert reply.pool_after == reply.pool_before


def test_three_workers_with_one_kv_head_each_give_the_tokens_of_one(
    backend: EngineProcess, parallel: EngineProcess, smollm2: Path
) -> None:
    engine = {"model": str(smollm2), "max_model_len": 512, "block_size": 16}
    chat = [{"role": "user", "content": "Write about the sea, the sky and the mountains between them. " * 12}]
    requests = [{"chat": chat, "params": {"max_tokens": 20}}]
    settings = SPARSE | {"host_pool_bytes": "128MiB"}
    reply = parallel.run(in_parallel(engine, 3), requests, settings=settings)
    single = backend.run(engine, requests, settings=settings)
    assert single.counts["switches"] == 1
    assert reply.tokens == single.tokens
