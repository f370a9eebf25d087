"""What `Runtime` promises, case by case; tests/property/test_backend_machine.py tries any schedule."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oasiskv.core.cap import CapInput, CapLimits, log_head, log_line
from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import CorruptBlockError, OasisError, UnsupportedError
from oasiskv.engine.handover import Unattached
from oasiskv.engine.pipeline import InlinePipeline, Pipeline, Stage, ThreadPipeline
from oasiskv.engine.plan import Batch
from oasiskv.engine.state import CacheShape
from oasiskv.engine.tiny_worker import Texts, TinyRow, TinyWorker
from oasiskv.kernels.rows import Counter, Row

BLOCK = 16
BUDGET = 3
NUM_LAYERS = 3
SHAPE = CacheShape(
    num_layers=NUM_LAYERS,
    num_target_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    block_size=BLOCK,
    dtype=torch.float32,
    scale=0.4,
)
TEXTS = Texts(2, 400, SHAPE, seed=7)
FP8_SHAPE = replace(SHAPE, is_fp8=True, scale=0.04)
FP8_TEXTS = Texts(2, 400, FP8_SHAPE, seed=7)
Make = Callable[..., TinyWorker]


class Gate(InlinePipeline):
    """Keeps a layer's stages until it is waited for, and notes what happens."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Stage]] = {}
        self.events: list[str] = []

    def submit(self, layer: int, stages: list[Stage]) -> None:
        assert layer not in self.kept
        self.events.append(f"submit {layer}")
        self.kept[layer] = stages

    def wait(self, layer: int) -> bool:
        self.events.append(f"wait {layer}")
        stages = self.kept.pop(layer, [])
        super().submit(layer, stages)
        return bool(stages)

    def fence(self) -> None:
        self.events.append("fence")
        for layer in list(self.kept):
            super().submit(layer, self.kept.pop(layer))

    def close(self) -> None:
        self.fence()


@pytest.fixture
def make() -> Iterator[Make]:
    workers = []

    def build(pipeline: Pipeline | None = None, *, is_fp8: bool = False, **changes: Any) -> TinyWorker:
        settings = {"budget_blocks": BUDGET, "min_cap": 2, "fetch_ratio": 0, **changes}
        worker = TinyWorker(
            LookaheadConfig.from_mapping(settings),
            FP8_SHAPE if is_fp8 else SHAPE,
            FP8_TEXTS if is_fp8 else TEXTS,
            num_engine_blocks=64,
            num_host_blocks=64,
            max_requests=2,
            max_blocks=26,
            pipeline=pipeline or InlinePipeline(),
        )
        workers.append(worker)
        return worker

    yield build
    for worker in workers:
        worker.runtime.close()


