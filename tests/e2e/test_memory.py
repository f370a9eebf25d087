"""What sparse requests hold of vLLM's own block pool, looked at after every step."""

from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli.demo import find_text, load_tokenizer
from oasiskv.core.needle import Needle, build_needle_prompt
from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_eagle3, write_tiny_model

pytestmark = pytest.mark.timeout(300)

BUDGET = 32
BLOCK = 16


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("long") / "model"
    model = write_tiny_model(folder, num_kv_heads=1, num_heads=2, max_positions=16384)
    drafter = write_tiny_eagle3(folder.with_name("eagle3"), model)
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 9000,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK,
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1},
    }


def rows_of(reply: Reply, request_id: str) -> list[dict[str, Any]]:
    return [step["requests"][request_id] for step in reply.steps if request_id in step["requests"]]


def assert_bounded(rows: list[dict[str, Any]], budget: int, rows_per_page: int, block: int = BLOCK) -> None:
    """Check what a request holds from one step after its switch: slots, summary pages, one or two active blocks."""
    first = next(index for index, row in enumerate(rows) if row["is_sparse"])
    assert len(rows) - first > 8
    for row in rows[first + 1 :]:
        num_complete = row["num_computed"] // block
        held_beside_active = budget + -(-num_complete // rows_per_page)
        # Between two steps, a block that just ended is complete and the next one may not be there yet.
        least = 1 if row["num_computed"] % block else 0
        assert least <= row["held"] - held_beside_active <= 2, row


@pytest.mark.parametrize("length", [2047, 4096, 8191])
@pytest.mark.parametrize(("summary", "rows_per_page"), [("minmax", BLOCK), ("mid", 2 * BLOCK)])
def test_a_sparse_request_holds_its_budget_its_summaries_and_the_active_blocks(
    backend: EngineProcess, engine: dict[str, Any], length: int, summary: str, rows_per_page: int
) -> None:
    settings = {"budget_blocks": BUDGET, "summary": summary, "score_alpha": 0.25 if summary == "minmax" else 0}
    # Both lengths of output reach past two block ends.
    reply = backend.run(engine, random_requests([length], 40), settings=settings, sample=True)
    rows = rows_of(reply, "0")
    assert max(row["held"] for row in rows) >= length // BLOCK  # prefill is dense
    assert_bounded(rows, BUDGET, rows_per_page)
    assert reply.counts["switches"] == 1
    # What the backend has on the device beside was there when vLLM looked at how much is left.
    assert reply.facts["is_state_profiled"]
    print(f"{length} tokens: {rows[-1]['held']} blocks held, dense would hold {-(-rows[-1]['num_computed'] // BLOCK)}")
    assert reply.pool_after == reply.pool_before


def test_a_request_that_grows_past_its_budget_becomes_sparse_in_mid_decode(
    backend: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([101], 120)
    reply = backend.run(engine, requests, settings={"budget_blocks": 8}, sample=True)
    rows = rows_of(reply, "0")
    switch = next(index for index, row in enumerate(rows) if row["is_sparse"])
    # 9 complete blocks leave one for the first summary page, so the switch costs nothing.
    assert rows[switch]["num_computed"] // BLOCK == 9
    assert_bounded(rows, 8, BLOCK)
    dense = backend.run(engine, requests, settings={"budget_blocks": 64})
    assert reply.tokens[0][: 9 * BLOCK - 101] == dense.tokens[0][: 9 * BLOCK - 101]
    assert reply.tokens != dense.tokens
    assert reply.pool_after == reply.pool_before


def max_running(reply: Reply) -> int:
    return max(len(step["requests"]) for step in reply.steps)


def test_more_requests_run_at_once_than_stock_vllm_has_room_for(
    stock: EngineProcess, backend: EngineProcess, engine: dict[str, Any]
) -> None:
    # Each request takes 130 blocks of 16 when dense; the pool has 300, 150 of 32.
    requests = random_requests([2040] * 8, 40)
    without = {key: value for key, value in engine.items() if key != "speculative_config"}
    without |= {"max_model_len": 2300}
    pool = {"num_gpu_blocks_override": 300}
    ours = backend.run(without | pool, requests, settings={"budget_blocks": 16}, sample=True)
    stocks = stock.run(without | {"num_gpu_blocks_override": 150, "block_size": 32}, requests, sample=True)
    print(f"running at once: {max_running(ours)}, in stock vLLM {max_running(stocks)}")
    assert max_running(stocks) == 2
    assert max_running(ours) >= 5
    assert not any(output["was_preempted"] for output in ours.outputs)
    for index in range(len(requests)):
        assert_bounded(rows_of(ours, str(index)), 16, BLOCK)


def test_the_real_model_holds_no_more_than_the_tiny_ones(backend: EngineProcess, smollm2: Path) -> None:
    engine = {"model": str(smollm2), "max_model_len": 4200, "block_size": BLOCK, "max_num_batched_tokens": 1024}
    settings = {"budget_blocks": BUDGET, "host_pool_bytes": "512MiB"}
    reply = backend.run(engine, random_requests([2047], 20, vocab_size=40000), settings=settings, sample=True)
    rows = rows_of(reply, "0")
    assert_bounded(rows, BUDGET, BLOCK)
    print(f"2047 tokens: {rows[-1]['held']} blocks held, dense would hold {-(-rows[-1]['num_computed'] // BLOCK)}")


def test_the_real_model_finds_a_fact_in_the_middle_of_a_long_text_with_an_eighth_of_its_kv(
    backend: EngineProcess, smollm2: Path
) -> None:
    tokenizer = load_tokenizer(str(smollm2))

    def encode(content: str) -> list[int]:
        chat = [{"role": "user", "content": content}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    content = build_needle_prompt(
        find_text().read_text(), Needle(), num_tokens=2048, count_tokens=lambda content: len(encode(content))
    )
    request = {"prompt": encode(content), "params": {"max_tokens": 20, "detokenize": True, "ignore_eos": False}}
    settings = {"budget_blocks": len(request["prompt"]) // 8 // BLOCK, "host_pool_bytes": "256MiB"}
    engine = {"model": str(smollm2), "max_model_len": 2304, "max_num_batched_tokens": 2304, "block_size": BLOCK}
    reply = backend.run(engine, [request], settings=settings)
    assert Needle().is_answered_by(reply.outputs[0]["completions"][0]["text"])
    assert reply.counts["sparse_rows"] == len(reply.tokens[0]) - 1
