"""A request that one worker prefills and another decodes runs as it would in one worker: invariant 8."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from oasiskv.core.commands import StepCommands
from oasiskv.core.errors import (
    CorruptBlockError,
    InvalidRequestError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine import device_outbox, handover, tiny_handover
from oasiskv.engine.pipeline import Pipeline, ThreadPipeline
from oasiskv.engine.tiny_handover import (
    BLOCK,
    BUDGET,
    SHAPE,
    Shelf,
    assert_equal,
    begin,
    hand_over,
    host_ids,
    make_worker,
    orders,
    prefill,
    row,
)
from oasiskv.engine.tiny_worker import TinyWorker

Make = Callable[..., TinyWorker]


@pytest.fixture(params=[False, True], ids=["called", "asked"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Make workers whose background calls for missed blocks, as on a CPU, or asks for them, as on a GPU."""
    workers = []

    def build(pipeline: Pipeline | None = None, **changes: Any) -> TinyWorker:
        workers.append(make_worker(pipeline, asks=request.param, **changes))
        return workers[-1]

    yield build
    for worker in workers:
        worker.runtime.close()


@pytest.mark.parametrize(
    ("num_tokens", "hold_layers", "changes"),
    [
        (6 * BLOCK, None, {}),
        (6 * BLOCK + 1, 2, {}),
        (9 * BLOCK + 15, 1, {"min_cap": 1}),
        (19 * BLOCK + 7, 0, {"summary": "mid", "score_alpha": 0}),
        (19 * BLOCK + 7, 2, {"sink_blocks": 0}),
        (19 * BLOCK + 7, 1, {"summary_dtype": "fp8"}),
    ],
)
def test_a_request_decodes_after_a_handover_as_it_would_in_one_worker(
    make: Make, num_tokens: int, hold_layers: int | None, changes: dict[str, Any]
) -> None:
    single, sender = make(**changes), make(**changes)
    receiver = make(ThreadPipeline(SHAPE.num_layers, hold_layers=hold_layers), **changes)
    shelf = Shelf()
    hand_over(sender, shelf, num_tokens)
    expected = prefill(single, num_tokens)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens)
    assert_equal(receiver.run(StepCommands(), [row("a", num_tokens, 1)]), expected)
    for step in range(1, 2 * BLOCK + 3):
        rows = [row("a", num_tokens + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), single.run(StepCommands(), rows))
        receiver.runtime.fence()
        for layer in range(SHAPE.num_layers):
            assert receiver.resident("a", layer) == single.resident("a", layer)


def test_two_requests_are_handed_over_one_while_the_other_decodes(make: Make) -> None:
    single, sender = make(), make()
    receiver = make(ThreadPipeline(SHAPE.num_layers, hold_layers=1))
    shelf = Shelf()
    hand_over(sender, shelf, 9 * BLOCK + 3, "a", "lease a")
    hand_over(sender, shelf, 12 * BLOCK, "b", "lease b")
    receiver.runtime.attach(shelf)
    begin(receiver, 9 * BLOCK + 3, "a", "lease a")
    receiver.run(StepCommands(), [row("a", 9 * BLOCK + 3, 1)])
    prefill(single, 9 * BLOCK + 3, "a")
    receiver.run(orders(receiver, 12 * BLOCK, "b", "lease b"), [row("a", 9 * BLOCK + 4, 1)])
    assert receiver.runtime.take_arrived() == ({"b"}, {})
    receiver.run(StepCommands(), [row("a", 9 * BLOCK + 5, 1), row("b", 12 * BLOCK, 1)])
    single.run(StepCommands(), [row("a", 9 * BLOCK + 4, 1)])
    single.run(StepCommands(), [row("a", 9 * BLOCK + 5, 1)])
    prefill(single, 12 * BLOCK, "b")
    for step in range(1, BLOCK):
        rows = [row("a", 9 * BLOCK + 5 + step, 1), row("b", 12 * BLOCK + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), single.run(StepCommands(), rows))