def row(request_id: str, num_computed: int, num_new: int, **more: Any) -> TinyRow:
    """Return a row of request `a` or `b`, whose blocks are those from 1 on, or from 31 on."""
    first = 1 if request_id == "a" else 31
    ids = list(range(first, first + -(-(num_computed + num_new) // BLOCK)))
    return TinyRow(request_id=request_id, text=0, num_computed=num_computed, num_new=num_new, block_ids=ids, **more)


def prefill(worker: TinyWorker, request_id: str = "a", num_tokens: int = 8 * BLOCK) -> int:
    """Run a prompt, then its first decode step, which switches it; return the tokens in place."""
    num_complete, first = num_tokens // BLOCK, 0 if request_id == "a" else 30
    host = list(range(first, first + 25))
    worker.run(StepCommands(host_blocks={request_id: host}), [row(request_id, 0, num_tokens)])
    store, switch = {request_id: (0, num_complete)}, {request_id: num_complete}
    worker.run(StepCommands(store=store, switch=switch), [row(request_id, num_tokens, 1)])
    return num_tokens + 1


def decode(worker: TinyWorker, num_tokens: int, count: int, request_id: str = "a") -> int:
    for _ in range(count):
        worker.run(StepCommands(), [row(request_id, num_tokens, 1)])
        num_tokens += 1
    return num_tokens


def test_a_sparse_row_lists_its_slots_then_its_active_blocks(make: Make) -> None:
    worker = make()
    prefill(worker, "a", 8 * BLOCK + 15)
    rows = [row("b", 0, 20), row("a", 9 * BLOCK, 2, num_drafts=1, has_usable_draft=True)]
    worker.run(StepCommands(host_blocks={"b": [40, 41]}), rows)
    plan = worker.runtime.plan
    assert plan is not None
    assert plan.seq_lens.tolist() == [20, BUDGET * BLOCK + 2]
    assert plan.block_table[0, :2].tolist() == [31, 32]
    assert plan.block_table[1, : BUDGET + 1].tolist() == [1, 2, 3, 10]
    assert (plan.num_rows, plan.num_sparse) == (2, 1)
    assert plan.rows[0, Row.REQUEST] == -1
    assert plan.rows[1].tolist() == [worker.slot_of("a"), 9, 3, 9, 2]


def test_a_draft_token_in_the_next_block_gives_two_active_ones(make: Make) -> None:
    worker = make()
    prefill(worker, "a", 8 * BLOCK + 14)
    worker.run(StepCommands(), [row("a", 8 * BLOCK + 15, 2, num_drafts=1)])
    plan = worker.runtime.plan
    assert plan is not None
    assert plan.block_table[:, : BUDGET + 2].tolist() == [[1, 2, 3, 9, 10]]
    assert plan.seq_lens.tolist() == [BUDGET * BLOCK + BLOCK + 1]


def test_a_batch_without_sparse_rows_reads_the_engine_s_own_table(make: Make) -> None:
    gate = Gate()
    worker = make(gate)
    worker.run(StepCommands(host_blocks={"a": [0, 1]}), [row("a", 0, 20)])
    plan = worker.runtime.plan
    assert plan is not None
    assert plan.block_table[:, :2].tolist() == [[1, 2]]
    assert plan.seq_lens.tolist() == [20]
    assert [event for event in gate.events if event.startswith("submit")] == []


def test_a_layer_waits_for_its_own_background_and_no_other_before_it_writes(make: Make) -> None:
    gate = Gate()
    worker = make(gate)
    num_tokens = prefill(worker)
    gate.events.clear()
    decode(worker, num_tokens, 1)
    assert gate.events == [f"{verb} {layer}" for layer in range(NUM_LAYERS) for verb in ("wait", "submit")]


def test_the_background_is_over_before_a_released_request_s_blocks_can_be_used(make: Make) -> None:
    gate = Gate()
    worker = make(gate)
    prefill(worker)
    assert sorted(gate.kept) == [0, 1, 2]
    worker.runtime.apply(StepCommands())
    assert sorted(gate.kept) == [0, 1, 2]
    worker.runtime.apply(StepCommands(released=("a",)))
    assert gate.kept == {}


def test_a_request_that_comes_again_starts_from_nothing(make: Make) -> None:
    worker = make()
    first = [prefill(worker), worker.resident("a", 0)]
    decode(worker, 8 * BLOCK + 1, 2 * BLOCK)
    worker.run(StepCommands(released=("a",)), [])
    second = [prefill(worker), worker.resident("a", 0)]
    assert first == second
    decode(worker, 8 * BLOCK + 1, BLOCK)


def test_the_slot_of_a_released_request_is_cleared_for_the_next_one(make: Make) -> None:
    worker = make()
    prefill(worker)
    slot, sets = worker.slot_of("a"), worker.sets
    # In the step in which the first one left.
    worker.run(StepCommands(released=("a",), host_blocks={"b": [5, 6]}), [row("b", 0, 20)])
    assert worker.slot_of("b") == slot
    assert int(sets.num_complete[slot]) == 0
    assert sets.host_table[slot].tolist() == [5, 6] + [0] * 24
    assert not any(tensor[:, slot].any() for tensor in (sets.resident, sets.stamp))
    assert not sets.page_ids[slot].any()


def test_host_blocks_follow_those_a_request_has(make: Make) -> None:
    worker = make()
    worker.runtime.apply(StepCommands(host_blocks={"a": [4, 5]}))
    worker.runtime.apply(StepCommands(host_blocks={"a": [9], "b": [1]}))
    table = worker.sets.host_table
    assert table[worker.slot_of("a"), :4].tolist() == [4, 5, 9, 0]
    assert table[worker.slot_of("b"), :2].tolist() == [1, 0]


def test_late_units_are_those_fetched_by_layers_that_were_waited_for(make: Make) -> None:
    worker = make(ThreadPipeline(NUM_LAYERS, hold_layers=5))
    decode(worker, prefill(worker), 20)
    counts = worker.runtime.counts()
    assert counts["late_layers"] == NUM_LAYERS * 20
    assert counts["late"] == counts["fetched"] > 0  # the last step's are in neither yet
    assert make().runtime.counts()["late"] == 0


def test_every_step_s_selection_keeps_to_the_cap_of_that_step_whenever_it_runs(make: Make, tmp_path: Path) -> None:
    limits, caps = CapLimits(least=1, most=BUDGET, first=2), [1, 3, 2, 1, 1, 3, 2, 3]
    log = tmp_path / "cap.jsonl"
    lines = [log_head(limits), *(log_line(CapInput(num_rows=1), cap) for cap in caps)]
    log.write_text("\n".join(lines) + "\n")
    settings = {"cap": "auto", "min_cap": 1, "debug_cap_replay": str(log), "debug_verify": True}
    for pipeline in (InlinePipeline(), ThreadPipeline(NUM_LAYERS, hold_layers=5)):
        worker = make(pipeline, **settings)
        num_tokens = prefill(worker)
        seen = []
        for _ in range(10):  # the prompt and the switch took the first two
            num_tokens = decode(worker, num_tokens, 1)
            seen.append(worker.runtime.caps.cap)
        assert seen == [*caps[2:], 3, 3, 3, 3]
        worker.runtime.fence()
        assert worker.runtime.counts()["cap_changes"] == 6


@pytest.mark.parametrize("prediction", ["lookahead", "previous", "on-demand", "resident"])
def test_each_rule_of_prediction_does_what_it_says_with_and_without_drafts(make: Make, prediction: str) -> None:
    # The worker compares residency, bytes and attention of every layer with the rule in plain Python.
    worker = make(ThreadPipeline(NUM_LAYERS, hold_layers=2), prediction=prediction, debug_verify=True)
    num_tokens = prefill(worker)
    for step in range(2 * BLOCK):
        drafts = {"num_drafts": 1, "has_usable_draft": step % 4 == 1} if step % 2 else {}
        worker.run(StepCommands(), [row("a", num_tokens, 1 + len(drafts) // 2, **drafts)])
        num_tokens += 1
    worker.runtime.fence()
    counts = worker.runtime.counts()
    assert (counts["source_draft"] > 0) == (prediction in ("lookahead", "resident"))
    assert (counts["fetched"] == 0) == (prediction == "resident")
    assert (counts["late"] == counts["fetched"]) == (prediction in ("on-demand", "resident"))


def test_on_demand_each_layer_attends_to_what_its_own_query_chose(make: Make) -> None:
    gate = Gate()
    worker = make(gate, prediction="on-demand", fetch_ratio=1)
    num_tokens = prefill(worker)
    gate.events.clear()
    decode(worker, num_tokens, 1)
    assert gate.events == [f"wait {layer}" for layer in range(NUM_LAYERS)]


def test_nothing_is_late_where_everything_runs_inline(make: Make) -> None:
    worker = make()
    decode(worker, prefill(worker), 20)
    counts = worker.runtime.counts()
    assert counts["late"] == counts["late_layers"] == 0
    assert counts["fetched"] > 0


def test_counts_add_up_while_the_background_runs(make: Make) -> None:
    gate = Gate()
    worker = make(gate)
    num_tokens = prefill(worker)
    for _ in range(5):
        num_tokens = decode(worker, num_tokens, 1)
        # Half of a layer's background: what it counts is not told before it is over.
        for stages in gate.kept.values():
            stages.pop(0)()
            stages.pop(0)()
        before = worker.runtime.counts()
        assert before["predicted"] == before["hit"] + before["fetched"] + before["deferred"]
        assert before["predicted"] < worker.sets.counters[..., Counter.PREDICTED].sum()
    worker.runtime.fence()
    assert worker.runtime.counts()["predicted"] == 6 * NUM_LAYERS * SHAPE.num_kv_heads * BUDGET


def test_bytes_are_counted_by_unit(make: Make) -> None:
    worker = make()
    decode(worker, prefill(worker), BLOCK)  # one block becomes final
    counts = worker.runtime.counts()
    worker.runtime.fence()
    counts = worker.runtime.counts()
    assert counts["load_bytes"] == counts["fetched"] * SHAPE.unit_bytes
    assert counts["store_bytes"] == 9 * SHAPE.host_block_bytes
    assert (counts["switches"], counts["sparse_rows"]) == (1, 17)


def test_of_fp8_units_real_bytes_are_counted(make: Make) -> None:
    worker = make(is_fp8=True)
    decode(worker, prefill(worker), BLOCK)
    worker.runtime.fence()
    counts = worker.runtime.counts()
    unit_bytes = BLOCK * 2 * 4 + 8
    assert counts["load_bytes"] == counts["fetched"] * unit_bytes > 0
    assert counts["store_bytes"] == 9 * NUM_LAYERS * 2 * unit_bytes


def test_with_fp8_units_a_dense_request_stays_exact_and_a_sparse_one_is_rounded(make: Make) -> None:
    worker = make(is_fp8=True, debug_verify=True)
    worker.run(StepCommands(host_blocks={"a": list(range(25))}), [row("a", 0, 8 * BLOCK)])
    exact = [cache[1:9].clone() for cache in worker.kv_caches]
    worker.run(StepCommands(store={"a": (0, 8)}), [row("a", 8 * BLOCK, 1)])
    assert all(torch.equal(cache[1:9], was) for cache, was in zip(worker.kv_caches, exact, strict=True))
    worker.run(StepCommands(switch={"a": 8}), [row("a", 8 * BLOCK + 1, 1)])
    sink = [cache[1] for cache in worker.kv_caches]
    assert not any(torch.equal(unit, was[0]) for unit, was in zip(sink, exact, strict=True))
    num_tokens = decode(worker, 8 * BLOCK + 2, 2 * BLOCK)
    worker.runtime.check_invariants()
    worker.kv_caches[1][2, 1, 3, 5] += 4
    with pytest.raises(
        CorruptBlockError, match=r"^resident: bytes differ from host memory at \(head, slot\) \[\[1, 1\]\]"
    ):
        run_bare_step(worker, num_tokens)


def test_requests_with_fp8_units_are_not_handed_over(make: Make) -> None:
    with pytest.raises(UnsupportedError, match=r"^host_dtype: expected auto where requests are handed over, got fp8"):
        make(is_fp8=True).runtime.attach(Unattached())


def test_rows_look_ahead_with_the_draft_token_where_it_can_be_used(make: Make) -> None:
    worker = make()
    num_tokens = prefill(worker)
    worker.run(StepCommands(), [row("a", num_tokens, 2, num_drafts=1, has_usable_draft=True, is_accepted=True)])
    slot, own, draft = worker.slot_of("a"), num_tokens, num_tokens + 1
    assert torch.equal(worker.sets.query[0, slot], TEXTS.query[0, 0, draft])
    # The drafter knows no better than the last token that is certain.
    assert torch.equal(worker.sets.query[2, slot], TEXTS.query[0, 2, own])
    worker.run(StepCommands(), [row("a", num_tokens, 2, num_drafts=1)])
    assert torch.equal(worker.sets.query[0, slot], TEXTS.query[0, 0, own])
    counts = worker.runtime.counts()
    assert (counts["source_draft"], counts["source_self"]) == (1, 2)


def test_the_first_sparse_step_looks_ahead_by_its_own_token_whatever_drafts_there_are(make: Make) -> None:
    worker = make()
    worker.run(StepCommands(host_blocks={"a": list(range(25))}), [row("a", 0, 8 * BLOCK)])
    worker.run(StepCommands(store={"a": (0, 8)}), [row("a", 8 * BLOCK, 1)])
    drafted = row("a", 8 * BLOCK + 1, 2, num_drafts=1, has_usable_draft=True)
    worker.run(StepCommands(switch={"a": 8}), [drafted])
    assert torch.equal(worker.sets.query[0, worker.slot_of("a")], TEXTS.query[0, 0, 8 * BLOCK + 1])
    assert worker.runtime.counts()["source_self"] == 1
    worker.run(StepCommands(), [row("a", 8 * BLOCK + 2, 2, num_drafts=1, has_usable_draft=True)])
    assert worker.runtime.counts()["source_draft"] == 1


def test_a_block_that_ends_while_the_drafter_is_left_out_is_complete_in_its_layer_too(make: Make) -> None:
    worker = make(debug_verify=True)
    num_tokens = prefill(worker)
    for has_drafter_pass in (False, True):
        for _ in range(BLOCK + 1):
            worker.run(StepCommands(), [row("a", num_tokens, 1)], has_drafter_pass=has_drafter_pass)
            num_tokens += 1
        worker.run(StepCommands(), [])
        assert worker.was_drafter_left_out == (not has_drafter_pass)
    assert worker.num_complete["a"] == 10


def test_a_poisoned_slot_is_huge_from_its_selection_to_its_transfer(make: Make) -> None:
    gate = Gate()
    worker = make(gate, debug_poison=True)
    num_tokens = prefill(worker)
    num_poisoned = 0
    for _ in range(10):
        num_tokens = decode(worker, num_tokens, 1)
        for stages in gate.kept.values():
            stages.pop(0)()
            stages.pop(0)()
        poisoned = worker.kv_caches[0] == 1e4
        planned = int((worker.sets.plan[0, :1, ..., 0] >= 0).sum())
        assert int(poisoned.sum()) == planned * BLOCK * SHAPE.head_dim
        num_poisoned += planned
    assert num_poisoned > 0
    worker.runtime.fence()
    assert not any(bool((cache == 1e4).any()) for cache in worker.kv_caches)


def corrupt_bytes(worker: TinyWorker) -> None:
    worker.kv_caches[1][2, 1, 3, 5] += 1


def repeat_a_block(worker: TinyWorker) -> None:
    resident = worker.sets.resident[1, worker.slot_of("a"), 0]
    resident[2] = resident[1]


def name_an_active_block(worker: TinyWorker) -> None:
    worker.sets.resident[0, worker.slot_of("a"), 1, 2] = 8


def lose_the_sink(worker: TinyWorker) -> None:
    resident = worker.sets.resident[0, worker.slot_of("a"), 0]
    resident[0] = next(block for block in range(1, 8) if block not in resident.tolist())


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (corrupt_bytes, r"bytes differ from host memory at \(head, slot\) \[\[1, 1\]\] \(layer 1, request slot"),
        (repeat_a_block, "expected each block once"),
        (name_an_active_block, "expected blocks below 8"),
        (lose_the_sink, "expected the sink blocks"),
    ],
)
def test_a_working_set_that_is_not_what_it_should_be_is_found(
    make: Make, harm: Callable[[TinyWorker], None], message: str
) -> None:
    worker = make(debug_verify=True)
    num_tokens = prefill(worker)
    decode(worker, num_tokens, 3)
    worker.runtime.check_invariants()
    harm(worker)
    with pytest.raises(CorruptBlockError, match=rf"^resident: .*{message}"):
        worker.runtime.check_invariants()
    with pytest.raises(CorruptBlockError, match=rf"^resident: .*{message}"):
        run_bare_step(worker, num_tokens + 3)


def run_bare_step(worker: TinyWorker, num_computed: int) -> None:
    """Run what of a step comes before attention, without the test's own checks."""
    one = row("a", num_computed, 1)
    worker.runtime.apply(StepCommands())
    worker.runtime.begin_step(
        Batch(
            request_ids=["a"],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([num_computed + 1], dtype=torch.int32),
            block_table=torch.tensor([one.block_ids], dtype=torch.int32),
            num_drafts=[0],
            has_usable_draft=[False],
        )
    )
    for layer in range(NUM_LAYERS):
        worker.runtime.before_write(layer)


def test_a_failed_background_fails_the_next_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(ThreadPipeline(NUM_LAYERS))
    num_tokens = prefill(worker)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("oasiskv.engine.runtime.transfer", fail)
    with pytest.raises(OasisError, match="background work failed: MemoryError"):
        decode(worker, num_tokens, 2)
    with pytest.raises(OasisError, match="background work failed: MemoryError"):
        worker.runtime.apply(StepCommands(released=("a",)))


def test_there_is_no_plan_outside_a_step(make: Make) -> None:
    worker = make()
    has_plan = [worker.runtime.plan is not None]
    prefill(worker)
    has_plan.append(worker.runtime.plan is not None)
    worker.runtime.apply(StepCommands())
    has_plan.append(worker.runtime.plan is not None)
    assert has_plan == [False, True, False]


def test_close_finishes_the_background_and_gives_host_memory_back(make: Make) -> None:
    worker = make(ThreadPipeline(NUM_LAYERS, hold_layers=5))
    prefill(worker)
    worker.runtime.close()
    counters = worker.sets.counters
    assert bool((counters[..., Counter.PREDICTED] == BUDGET).all())
    with pytest.raises(RuntimeError, match="the host pool is closed"):
        _ = worker.pool.units
