"""fp8 summary rows inside real vLLM engines: dense tokens while the budget covers all, and fewer pages while sparse."""

from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_eagle3, write_tiny_model

# An engine of a tiny model takes a few seconds, vLLM's import 10 to 40 on two busy cores.
pytestmark = pytest.mark.timeout(300)

BLOCK, BUDGET = 16, 6
ROWS_PER_PAGE = 63  # of float32 and head_dim 64: 8,192 bytes hold so many rows of 128 bytes and an exponent
REQUESTS = [
    *random_requests([13, 201, 1187], 32),
    *random_requests([230], 32, prompt_seed=1, temperature=0.8, seed=7),
]
FP8 = {"summary_dtype": "fp8"}


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
    options = {"model": str(target), "skip_tokenizer_init": True, "max_model_len": 1536, "block_size": BLOCK}
    return options | {"speculative_config": drafter}


def test_while_everything_fits_the_budget_tokens_are_those_of_a_dense_engine(
    engine: dict[str, Any], backend: EngineProcess
) -> None:
    exact = backend.run(engine, REQUESTS, settings={"budget_blocks": 96})
    fp8 = backend.run(engine, REQUESTS, settings={"budget_blocks": 96} | FP8)
    assert exact.counts["sparse_rows"] == fp8.counts["sparse_rows"] == 0
    assert fp8.tokens == exact.tokens


def test_sparse_requests_hold_pages_of_fp8_rows_and_say_the_same_whenever_transfers_end(
    engine: dict[str, Any], backend: EngineProcess
) -> None:
    settings: dict[str, Any] = {"budget_blocks": BUDGET, "debug_verify": True, "debug_poison": True} | FP8
    fp8 = backend.run(engine, REQUESTS, settings=settings, sample=True)
    assert fp8.counts["switches"] == 3
    assert fp8.counts["fetched"] > 0
    assert fp8.pool_after == fp8.pool_before
    rows = [step["requests"]["2"] for step in fp8.steps if "2" in step["requests"]]
    sparse = [row for row in rows if row["is_sparse"]][1:]
    assert len(sparse) > 8
    for row in sparse:
        num_complete = row["num_computed"] // BLOCK
        assert num_complete > ROWS_PER_PAGE  # two pages; of float32 rows it would be five
        least = 1 if row["num_computed"] % BLOCK else 0
        assert least <= row["held"] - BUDGET - 2 <= 2, row
    held = backend.run(engine, REQUESTS, settings=settings | {"debug_hold_layers": 40})
    assert held.tokens == fp8.tokens
    # With a cap of all blocks and every block's score a bound, fp8 units and rows go together too.
    both = backend.run(engine, REQUESTS, settings=settings | {"host_dtype": "fp8"})
    assert both.counts["switches"] == 3
    assert both.pool_after == both.pool_before


def test_rows_that_do_not_fit_the_model_stop_the_engine_by_name(
    engine: dict[str, Any], backend: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("odd") / "model", num_heads=2, num_kv_heads=1, head_dim=24)
    odd = {name: value for name, value in engine.items() if name != "speculative_config"} | {"model": str(model)}
    with pytest.raises(Exception, match="summary_dtype: expected auto with head_dim 24 and summary 'mid'"):
        backend.run(odd, REQUESTS[:1], settings={"summary": "mid", "score_alpha": 0} | FP8)