def test_a_request_that_was_handed_over_decodes_beside_one_that_prefilled_here(make: Make) -> None:
    sender, receiver, shelf = make(), make(ThreadPipeline(SHAPE.num_layers)), Shelf()
    hand_over(sender, shelf, 9 * BLOCK)
    receiver.runtime.attach(shelf)
    prefill(receiver, 8 * BLOCK, "b")
    receiver.run(orders(receiver, 9 * BLOCK), [row("b", 8 * BLOCK + 1, 1)])
    assert receiver.runtime.take_arrived() == ({"a"}, {})
    for step in range(BLOCK):
        receiver.run(StepCommands(), [row("b", 8 * BLOCK + 2 + step, 1), row("a", 9 * BLOCK + step, 1)])
    receiver.runtime.check_invariants()


def test_what_is_never_selected_never_crosses_and_nothing_crosses_twice(make: Make) -> None:
    sender, receiver, shelf = make(), make(ThreadPipeline(SHAPE.num_layers)), Shelf()
    num_tokens = 19 * BLOCK + 5
    hand_over(sender, shelf, num_tokens)
    layout = HandoverLayout.of(num_tokens, BLOCK, receiver.sets.layout)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens)
    receiver.run(StepCommands(), [row("a", num_tokens, 1)])
    receiver.runtime.fence()
    inbox, seen = receiver.runtime.inbox, [set[int]() for _ in range(SHAPE.num_layers)]
    first_set = inbox.admitted_bytes
    for step in range(1, 12):
        for layer in range(SHAPE.num_layers):
            seen[layer] |= {block for head in receiver.resident("a", layer) for block in head}
        receiver.run(StepCommands(), [row("a", num_tokens + step, 1)])
        receiver.runtime.fence()
    assert set(shelf.reads.values()) == {1}
    for layer in range(SHAPE.num_layers):
        read = {index for _, index, of_layer in shelf.reads if of_layer == layer}
        here = (~inbox.fetched.absent[layer, receiver.slot_of("a"), : layout.num_complete]).nonzero().flatten().tolist()
        assert read == {*here, layout.active, *layout.pages, layout.map}
        assert seen[layer] <= set(here)
        assert len(here) < layout.num_complete
    part_bytes = SHAPE.num_kv_heads * SHAPE.unit_bytes
    assert inbox.admitted_bytes == first_set
    assert inbox.admitted_bytes + sum(inbox.missed_bytes) == len(shelf.reads) * part_bytes
    assert sum(inbox.missed_bytes) == sum(inbox.missed_blocks) * part_bytes > 0
    assert inbox.full_bytes == 20 * SHAPE.num_layers * part_bytes


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_every_mode_gives_what_one_worker_gives(make: Make, mode: str) -> None:
    single, sender = make(handover_mode=mode), make(handover_mode=mode)
    receiver = make(ThreadPipeline(SHAPE.num_layers, hold_layers=1), handover_mode=mode)
    shelf, num_tokens = Shelf(), 19 * BLOCK + 7
    hand_over(sender, shelf, num_tokens)
    expected = prefill(single, num_tokens)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens)
    assert_equal(receiver.run(StepCommands(), [row("a", num_tokens, 1)]), expected)
    for step in range(1, BLOCK + 3):
        rows = [row("a", num_tokens + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), single.run(StepCommands(), rows))
    counts = receiver.runtime.counts()
    assert set(shelf.reads.values()) == {1}
    assert (counts["missed"] == 0) == (mode == "full")
    assert (counts["admitted_bytes"] > counts["handover_bytes"]) == (mode == "full")


def test_misses_of_all_requests_are_read_together_layer_by_layer(make: Make) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 19 * BLOCK, "a", "lease a")
    hand_over(sender, shelf, 18 * BLOCK, "b", "lease b")
    receiver.runtime.attach(shelf)
    begin(receiver, 19 * BLOCK, "a", "lease a")
    receiver.run(StepCommands(), [row("a", 19 * BLOCK, 1)])
    begin(receiver, 18 * BLOCK, "b", "lease b")
    receiver.run(StepCommands(), [row("a", 19 * BLOCK + 1, 1), row("b", 18 * BLOCK, 1)])
    calls = shelf.calls
    for step in range(1, 8):
        calls.clear()
        receiver.run(StepCommands(), [row("a", 19 * BLOCK + 1 + step, 1), row("b", 18 * BLOCK + step, 1)])
        assert len(set(calls)) == len(calls), "one read for each layer and request"
        assert [layer for _, layer in calls] == sorted(layer for _, layer in calls)


