"""What a request begins with comes beside the steps of others, and into whatever room it has."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oasiskv.core.commands import Prefix, StepCommands
from oasiskv.core.errors import PeerUnavailableError
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine import inbox
from oasiskv.engine.pipeline import Pipeline, ThreadPipeline
from oasiskv.engine.tiny_handover import (
    BLOCK,
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


@pytest.mark.parametrize(("room", "mode"), [(0, "capped"), (1, "full"), (3, "partial"), (6, "capped")])
def test_a_request_goes_on_with_any_room_as_it_would_in_one_worker(make: Make, room: int, mode: str) -> None:
    single, sender = make(handover_mode=mode), make(handover_mode=mode)
    receiver = make(ThreadPipeline(SHAPE.num_layers, hold_layers=1), handover_mode=mode)
    shelf, num_tokens = Shelf(), 19 * BLOCK + 7
    hand_over(sender, shelf, num_tokens)
    prefill(single, num_tokens)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens, room=room)
    receiver.run(StepCommands(), [row("a", num_tokens, 1)])
    for step in range(1, BLOCK + 3):
        rows = [row("a", num_tokens + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), single.run(StepCommands(), rows))
        receiver.runtime.fence()
        absent = receiver.runtime.inbox.fetched.absent[:, receiver.slot_of("a"), :19]
        assert int((~absent).sum(1).max()) <= room
    # The parts of host blocks that are neither in its room nor its own were not touched.
    assert bool((receiver.pool.units[host_ids("a")[room:19]] == -99.0).all())
    assert max(shelf.reads.values()) > 1


@pytest.mark.parametrize("seed", range(2))
def test_a_room_grows_and_shrinks_at_any_time_without_a_trace_in_the_tokens(make: Make, seed: int) -> None:
    single, sender, receiver = make(), make(), make(ThreadPipeline(SHAPE.num_layers, hold_layers=2))
    shelf, num_tokens, draw = Shelf(), 19 * BLOCK + 7, random.Random(seed)
    hand_over(sender, shelf, num_tokens)
    prefill(single, num_tokens)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens, room=5)
    receiver.run(StepCommands(), [row("a", num_tokens, 1)])
    ids, free = host_ids("a")[:5], host_ids("a")[5:19]
    for step in range(1, BLOCK):
        num_kept, taken = draw.choice([None, len(ids), draw.randrange(len(ids) + 1)]), list[int]()
        if num_kept is not None:
            ids, taken = ids[:num_kept], ids[num_kept:]
        added, free = free[: draw.randrange(4)], free[draw.randrange(4) :]
        free = [block for block in free if block not in added] + taken
        ids = ids + added
        rows = [row("a", num_tokens + step, 1)]
        outputs = receiver.run(StepCommands(room={"a": (num_kept, added)}), rows)
        assert_equal(outputs, single.run(StepCommands(), rows))
        receiver.runtime.fence()
        # What was taken back is another's at once.
        receiver.pool.units[taken] = -99.0
        receiver.runtime.check_invariants()


def test_a_request_comes_while_another_decodes_and_runs_once_all_of_it_is_there(make: Make) -> None:
    single, sender, shelf = make(), make(), Shelf()
    receiver = make(ThreadPipeline(SHAPE.num_layers, hold_layers=1))
    hand_over(sender, shelf, 9 * BLOCK + 3)
    prefill(single, 9 * BLOCK + 3)
    prefill(receiver, 8 * BLOCK, "b")
    receiver.runtime.attach(shelf)
    shelf.is_slow.add("lease")
    receiver.run(orders(receiver, 9 * BLOCK + 3), [row("b", 8 * BLOCK + 1, 1)])
    # One read follows another: the map, what is read whole, and the first set of each layer.
    for step in range(2 + SHAPE.num_layers):
        assert receiver.runtime.take_arrived() == (set(), {})
        receiver.run(StepCommands(), [row("b", 8 * BLOCK + 2 + step, 1)])
        assert len(shelf.reading) == 1
        shelf.end_read()
    assert receiver.runtime.take_arrived() == ({"a"}, {})
    assert receiver.runtime.take_arrived() == (set(), {})
    shelf.is_slow.clear()
    last = 8 * BLOCK + 4 + SHAPE.num_layers
    receiver.run(StepCommands(), [row("b", last, 1), row("a", 9 * BLOCK + 3, 1)])
    for step in range(1, BLOCK):
        rows = [row("a", 9 * BLOCK + 3 + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), single.run(StepCommands(), rows))


@pytest.mark.parametrize("num_reads", range(5))
def test_a_request_that_ends_while_it_comes_gives_everything_back_once_nothing_writes_for_it(
    make: Make, num_reads: int
) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 9 * BLOCK + 3)
    receiver.runtime.attach(shelf)
    shelf.is_slow.add("lease")
    receiver.run(orders(receiver, 9 * BLOCK + 3), [])
    slot = receiver.slot_of("a")
    for _ in range(num_reads):
        shelf.end_read()
    receiver.run(StepCommands(released=("a",)), [])
    receiver.pool.units[host_ids("a")] = -99.0
    assert receiver.runtime.take_arrived() == (set(), {})
    assert shelf.forgotten == []
    shelf.end_read()
    assert shelf.reading == []
    assert receiver.runtime.take_arrived() == ({"a"}, {})
    assert shelf.forgotten == ["lease"]
    assert bool((receiver.pool.units[host_ids("a")] == -99.0).all())
    assert not receiver.runtime.inbox.fetched.absent.any()
    shelf.is_slow.clear()
    begin(receiver, 9 * BLOCK + 3)
    assert receiver.slot_of("a") == slot
    receiver.run(StepCommands(), [row("a", 9 * BLOCK + 3, 1)])


@pytest.mark.parametrize("num_reads", range(5))
def test_a_peer_that_goes_away_while_a_request_comes_fails_it(make: Make, num_reads: int) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    hand_over(sender, shelf, 9 * BLOCK + 3)
    receiver.runtime.attach(shelf)
    shelf.is_slow.add("lease")
    receiver.run(orders(receiver, 9 * BLOCK + 3), [])
    for _ in range(num_reads):
        shelf.end_read()
    shelf.end_read(PeerUnavailableError("staging: away"))
    assert shelf.reading == []
    over, failed = receiver.runtime.take_arrived()
    assert over == failed.keys() == {"a"}
    receiver.run(StepCommands(released=("a",)), [])
    assert receiver.runtime.take_arrived() == (set(), {})
    assert shelf.forgotten == ["lease"]


def test_the_scheduler_hears_how_many_blocks_a_request_fetched_when_they_are_more(make: Make) -> None:
    sender, receiver, shelf = make(), make(), Shelf()
    num_tokens = 19 * BLOCK
    hand_over(sender, shelf, num_tokens)
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens, room=4)
    told = []
    for step in range(12):
        told += [wanted["a"]] if (wanted := receiver.runtime.inbox.take_wanted()) else []
        receiver.run(StepCommands(), [row("a", num_tokens + step, 1)])
        most = max(
            len({index for _, index, of_layer in shelf.reads if of_layer == layer and index < 19})
            for layer in range(SHAPE.num_layers)
        )
    assert told == sorted(set(told))
    told += [wanted["a"]] if (wanted := receiver.runtime.inbox.take_wanted()) else []
    assert told[-1] == most > 4
    assert receiver.runtime.inbox.take_wanted() == {}


@pytest.mark.parametrize("num_loaded", [1, 5, 8])
def test_a_prompt_whose_first_blocks_are_loaded_goes_on_as_if_all_of_it_was_computed(
    make: Make, num_loaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_BUFFER_BYTES", 3 * SHAPE.host_block_bytes)
    whole, first, second, receiver, shelf = make(), make(), make(), make(), Shelf()
    num_tokens = 9 * BLOCK + 3
    hand_over(first, shelf, 8 * BLOCK, "a", "before")
    second.runtime.attach(shelf)
    shelf.is_slow.add("before")
    prefix = Prefix(lease="before", num_blocks=num_loaded, block_ids=tuple(range(1, num_loaded + 1)))
    second.run(StepCommands(load={"a": prefix}), [])
    for _ in range(-(-num_loaded // 3)):
        assert second.runtime.take_arrived() == (set(), {})
        shelf.end_read()
    assert shelf.reading == []
    assert second.runtime.take_arrived() == ({"a"}, {})
    shelf.reads.clear()
    # The first step writes what was loaded through, too; it is in the lease already.
    orders = StepCommands(host_blocks={"a": host_ids("a")}, stage={"a": "lease"}, store={"a": (0, num_loaded)})
    num_middle = 8 * BLOCK
    middle = [row("a", num_loaded * BLOCK, num_middle - num_loaded * BLOCK)] if num_loaded < 8 else []
    rest = StepCommands(store={"a": (num_loaded, 8)} if middle else {})
    if middle:
        second.run(orders, middle)
        whole.run(StepCommands(host_blocks={"a": host_ids("a")}), [row("a", 0, num_loaded * BLOCK)])
        whole.run(StepCommands(store={"a": (0, num_loaded)}), middle)
    else:
        rest = orders
        whole.run(StepCommands(host_blocks={"a": host_ids("a")}), [row("a", 0, num_middle)])
    last = [row("a", num_middle, num_tokens - num_middle)]
    assert_equal(second.run(rest, last), whole.run(StepCommands(store={"a": (num_loaded if middle else 0, 8)}), last))
    switch = StepCommands(store={"a": (8, 9)}, switch={"a": 9})
    decoded = [row("a", num_tokens, 1)]
    assert_equal(second.run(switch, decoded), whole.run(switch, decoded))
    assert second.runtime.outbox.take("lease")
    written = {index for lease, index, _ in shelf.parts if lease == "lease"}
    assert written == set(range(num_loaded, HandoverLayout.of(num_tokens, BLOCK, second.sets.layout).num_blocks))
    second.run(StepCommands(released=("a",)), [])
    assert shelf.forgotten == ["before"]
    # The lease holds the loaded blocks as they were before.
    shelf.parts |= {
        ("lease", index, layer): part
        for (lease, index, layer), part in shelf.parts.items()
        if lease == "before"
        if index < num_loaded
    }
    receiver.runtime.attach(shelf)
    begin(receiver, num_tokens)
    receiver.run(StepCommands(), decoded)
    for step in range(1, 8):
        rows = [row("a", num_tokens + step, 1)]
        assert_equal(receiver.run(StepCommands(), rows), whole.run(StepCommands(), rows))


def test_a_prompt_that_ends_or_whose_blocks_are_lost_while_it_loads_lets_go_of_everything(make: Make) -> None:
    first, second, shelf = make(), make(), Shelf()
    hand_over(first, shelf, 8 * BLOCK, "a", "before")
    second.runtime.attach(shelf)
    shelf.is_slow.add("before")
    prefix = Prefix(lease="before", num_blocks=4, block_ids=(1, 2, 3, 4))
    second.run(StepCommands(load={"a": prefix}), [])
    second.run(StepCommands(released=("a",)), [])
    assert second.runtime.take_arrived() == (set(), {})
    shelf.end_read()
    assert second.runtime.take_arrived() == ({"a"}, {})
    second.run(StepCommands(load={"b": prefix}), [])
    shelf.end_read(PeerUnavailableError("staging: away"))
    over, failed = second.runtime.take_arrived()
    assert over == failed.keys() == {"b"}
    second.run(StepCommands(released=("b",)), [])
    assert shelf.forgotten == ["before", "before"]
    shelf.is_slow.clear()
    prefill(second, 9 * BLOCK)
