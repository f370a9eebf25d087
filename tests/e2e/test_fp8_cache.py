"""vLLM's own fp8 KV cache under real engines: stock vLLM's tokens while dense, right byte by byte while sparse."""

from typing import Any

import pytest
import torch

from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_eagle3, write_tiny_model

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


def test_a_budget_of_the_whole_context_gives_the_tokens_of_stock_vllm_with_an_fp8_cache(
    engine: dict[str, Any], backend: EngineProcess, stock: EngineProcess
) -> None:
    ours = backend.run(engine | FP8, REQUESTS, settings={"budget_blocks": 64}, kv_scales=SCALES)
    alone = {name: value for name, value in engine.items() if name != "speculative_config"} | {"block_size": 32}
    theirs = stock.run(alone | FP8, REQUESTS, kv_scales=SCALES)
    assert ours.counts["sparse_rows"] == 0
    num_ties = 0
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        got, expected = mine["completions"][0]["tokens"], other["completions"][0]["tokens"]
        where = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
        if where is not None:
            first, second = sorted((value for _, value in other["completions"][0]["logprobs"][where]), reverse=True)
            print(f"token {where} differs; stock's two likeliest are {first - second:.2e} apart")
            assert first - second < MARGIN
            num_ties += 1
    assert num_ties <= 1
    assert ours.tokens != backend.run(engine, REQUESTS, settings={"budget_blocks": 64}).tokens


def test_sparse_requests_hold_true_bytes_only_and_move_a_quarter_of_float32(
    engine: dict[str, Any], backend: EngineProcess
) -> None:
    wide = backend.run(engine, REQUESTS, settings=SPARSE)
    # debug_verify compares every resident unit with the host's, bit for bit, before each attention.
    fp8 = backend.run(engine | FP8, REQUESTS, settings=SPARSE, kv_scales=SCALES)
    dense = backend.run(engine | FP8, REQUESTS, settings={"budget_blocks": 64}, kv_scales=SCALES)
    assert fp8.tokens[0] == dense.tokens[0]  # 45 tokens fit the budget
    assert fp8.tokens[2] != dense.tokens[2]
    assert fp8.counts["switches"] == wide.counts["switches"] == 3
    assert fp8.counts["predicted"] == fp8.counts["hit"] + fp8.counts["fetched"] + fp8.counts["deferred"]
    assert fp8.counts["load_bytes"] == fp8.counts["fetched"] * BLOCK * 2 * HEAD_DIM > 0
    assert 4 * fp8.counts["store_bytes"] == wide.counts["store_bytes"]
    assert fp8.facts["num_blocks"] // 4 == wide.facts["num_blocks"]
    assert fp8.pool_after == fp8.pool_before
    held = backend.run(engine | FP8, REQUESTS, settings=SPARSE | {"debug_hold_layers": 40}, kv_scales=SCALES)
    assert held.tokens == fp8.tokens


def test_model_runner_v2_serves_an_fp8_cache_too(engine: dict[str, Any], backend_v2: EngineProcess) -> None:
    settings = {"group_reduction": "softmax", "score_alpha": 1.0}
    fp8 = backend_v2.run(engine | FP8, REQUESTS[1:3], settings=SPARSE | settings, kv_scales=SCALES)
    assert fp8.counts["switches"] == 2
    assert fp8.counts["predicted"] == fp8.counts["hit"] + fp8.counts["fetched"] + fp8.counts["deferred"]
    assert fp8.counts["load_bytes"] == fp8.counts["fetched"] * BLOCK * 2 * HEAD_DIM > 0


def test_the_pool_is_counted_in_blocks_of_bytes(engine: dict[str, Any], backend: EngineProcess) -> None:
    # Two layers and the drafter's, without scales.
    block_bytes = 3 * 2 * BLOCK * 2 * HEAD_DIM
    settings = SPARSE | {"host_pool_bytes": 70 * block_bytes + 1}
    assert backend.run(engine | FP8, REQUESTS[:2], settings=settings).pool_before["host_free"] == 70