def test_a_request_whose_first_set_does_not_come_fails_alone(make: Make) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 9 * BLOCK)
    prefill(receiver, 8 * BLOCK, "b")
    receiver.runtime.attach(shelf)
    shelf.lost.add("lease")
    receiver.run(orders(receiver, 9 * BLOCK), [row("b", 8 * BLOCK + 1, 1)])
    slot = receiver.slot_of("a")
    over, failed = receiver.runtime.take_arrived()
    assert over == failed.keys() == {"a"}
    assert receiver.runtime.take_arrived() == (set(), {})
    receiver.run(StepCommands(released=("a",)), [row("b", 8 * BLOCK + 2, 1)])
    assert shelf.forgotten == ["lease"]
    shelf.lost.clear()
    begin(receiver, 9 * BLOCK)
    assert receiver.slot_of("a") == slot
    receiver.run(StepCommands(), [row("b", 8 * BLOCK + 3, 1), row("a", 9 * BLOCK, 1)])


def test_a_miss_that_does_not_come_fails_its_request_alone(make: Make) -> None:
    sender, receiver, shelf = make(), make(debug_verify=True), Shelf()
    hand_over(sender, shelf, 19 * BLOCK, "a", "lease a")
    hand_over(sender, shelf, 18 * BLOCK, "b", "lease b")
    receiver.runtime.attach(shelf)
    begin(receiver, 19 * BLOCK, "a", "lease a")
    receiver.run(StepCommands(), [row("a", 19 * BLOCK, 1)])
    begin(receiver, 18 * BLOCK, "b", "lease b")
    receiver.run(StepCommands(), [row("a", 19 * BLOCK + 1, 1), row("b", 18 * BLOCK, 1)])
    shelf.lost.add("lease a")
    receiver._check_bytes = lambda *_: None  # type: ignore[method-assign]
    receiver._check_outputs = lambda *_: None  # type: ignore[method-assign]
    first_block = int(receiver.sets.slot_ids[receiver.slot_of("a"), 0])
    failed = []
    for step in range(1, 12):
        receiver.run(StepCommands(), [row("a", 19 * BLOCK + 1 + step, 1), row("b", 18 * BLOCK + step, 1)])
        failed += sorted(receiver.runtime.inbox.take_failed_blocks())
    assert failed == [first_block]
    del receiver._check_bytes, receiver._check_outputs
    receiver.run(StepCommands(released=("a",)), [row("b", 18 * BLOCK + 12, 1)])
    receiver.run(StepCommands(), [row("b", 18 * BLOCK + 13, 1)])


def test_what_is_absent_is_forgotten_with_its_request(make: Make) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 9 * BLOCK)
    receiver.runtime.attach(shelf)
    begin(receiver, 9 * BLOCK)
    receiver.run(StepCommands(), [row("a", 9 * BLOCK, 1)])
    assert receiver.runtime.inbox.fetched.absent.any()
    receiver.run(StepCommands(released=("a",)), [])
    assert not receiver.runtime.inbox.fetched.absent.any()
    assert shelf.forgotten == ["lease"]
    prefill(receiver, 12 * BLOCK)


@pytest.mark.parametrize("breakage", ["repeated", "beyond", "negative", "no sink"])
def test_a_map_that_cannot_be_one_is_refused(make: Make, breakage: str) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 9 * BLOCK)
    receiver.runtime.attach(shelf)
    at = HandoverLayout.of(9 * BLOCK, BLOCK, receiver.sets.layout).map
    chosen = shelf.parts["lease", at, 1][1].view(torch.int32).flatten()
    chosen[:BUDGET] = torch.tensor(
        {"repeated": [0, 4, 4], "beyond": [0, 4, 9], "negative": [0, -1, 4], "no sink": [1, 2, 3]}[breakage]
    )
    receiver.run(orders(receiver, 9 * BLOCK), [])
    (ended,) = receiver.runtime.inbox.take_arrived()
    assert isinstance(ended.error, CorruptBlockError)
    assert str(ended.error).startswith("map: ")


