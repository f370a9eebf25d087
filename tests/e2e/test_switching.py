"""When requests of a real engine become sparse: early, or late, when its pool fills."""

from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_model

pytestmark = pytest.mark.timeout(300)

LATE = {"budget_blocks": 12, "switch": "late", "debug_verify": True, "debug_poison": True}
LENGTHS = [620, 601, 380, 590, 611, 640, 602, 77]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("switching") / "model", num_kv_heads=1, num_heads=2)
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "block_size": 16,
    }


def num_sparse(reply: Reply) -> list[int]:
    """Return how many requests were sparse after each step."""
    return [sum(row["is_sparse"] for row in step["requests"].values()) for step in reply.steps]


def test_requests_that_the_pool_holds_stay_dense_and_get_dense_tokens(
    stock: EngineProcess, backend: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests(LENGTHS, 40)
    late = backend.run(engine, requests, settings=LATE)
    assert late.tokens == stock.run(engine | {"block_size": 32}, requests).tokens
    assert late.counts["switches"] == late.counts["sparse_rows"] == 0


def test_a_full_pool_makes_requests_sparse_one_by_one_and_preempts_none(
    backend: EngineProcess, engine: dict[str, Any]
) -> None:
    # About 40 blocks each: three fit, and all eight as soon as they are sparse.
    small = engine | {"num_gpu_blocks_override": 170}
    requests = random_requests(LENGTHS, 120)
    reply = backend.run(small, requests, settings=LATE, sample=True)
    assert [len(tokens) for tokens in reply.tokens] == [120] * len(LENGTHS)
    assert not any(output["was_preempted"] for output in reply.outputs)
    assert max(len(step["requests"]) for step in reply.steps) >= 5
    steps = num_sparse(reply)
    assert {1, 2} <= set(steps)
    assert 2 < reply.counts["switches"] < len(LENGTHS)
    assert reply.pool_after == reply.pool_before
