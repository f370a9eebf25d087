"""Host units as fp8 inside real vLLM engines: exact while dense, right byte by byte while sparse, and close in text."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.cli.evaluate import compare, make_windows, score
from oasiskv.cli.launch import Request, environment, prepare
from oasiskv.cli.offline import Offline
from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_eagle3, write_tiny_model

# An engine of a tiny model takes a few seconds, vLLM's import 10 to 40 on two busy cores.
pytestmark = pytest.mark.timeout(300)

BLOCK = 16
REQUESTS = [
    *random_requests([13, 201, 347], 32),
    *random_requests([230], 32, prompt_seed=1, temperature=0.8, seed=7),
]
FP8 = {"host_dtype": "fp8"}
SPARSE = {"budget_blocks": 6, "debug_verify": True, "debug_poison": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_model(
        root / "target", architecture="llama", num_heads=6, num_kv_heads=2, head_dim=64, hidden_size=96
    )
    drafter = {
        "method": "eagle3",
        "num_speculative_tokens": 1,
        "model": str(write_tiny_eagle3(root / "eagle3", target)),
    }
    options = {"model": str(target), "skip_tokenizer_init": True, "max_model_len": 1024, "block_size": BLOCK}
    return options | {"speculative_config": drafter}


def test_while_everything_fits_the_budget_tokens_are_those_without_fp8(
    engine: dict[str, Any], backend: EngineProcess
) -> None:
    dense = {"budget_blocks": 64}
    exact = backend.run(engine, REQUESTS, settings=dense)
    fp8 = backend.run(engine, REQUESTS, settings=dense | FP8)
    assert fp8.tokens == exact.tokens
    assert fp8.counts["sparse_rows"] == fp8.counts["load_bytes"] == 0


def test_sparse_requests_hold_widened_units_only_and_move_a_quarter_of_float32(
    engine: dict[str, Any], backend: EngineProcess
) -> None:
    exact = backend.run(engine, REQUESTS, settings=SPARSE)
    # debug_verify compares every resident unit with what the host's widens to, before each attention.
    fp8 = backend.run(engine, REQUESTS, settings=SPARSE | FP8)
    assert fp8.tokens[0] == exact.tokens[0]  # 45 tokens fit the budget
    assert fp8.counts["switches"] == exact.counts["switches"] == 3
    assert fp8.counts["fetched"] > 0
    unit_bytes = BLOCK * 2 * 64
    assert fp8.counts["load_bytes"] == fp8.counts["fetched"] * (unit_bytes + 8)
    assert fp8.counts["store_bytes"] / exact.counts["store_bytes"] == (unit_bytes + 8) / (4 * unit_bytes)
    assert fp8.pool_after == fp8.pool_before
    for hold_layers in (0, 40):
        held = backend.run(engine, REQUESTS, settings=SPARSE | FP8 | {"debug_hold_layers": hold_layers})
        assert held.tokens == fp8.tokens


def test_the_pool_is_counted_in_fp8_blocks(engine: dict[str, Any], backend: EngineProcess) -> None:
    # Two layers and the drafter's, each a line of scales behind two heads.
    block_bytes = 3 * (2 * BLOCK * 2 * 64 + 128)
    longest = 1024 // BLOCK + 1
    reply = backend.run(engine, REQUESTS[:2], settings=SPARSE | FP8 | {"host_pool_bytes": 70 * block_bytes + 1})
    assert reply.pool_before["host_free"] == 70
    with pytest.raises(Exception, match=f"host_pool_bytes: expected at least {longest * block_bytes} "):
        backend.run(engine, REQUESTS[:2], settings=SPARSE | FP8 | {"host_pool_bytes": longest * block_bytes - 1})


@pytest.mark.timeout(600)
def test_smollm2_says_nearly_what_it_says_with_units_of_float32(smollm2: Path) -> None:
    """Both runs are forced along the same text; only the host's units differ, and with them what is resident."""
    context, steps, windows = 1024, 48, 2
    prompts = make_windows(str(smollm2), None, context, steps, windows)
    found = []
    for dtype in ("auto", "fp8"):
        request = Request(
            model=str(smollm2),
            budget_blocks=context // BLOCK // 4,
            settings=[f"host_dtype={dtype}", "debug_verify=true"],
            max_model_len=context + steps,
            max_num_seqs=windows,
        )
        launch = prepare(request, "cpu", print)
        pools = launch.plan.pools
        engine = {
            "model": str(smollm2),
            "dtype": pools.shape.dtype,
            "max_model_len": pools.max_model_len,
            "max_num_seqs": windows,
            "enforce_eager": True,
            "kv_cache_memory_bytes": (pools.longest_blocks + 8) * windows * pools.block_bytes,
        }
        child = {**environment("cpu", 1, os.environ), "HF_HUB_OFFLINE": "1"}
        with Offline(engine | launch.engine_arguments(), prompts, child) as job:
            results = job.wait()
            found.append((results.counts, [np.load(path) for path in results.log_probs]))
    (exact_counts, exact), (fp8_counts, fp8) = found
    compared = [compare(a, b, p.forced or []) for a, b, p in zip(exact, fp8, prompts, strict=True)]
    both = score(compared)
    print(f"perplexity {both.dense_perplexity:.3f} with units of float32, {both.sparse_perplexity:.3f} with fp8")
    print(f"same next token {100 * both.agreement:.1f} % of {windows * (steps - 1)}; KL {both.kl_divergence:.5f}")
    assert fp8_counts["sparse_rows"] == exact_counts["sparse_rows"] == windows * (steps - 1)
    assert fp8_counts["store_bytes"] < 0.26 * exact_counts["store_bytes"]
    assert both.kl_divergence > 0
    assert both.kl_divergence < 0.05
    assert both.agreement > 0.85
    assert abs(both.sparse_perplexity / both.dense_perplexity - 1) < 0.08