def test_a_handover_is_taken_once_all_its_writes_are_over(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    shelf.held = []
    prefill(sender, 9 * BLOCK + 3, lease="lease")
    outbox = sender.runtime.outbox
    sender.run(StepCommands(released=("a",)), [])
    for write in shelf.held:
        assert not outbox.take("lease")
        write.set_result(None)
    assert outbox.take("lease")
    with pytest.raises(InvalidRequestError, match=r"^lease: "):
        outbox.take("lease")
    assert outbox.staged_bytes == 11 * SHAPE.host_block_bytes + SHAPE.host_block_bytes


def test_blocks_of_a_chunk_are_on_their_way_while_the_next_one_is_computed(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    shelf.held = []
    commands = StepCommands(host_blocks={"a": host_ids("a")}, stage={"a": "lease"})
    sender.run(commands, [row("a", 0, 4 * BLOCK)])
    for chunk in range(1, 4):
        assert {index for _, index, _ in shelf.parts} == set(range(4 * (chunk - 1)))
        store = {"a": (4 * (chunk - 1), 4 * chunk)}
        sender.run(StepCommands(store=store), [row("a", 4 * chunk * BLOCK, 4 * BLOCK)])
        assert not any(write.done() for write in shelf.held)


@pytest.fixture
def streamer() -> Iterator[TinyWorker]:
    """Return a worker whose cache is in host memory; one on a device streams nothing."""
    worker = make_worker()
    yield worker
    worker.runtime.close()


def test_a_layer_of_a_chunk_is_on_its_way_before_the_next_one_is_computed(
    streamer: TinyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, shelf = streamer, Shelf()
    sender.runtime.attach(shelf)
    before_write, seen = sender.runtime.before_write, list[tuple[int, set[tuple[int, int]]]]()

    def look(layer: int) -> None:
        seen.append((layer, {(index, of_layer) for _, index, of_layer in shelf.parts}))
        before_write(layer)

    monkeypatch.setattr(sender.runtime, "before_write", look)
    commands = StepCommands(host_blocks={"a": host_ids("a")}, stage={"a": "lease"}, stream={"a": (0, 4)})
    sender.run(commands, [row("a", 0, 4 * BLOCK + 3)])
    targets = range(SHAPE.num_target_layers)
    for layer, parts in seen:
        assert parts == {(index, before) for index in range(4) for before in targets if before < layer}
    assert [layer for layer, _ in seen] == list(range(SHAPE.num_layers))
    # The drafter's layer follows once it is final, and nothing is put twice.
    assert {layer for _, _, layer in shelf.parts} == set(targets)
    puts = list[tuple[int, list[int]]]()
    put = shelf.put

    def note(lease: str, block_indices: Any, first_layer: int, data: torch.Tensor) -> Any:
        puts.append((first_layer, list(block_indices)))
        return put(lease, block_indices, first_layer, data)

    monkeypatch.setattr(shelf, "put", note)
    sender.run(StepCommands(store={"a": (0, 4)}), [row("a", 4 * BLOCK + 3, 4 * BLOCK)])
    assert puts == [(SHAPE.num_target_layers, [0, 1, 2, 3])]


def test_a_request_whose_kv_goes_nowhere_streams_nothing(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    sender.run(StepCommands(host_blocks={"a": host_ids("a")}, stream={"a": (0, 4)}), [row("a", 0, 4 * BLOCK)])
    assert not shelf.parts


def test_a_request_that_ended_before_its_switch_hands_nothing_over(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    commands = StepCommands(host_blocks={"a": host_ids("a")}, stage={"a": "lease"})
    sender.run(commands, [row("a", 0, 4 * BLOCK)])
    sender.run(StepCommands(store={"a": (0, 4)}), [row("a", 4 * BLOCK, 4 * BLOCK)])
    sender.run(StepCommands(released=("a",)), [])
    with pytest.raises(PoolExhaustedError):
        sender.runtime.outbox.take("lease")
    with pytest.raises(InvalidRequestError):
        sender.runtime.outbox.take("lease")


def test_an_engine_without_a_way_to_staging_keeps_nothing_for_a_lease(make: Make) -> None:
    sender = make()
    prefill(sender, 9 * BLOCK, lease="lease")
    assert not sender.runtime.outbox.has("a")
    assert sender.runtime.outbox.counts() == {"staged_bytes": 0, "streamed_bytes": 0}
    with pytest.raises(InvalidRequestError, match=r"^lease: "):
        sender.runtime.take_handover("lease")


def test_an_engine_without_a_way_to_staging_fails_the_request_alone(make: Make) -> None:
    receiver = make()
    receiver.run(orders(receiver, 9 * BLOCK), [])
    over, failed = receiver.runtime.take_arrived()
    assert over == failed.keys() == {"a"}


def test_a_write_that_failed_is_raised_where_the_handover_is_taken(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    shelf.lost.add("lease")
    prefill(sender, 9 * BLOCK, lease="lease")
    with pytest.raises(PeerUnavailableError):
        sender.runtime.outbox.take("lease")


def test_a_prefill_that_begins_anew_stages_everything_anew(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    commands = StepCommands(host_blocks={"a": host_ids("a")}, stage={"a": "lease"})
    sender.run(commands, [row("a", 0, 4 * BLOCK)])
    sender.run(StepCommands(store={"a": (0, 4)}), [row("a", 4 * BLOCK, 4 * BLOCK)])
    sender.run(StepCommands(released=("a",)), [])
    assert not sender.runtime.outbox.has("a")
    shelf.parts.clear()
    prefill(sender, 9 * BLOCK, lease="lease")
    assert sender.runtime.outbox.take("lease")
    layout = HandoverLayout.of(9 * BLOCK, BLOCK, sender.sets.layout)
    assert len(shelf.parts) == layout.num_blocks * SHAPE.num_layers


def test_the_engine_waits_rather_than_holds_ever_more_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    monkeypatch.setattr(handover, "MAX_UNDERWAY_BYTES", 3 * SHAPE.host_block_bytes)
    shelf.held, waited = [], []

    class Patient(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            if not self.done():
                waited.append(self)
                self.set_result(None)
            return super().exception(timeout)

    monkeypatch.setattr(tiny_handover, "Future", Patient)
    monkeypatch.setattr(device_outbox, "Future", Patient)
    prefill(sender, 9 * BLOCK, lease="lease")
    assert len(waited) >= 6
    assert sender.runtime.outbox._underway_bytes <= 3 * SHAPE.host_block_bytes


def test_a_budget_whose_map_does_not_fit_into_a_unit_is_refused(make: Make) -> None:
    worker = make(budget_blocks=SHAPE.unit_bytes // 4 + 1)
    with pytest.raises(UnsupportedError, match=r"^budget_blocks: "):
        worker.runtime.attach(Shelf())


def test_a_way_to_staging_is_closed_when_another_takes_its_place_and_at_the_end(make: Make) -> None:
    worker, first, second = make(), Shelf(), Shelf()
    worker.runtime.attach(first)
    worker.runtime.attach(second)
    assert (first.is_closed, second.is_closed) == (True, False)
    worker.runtime.close()
    assert second.is_closed


def test_what_was_handed_over_is_counted(make: Make) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 19 * BLOCK)
    counts, target = sender.runtime.counts(), SHAPE.num_target_layers / SHAPE.num_layers
    assert counts["staged_bytes"] == 23 * SHAPE.host_block_bytes
    # A device's layers follow in the next step.
    assert counts["streamed_bytes"] == (0 if sender.runtime.asks else 19 * target * SHAPE.host_block_bytes)
    receiver.runtime.attach(shelf)
    begin(receiver, 19 * BLOCK)
    receiver.run(StepCommands(), [row("a", 19 * BLOCK, 1)])
    for step in range(1, 8):
        receiver.run(StepCommands(), [row("a", 19 * BLOCK + step, 1)])
    counts, inbox = receiver.runtime.counts(), receiver.runtime.inbox
    assert counts["handovers"] == 1
    assert counts["admitted_bytes"] == inbox.admitted_bytes > 0
    assert counts["missed_bytes"] == sum(inbox.missed_bytes) > 0
    assert counts["missed"] == sum(inbox.missed_blocks) > 0
    assert counts["handover_bytes"] == 19 * SHAPE.host_block_bytes


def test_a_handover_is_taken_with_a_receipt_and_forgotten_either_way(make: Make) -> None:
    sender, shelf = make(), Shelf()
    sender.runtime.attach(shelf)
    prefill(sender, 9 * BLOCK, lease="lease")
    assert sender.runtime.take_handover("lease") == b"lease"
    assert shelf.forgotten == ["lease"]
    with pytest.raises(InvalidRequestError):
        sender.runtime.take_handover("other")
    assert shelf.forgotten == ["lease", "other"]
