"""vLLM's own fp8 KV cache under real engines: stock vLLM's tokens while dense, right byte by byte while sparse."""

from typing import Any

import pytest
import torch

from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_eagle3, write_tiny_model

pytestmark = [
    # An engine of a tiny model takes a few seconds, vLLM's import 10 to 40 on two busy cores.
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache on a CPU wants AVX-512, which this one lacks"
    ),
]

BLOCK, BUDGET, HEAD_DIM = 16, 6, 64
REQUESTS = [
    *random_requests([13, 201, 347], 32, logprobs=2),
    *random_requests([230], 32, prompt_seed=1, temperature=0.8, seed=7),
]
FP8 = {"kv_cache_dtype": "fp8"}
SCALES = (0.07, 0.013)
"""Of K and V: no powers of two, and small enough that what is rounded is about as large as fp8 goes."""
SPARSE = {"budget_blocks": BUDGET, "debug_verify": True, "debug_poison": True}
MARGIN = 1e-3
"""Two logits closer than this may change places when a batch has other rows: sums of float32 run in another order."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    target = write_tiny_model(
        root / "target", architecture="llama", num_heads=6, num_kv_heads=2, head_dim=HEAD_DIM, hidden_size=96
    )
    drafter = {
        "method": "eagle3",
        "num_speculative_tokens": 1,
        "model": str(write_tiny_eagle3(root / "eagle3", target)),
    }
    options = {"model": str(target), "skip_tokenizer_init": True, "max_model_len": 1024, "block_size": BLOCK}
    return options | {"speculative_config": drafter}


@pytest.fixture(scope="module")
def dense(engine: dict[str, Any], backend: EngineProcess) -> Reply:
    return backend.run(engine | FP8, REQUESTS, settings={"budget_blocks": 64}, kv_scales=SCALES)


def test_a_budget_of_the_whole_context_gives_the_tokens_of_stock_vllm_with_an_fp8_cache(
    engine: dict[str, Any], dense: Reply, stock: EngineProcess
) -> None:
    alone = {name: value for name, value in engine.items() if name != "speculative_config"} | {"block_size": 32}
    theirs = stock.run(alone | FP8, REQUESTS, kv_scales=SCALES)
    assert dense.counts["sparse_rows"] == 0
    num_ties = 0
    for mine, other in zip(dense.outputs, theirs.outputs, strict=True):
        got, expected = mine["completions"][0]["tokens"], other["completions"][0]["tokens"]
        where = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
        if where is not None:
            first, second = sorted((value for _, value in other["completions"][0]["logprobs"][where]), reverse=True)
            print(f"token {where} differs; stock's two likeliest are {first - second:.2e} apart")
            assert first - second < MARGIN
            num_ties += 1
    assert num_ties <= 1


def test_sparse_requests_hold_true_bytes_only_and_a_number_takes_one_byte(
    engine: dict[str, Any], dense: Reply, backend: EngineProcess
) -> None:
    unit_bytes, num_units = BLOCK * 2 * HEAD_DIM, 3 * 2  # two layers and the drafter's, two heads each
    settings = SPARSE | {"host_pool_bytes": 70 * num_units * unit_bytes + 1}
    # debug_verify compares every resident unit with the host's, bit for bit, before each attention.
    fp8 = backend.run(engine | FP8, REQUESTS, settings=settings, kv_scales=SCALES)
    assert fp8.tokens[0] == dense.tokens[0]  # 45 tokens fit the budget
    assert fp8.tokens[2] != dense.tokens[2]
    assert fp8.counts["switches"] == 3
    assert fp8.counts["predicted"] == fp8.counts["hit"] + fp8.counts["fetched"] + fp8.counts["deferred"]
    assert fp8.counts["load_bytes"] == fp8.counts["fetched"] * unit_bytes > 0
    num_stored = sum((length + 31) // BLOCK for length in (201, 347, 230))
    assert fp8.counts["store_bytes"] == num_stored * num_units * unit_bytes
    assert fp8.pool_before["host_free"] == 70
    assert fp8.pool_after == fp8.pool_before


def test_model_runner_v2_serves_an_fp8_cache_too(engine: dict[str, Any], backend_v2: EngineProcess) -> None:
    settings = {"group_reduction": "softmax", "score_alpha": 1.0}
    requests = random_requests([201], 18)
    fp8 = backend_v2.run(engine | FP8, requests, settings=SPARSE | settings, kv_scales=SCALES)
    assert fp8.counts["switches"] == 1
    assert fp8.counts["predicted"] == fp8.counts["hit"] + fp8.counts["fetched"] + fp8.counts["deferred"]
    assert fp8.counts["load_bytes"] == fp8.counts["fetched"] * BLOCK * 2 * HEAD_DIM > 0
