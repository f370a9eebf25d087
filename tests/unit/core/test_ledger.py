"""When a request becomes sparse and what it gives back; `Engine` is vLLM's scheduler reduced to the calls it makes."""

from collections.abc import Iterable
from typing import Any

import pytest

from oasiskv.core.commands import Admission, StepCommands
from oasiskv.core.errors import PoolExhaustedError
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.layout import SparseLayout
from oasiskv.core.ledger import RequestLedger
from oasiskv.core.switch_rule import SwitchRule

BLOCK = 4
LAYOUT = SparseLayout(budget_blocks=3, rows_per_page=4)
LEAST = LAYOUT.least_complete
EARLY = SwitchRule(is_early=True)


class Engine:
    """One step at a time: what was processed, what runs, what the ledger orders and gives back."""

    def __init__(self, num_host_blocks: int = 128, rule: SwitchRule = EARLY, *, brings_all: bool = False) -> None:
        self.host = HostBlockManager(num_host_blocks)
        self.ledger = RequestLedger(LAYOUT, BLOCK, self.host, rule, brings_all=brings_all)
        self.tables: dict[str, list[bool]] = {}
        """By request: whether each block table entry is still held."""
        self.num_free = 1000

    def admit(self, request_id: str, num_tokens: int, max_tokens: int = 10_000) -> None:
        self.ledger.expect(request_id, max_tokens)
        self.ledger.admit(request_id, num_tokens)
        self.tables[request_id] = []

    def step(
        self,
        processed: dict[str, int],
        *,
        runs: Iterable[str] | None = None,
        released: Iterable[str] = (),
        new: int = 2,
    ) -> StepCommands:
        """Allocate for every request in `processed`; those in `runs`, by default all, are scheduled."""
        for request_id, num_processed in processed.items():
            self.give_back(request_id, num_processed)
        scheduled = set(processed if runs is None else runs)
        for request_id in scheduled:
            num_tokens = processed[request_id] + new
            self.ledger.grow(request_id, num_tokens)
            table = self.tables[request_id]
            table += [True] * (-(-num_tokens // BLOCK) - len(table))
        return self.ledger.take_commands({name: processed[name] for name in scheduled}, set(released), self.num_free)

    def give_back(self, request_id: str, num_processed: int) -> list[int]:
        freed = []
        for entry in self.ledger.advance(request_id, num_processed):
            if not self.ledger.is_page(request_id, entry):
                assert self.tables[request_id][entry], f"entry {entry} was given back twice"
                self.tables[request_id][entry] = False
                freed.append(entry)
        return freed

    def held(self, request_id: str) -> list[int]:
        return [entry for entry, is_held in enumerate(self.tables[request_id]) if is_held]


def switched(num_tokens: int) -> Engine:
    """Return an engine in which request `a`, of so many prompt tokens, was told to switch in the last step."""
    engine = Engine()
    engine.admit("a", num_tokens)
    engine.step({"a": 0}, new=num_tokens)
    commands = engine.step({"a": num_tokens})
    assert commands.switch == {"a": num_tokens // BLOCK}
    return engine


def test_a_request_that_fits_stays_dense_until_the_pages_have_a_place() -> None:
    engine = Engine()
    engine.admit("a", 1)
    engine.step({"a": 0}, new=1)
    for num_tokens in range(1, LEAST * BLOCK):
        assert engine.step({"a": num_tokens}).switch == {}
        assert engine.ledger.num_dense_decodes({"a"}) == 1
    assert engine.step({"a": LEAST * BLOCK}).switch == {"a": LEAST}
    assert engine.ledger.is_sparse("a")
    assert engine.ledger.num_dense_decodes({"a"}) == 0


def test_a_prompt_is_not_switched_before_all_of_it_was_processed() -> None:
    engine = Engine()
    engine.admit("a", 60)
    engine.step({"a": 0}, new=40)
    assert engine.step({"a": 40}, new=20).switch == {}
    assert engine.step({"a": 59}, new=1).switch == {}
    assert engine.step({"a": 60}).switch == {"a": 15}


def test_a_request_is_told_to_switch_once_and_only_in_a_step_it_runs_in() -> None:
    engine = Engine()
    engine.admit("a", 60)
    engine.admit("b", 8)
    engine.step({"a": 0, "b": 0}, new=60)
    assert engine.step({"a": 60, "b": 8}, runs=["b"]).switch == {}
    assert not engine.ledger.is_sparse("a")
    assert engine.step({"a": 60, "b": 9}).switch == {"a": 15}
    assert engine.step({"a": 61, "b": 10}).switch == {}


def test_every_final_block_is_stored_once_while_dense_and_none_after_the_switch() -> None:
    engine = Engine()
    engine.admit("a", 10)
    stored: list[int] = []
    for num_processed in [0, 6, 10, 11, 12, 14, LEAST * BLOCK + 1, LEAST * BLOCK + 9]:
        commands = engine.step({"a": num_processed}, new=9)
        first, end = commands.store.get("a", (0, 0))
        stored += range(first, end)
        assert end <= num_processed // BLOCK
        if commands.switch:
            assert stored == list(range(num_processed // BLOCK))
    assert stored == list(range(LEAST))


def test_host_blocks_are_announced_once_in_order_and_before_anything_is_stored_there() -> None:
    engine = Engine()
    engine.admit("a", 40)
    known: list[int] = []
    for num_processed in range(0, 60, 5):
        commands = engine.step({"a": num_processed}, new=5)
        known += commands.host_blocks.get("a", [])
        assert commands.store.get("a", (0, 0))[1] <= len(known)
    assert known == list(engine.host.table("a"))
    assert len(known) == 15


@pytest.mark.parametrize("num_tokens", [LEAST * BLOCK, LEAST * BLOCK + 3, 40, 64, 65, 130])
def test_what_the_switch_frees_is_given_back_one_step_later(num_tokens: int) -> None:
    engine = switched(num_tokens)
    assert engine.held("a") == list(range(-(-(num_tokens + 2) // BLOCK)))
    engine.step({"a": num_tokens}, new=1)
    num_complete = num_tokens // BLOCK
    kept = {0, 1, 2, *LAYOUT.page_positions(num_complete)}
    assert [entry for entry in engine.held("a") if entry < num_complete] == sorted(kept)


def test_a_sparse_request_holds_what_the_layout_says_and_a_step_later_what_completed() -> None:
    engine = switched(41)
    for num_tokens in range(42, 400):
        engine.step({"a": num_tokens}, new=1)
        # Of the blocks known to be complete a step ago, slots and pages are held; all later ones are.
        settled = (num_tokens - 1) // BLOCK
        pages = LAYOUT.page_positions(num_tokens // BLOCK)
        active = range(settled, num_tokens // BLOCK + 1)
        assert engine.held("a") == sorted({0, 1, 2, *pages, *active})
        if num_tokens % BLOCK > 1:
            assert len(engine.held("a")) == LAYOUT.held_blocks(num_tokens, BLOCK)


def test_a_step_in_which_a_request_is_not_scheduled_gives_nothing_of_it_back_before_its_next_one() -> None:
    """As with asynchronous scheduling when memory is short and what could be preempted is in flight."""
    engine = switched(40)
    engine.step({"a": 43}, new=1)
    assert engine.held("a") == [0, 1, 2, 3, 4, 8, 10]
    for _ in range(3):
        engine.step({"a": 44}, runs=[])
        # Block 10 is complete, but no step ran in which the workers could take it in.
        assert 10 in engine.held("a")
    engine.step({"a": 44})
    assert 10 in engine.held("a")
    engine.step({"a": 45})
    assert engine.held("a") == [0, 1, 2, 3, 4, 8, 11]


def test_allocating_again_in_the_same_step_gives_nothing_more_back() -> None:
    engine = switched(40)
    assert engine.give_back("a", 44) == [5, 6, 7, 9]
    assert engine.give_back("a", 44) == []


def test_two_tokens_that_become_final_at_once_are_one_block_at_most() -> None:
    engine = switched(40)
    for num_tokens in range(43, 300, 2):
        engine.step({"a": num_tokens}, new=2)
        settled = (num_tokens - 2) // BLOCK
        assert all(entry in engine.held("a") for entry in range(settled, num_tokens // BLOCK))


def test_processed_tokens_that_lag_behind_give_back_later_and_keep_the_same_pages() -> None:
    """As with asynchronous scheduling: the workers are a step ahead of what was processed."""
    engine = switched(40)
    for num_tokens in range(42, 300):
        engine.step({"a": num_tokens - 1}, new=3)
        ahead = LAYOUT.page_positions(num_tokens // BLOCK)
        assert set(ahead) <= set(engine.held("a"))
        if num_tokens % BLOCK == 0:
            assert num_tokens // BLOCK - 1 in engine.held("a")


def test_a_request_that_can_never_become_sparse_takes_no_host_blocks() -> None:
    engine = Engine(num_host_blocks=1)
    engine.admit("a", 8, max_tokens=LEAST * BLOCK - 1)
    for num_processed in range(0, LEAST * BLOCK):
        assert engine.ledger.can_grow("a", num_processed + 2)
        assert engine.step({"a": num_processed}) == StepCommands()
    assert engine.host.num_free == 1


def test_a_request_of_unknown_length_takes_host_blocks() -> None:
    engine = Engine()
    engine.ledger.admit("a", 8)
    engine.tables["a"] = []
    assert engine.step({"a": 0}, new=8).host_blocks == {"a": [0, 1]}


def test_host_memory_that_is_short_gives_a_request_nothing() -> None:
    engine = Engine(num_host_blocks=6)
    engine.admit("a", 16)
    engine.admit("b", 12)
    engine.step({"a": 0}, new=16)
    assert engine.ledger.can_grow("b", 8)
    assert not engine.ledger.can_grow("b", 9)
    with pytest.raises(PoolExhaustedError, match="expected at most 2 more host blocks"):
        engine.ledger.grow("b", 9)
    assert engine.host.num_free == 2
    assert engine.ledger.take_commands({"b": 0}, set(), 0).host_blocks == {}
    engine.ledger.release("a")
    assert engine.ledger.can_grow("b", 24)


def test_a_released_request_gives_all_host_blocks_back_and_may_come_again_under_its_name() -> None:
    engine = switched(40)
    engine.ledger.release("a")
    assert engine.host.num_free == engine.host.num_blocks
    assert not engine.ledger.is_sparse("a")
    assert list(engine.ledger.advance("a", 99)) == []
    engine.ledger.release("a")

    engine.admit("a", 44)
    commands = engine.step({"a": 0}, released=["a"], new=44)
    assert commands.released == ("a",)
    assert len(commands.host_blocks["a"]) == 11
    assert (commands.store, commands.switch) == ({}, {})
    assert engine.step({"a": 44}).switch == {"a": 11}


def test_blocks_are_sealed_once_the_order_to_write_them_is_out() -> None:
    engine = Engine()
    engine.admit("a", 40)
    keys = [bytes([index]) for index in range(10)]
    engine.step({"a": 0}, new=40)
    engine.ledger.advance("a", 40)  # final, but the order to write them comes at the end of this step
    engine.ledger.seal("a", keys)
    assert engine.host.adopt("other", keys) == []
    engine.ledger.take_commands({"a": 40}, set(), 0)
    engine.ledger.seal("a", keys)
    table = list(engine.host.table("a"))
    assert engine.host.adopt("other", keys) == table


def test_orders_are_the_same_whatever_the_order_of_a_set() -> None:
    engine = Engine()
    for request_id in ("c", "a", "b"):
        engine.admit(request_id, 8)
    commands = engine.step({"c": 0, "a": 0, "b": 0}, released=["z", "y"], new=8)
    assert list(commands.host_blocks) == ["a", "b", "c"]
    assert commands.released == ("y", "z")


def staged(num_tokens: int, max_tokens: int = 10_000, **changes: Any) -> Engine:
    """Return an engine that was told of request `a`, whose first `num_tokens` tokens are in staging."""
    engine = Engine(**changes)
    admission = Admission(lease="lease", num_tokens=num_tokens)
    engine.ledger.expect("a", max_tokens, admission=admission)
    return engine


def begin(engine: Engine, num_tokens: int) -> StepCommands:
    """Admit request `a` with its staged tokens and run its first step."""
    assert engine.ledger.num_staged_tokens("a") == num_tokens
    engine.ledger.admit("a", num_tokens + 1, num_tokens)
    assert engine.ledger.begins_staged("a")
    held = engine.ledger.first_entries("a")
    assert held == sorted(set(held))
    engine.tables["a"] = [entry in held for entry in range(-(-num_tokens // BLOCK))]
    return engine.step({"a": num_tokens})


@pytest.mark.parametrize("num_tokens", [LEAST * BLOCK, LEAST * BLOCK + 1, 60, 63, 64])
def test_a_staged_request_holds_in_every_step_what_one_that_switched_here_holds(num_tokens: int) -> None:
    here, there = switched(num_tokens), staged(num_tokens)
    commands = begin(there, num_tokens)
    assert commands.admit == {"a": Admission(lease="lease", num_tokens=num_tokens)}
    num_own = -(-(num_tokens + 2) // BLOCK) - num_tokens // BLOCK
    assert commands.host_blocks.get("a", []) == list(there.host.table("a"))
    assert len(there.host.table("a")) == num_own
    assert set(commands.room) == {"a"}
    assert (commands.store, commands.switch, commands.stage) == ({}, {}, {})
    assert not there.ledger.begins_staged("a")
    assert there.ledger.is_sparse("a")
    for step in range(1, 6 * BLOCK):
        here.step({"a": num_tokens + step})
        later = there.step({"a": num_tokens + step})
        assert (later.admit, later.store, later.switch) == ({}, {}, {})
        # What switched here gives its other blocks back one step after the switch.
        assert there.held("a") == here.held("a")


def room_of(commands: StepCommands, request_id: str, held: list[int]) -> list[int]:
    """Return a request's room as its workers know it after some orders."""
    num_kept, added = commands.room.get(request_id, (None, []))
    return held[:num_kept] + added


def test_a_staged_request_takes_host_blocks_for_what_it_fetches_and_gives_all_back() -> None:
    engine = staged(400)
    held = room_of(begin(engine, 400), "a", [])
    assert len(set(held)) == 8 > 2 * LAYOUT.budget_blocks
    for wanted, expected in ((3, 11), (30, 38), (20, 38), (95, 100), (100, 100)):
        engine.ledger.rooms.note_wanted("a", wanted)
        held = room_of(engine.step({"a": 401}), "a", held)
        assert len(set(held)) == len(held) == expected
        assert engine.ledger.rooms.num_held("a") == expected
        assert engine.ledger.rooms.num_unfetched == 100 - expected
    assert not set(held) & set(engine.host.table("a"))
    engine.ledger.release("a")
    assert engine.host.num_free == engine.host.num_blocks
    assert engine.ledger.rooms.num_unfetched == 0
    engine.ledger.rooms.note_wanted("a", 3)


def test_a_staged_request_that_brings_all_its_kv_has_room_for_all_of_it() -> None:
    engine = staged(400, brings_all=True)
    assert len(room_of(begin(engine, 400), "a", [])) == 100


def test_host_blocks_for_fetched_copies_are_taken_back_for_blocks_that_only_lie_there() -> None:
    engine = staged(160, num_host_blocks=45)
    held = room_of(begin(engine, 160), "a", [])
    engine.ledger.rooms.note_wanted("a", 40)
    held = room_of(engine.step({"a": 161}), "a", held)
    assert len(held) == 40
    num_own = len(engine.host.table("a"))
    for num_tokens in range(162, 260):
        held = room_of(engine.step({"a": num_tokens}), "a", held)
        num_own = len(engine.host.table("a"))
        assert num_own == -(-(num_tokens + 2) // BLOCK) - 40
        assert len(held) == engine.ledger.rooms.num_held("a") == min(40, 45 - num_own)
        assert not set(held) & set(engine.host.table("a"))
    assert len(held) < 22


def test_a_request_that_begins_leaves_others_the_room_that_they_began_with() -> None:
    engine = staged(160, num_host_blocks=45)
    held = room_of(begin(engine, 160), "a", [])
    engine.ledger.rooms.note_wanted("a", 40)
    held = room_of(engine.step({"a": 161}), "a", held)
    engine.admit("b", 160)
    first = 2 * LAYOUT.budget_blocks
    assert engine.ledger.can_grow("b", BLOCK * (45 - 1 - first))
    assert not engine.ledger.can_grow("b", BLOCK * (45 - first))
    engine.ledger.grow("b", BLOCK * (45 - 1 - first))
    held = room_of(engine.ledger.take_commands({"b": 0}, set(), 1000), "a", held)
    assert len(held) == first
    assert not set(held) & set(engine.host.table("b"))


def test_requests_that_arrive_are_counted_until_they_run() -> None:
    engine = staged(60)
    engine.ledger.admit("a", 61, 60)
    assert engine.ledger.num_arriving == 0
    engine.ledger.grow("a", 60)
    engine.ledger.seat("a", [7, 8, 9])
    assert engine.ledger.num_arriving == 1
    commands = engine.ledger.take_commands({}, set(), 1000)
    assert commands.admit == {"a": Admission(lease="lease", num_tokens=60, block_ids=(7, 8, 9))}
    assert (engine.ledger.num_arriving, engine.ledger.take_commands({}, set(), 1000).admit) == (1, {})
    engine.tables["a"] = [True] * 15
    assert engine.step({"a": 60}).admit == {}
    assert engine.ledger.num_arriving == 0


def test_a_staged_request_is_not_found_by_its_content() -> None:
    engine = staged(60)
    begin(engine, 60)
    engine.step({"a": 66})
    engine.ledger.seal("a", [bytes([index]) for index in range(17)])
    assert [engine.host.find(bytes([index])) is not None for index in range(17)] == [False] * 15 + [True, False]


def test_a_staged_request_that_was_preempted_is_computed_here() -> None:
    engine = staged(60)
    begin(engine, 60)
    engine.ledger.release("a")
    assert engine.ledger.num_staged_tokens("a") == 0
    engine.ledger.admit("a", 66)
    engine.tables["a"] = []
    commands = engine.step({"a": 0}, new=66)
    assert commands.admit == {}
    assert not engine.ledger.is_sparse("a")
    assert engine.step({"a": 66}).switch == {"a": 16}


def test_a_staged_request_without_room_yet_still_begins_staged_later() -> None:
    engine = staged(60)
    engine.ledger.admit("a", 61, engine.ledger.num_staged_tokens("a"))
    begin(engine, 60)


def test_too_few_staged_tokens_to_be_sparse_are_not_used() -> None:
    assert staged(LEAST * BLOCK - 1).ledger.num_staged_tokens("a") == 0
    assert Engine().ledger.num_staged_tokens("a") == 0


def test_workers_are_told_once_where_to_stage_and_again_after_a_preemption() -> None:
    engine = Engine()
    engine.ledger.expect("a", 62, stage="lease")
    engine.ledger.admit("a", 60)
    engine.tables["a"] = []
    assert engine.step({"a": 0}, new=30).stage == {"a": "lease"}
    assert engine.step({"a": 30}, new=30).stage == {}
    engine.ledger.release("a")
    engine.ledger.admit("a", 60)
    engine.tables["a"] = []
    assert engine.step({"a": 0}, new=60).stage == {"a": "lease"}


def test_a_request_to_hand_over_switches_at_its_first_decode_step_though_nothing_else_asks_for_it() -> None:
    engine = Engine(rule=SwitchRule())
    engine.ledger.expect("a", 62, stage="lease")
    engine.ledger.admit("a", 60)
    engine.tables["a"] = []
    engine.admit("b", 60)
    engine.step({"a": 0, "b": 0}, new=60)
    commands = engine.step({"a": 60, "b": 60})
    assert commands.switch == {"a": 15}
    assert commands.store["a"] == (0, 15)
    assert engine.ledger.take_num_switched() == {"handover": 1}
    assert engine.step({"a": 61, "b": 61}).switch == {}


def late(*lengths: int) -> Engine:
    """Return an engine that switches late, in which requests `a`, `b`, ... of these prompt tokens decode densely."""
    engine = Engine(rule=SwitchRule())
    for name, length in zip("abcd", lengths, strict=False):
        engine.admit(name, length)
        engine.step({name: 0}, new=length)
    assert engine.step(dict(zip("abcd", lengths, strict=False))).switch == {}
    return engine


def test_late_requests_switch_when_blocks_are_short_the_longest_first_and_no_more_than_needed() -> None:
    engine = late(60, 100, 80)
    engine.ledger.note_shortage(3)
    assert engine.step({"a": 61, "b": 101, "c": 81}).switch == {"b": 25}
    # Its blocks come back as soon as the scheduler takes it up: the same shortage makes no other request sparse.
    engine.ledger.note_shortage(3)
    assert engine.step({"a": 62, "c": 82}).switch == {}
    engine.ledger.note_shortage(40)
    assert engine.step({"a": 63, "b": 103, "c": 83}).switch.keys() == {"a", "c"}
    assert engine.ledger.take_num_switched() == {"memory": 3}
    assert engine.ledger.take_num_switched() == {}


def test_a_shortage_is_forgotten_after_the_step_that_saw_it() -> None:
    engine = late(60)
    engine.ledger.note_shortage(3)
    assert engine.step({"a": 61}, runs=[]).switch == {}
    assert engine.step({"a": 61}).switch == {}


def test_late_requests_switch_before_the_last_free_blocks_are_gone() -> None:
    engine = late(60, 100)
    engine.num_free = engine.ledger.reserved_blocks()
    assert engine.step({"a": 61, "b": 101}).switch == {}
    engine.num_free -= 1
    assert engine.step({"a": 62, "b": 102}).switch == {"b": 25}


def test_blocks_that_admitted_prompts_lack_are_reserved_but_nothing_where_requests_switch_early() -> None:
    engine, early = Engine(rule=SwitchRule()), Engine()
    for each in (engine, early):
        each.admit("a", 100)
        assert each.ledger.reserved_blocks() == 0
        each.step({"a": 0}, new=40)
    few = engine.ledger.reserved_blocks() - 15
    assert 0 < few < 10
    assert early.ledger.reserved_blocks() == 0
    engine.step({"a": 40}, new=60)
    assert engine.ledger.reserved_blocks() == few


def test_blocks_that_end_while_a_request_decodes_densely_are_written_through_together() -> None:
    engine = late(60)
    stores = [engine.step({"a": num_tokens}).store.get("a") for num_tokens in range(61, 61 + 12 * BLOCK)]
    assert [store for store in stores if store] == [(15, 23)]
    engine.ledger.note_shortage(1)
    commands = engine.step({"a": 61 + 12 * BLOCK})
    assert commands.switch == {"a": 27}
    assert commands.store == {"a": (23, 27)}
