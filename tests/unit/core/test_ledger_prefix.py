"""A prompt whose first blocks are loaded: what the workers are told, and when."""

from oasiskv.core.commands import Prefix
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.layout import SparseLayout
from oasiskv.core.ledger import RequestLedger
from oasiskv.core.switch_rule import SwitchRule

BLOCK = 4
LAYOUT = SparseLayout(budget_blocks=3, rows_per_page=4)
PREFIX = Prefix(lease="read", num_blocks=5)


def make() -> RequestLedger:
    ledger = RequestLedger(LAYOUT, BLOCK, HostBlockManager(64), SwitchRule(is_early=True))
    ledger.expect("a", 42, stage="lease", prefix=PREFIX)
    return ledger


def test_loaded_blocks_are_written_through_like_computed_ones_and_the_request_stays_dense_until_its_switch() -> None:
    ledger = make()
    assert ledger.num_staged_tokens("a") == 20
    ledger.admit("a", 40, 20)
    assert not ledger.begins_staged("a")
    ledger.grow("a", 20)
    ledger.seat("a", [9, 8, 7, 6, 5])
    assert ledger.num_arriving == 1
    commands = ledger.take_commands({}, set(), 100)
    assert commands.load == {"a": Prefix(lease="read", num_blocks=5, block_ids=(9, 8, 7, 6, 5))}
    assert (commands.stage, commands.store, commands.room, commands.admit) == ({}, {}, {}, {})
    assert ledger.take_commands({}, set(), 100).load == {}
    assert not ledger.is_sparse("a")
    ledger.grow("a", 40)
    commands = ledger.take_commands({"a": 20}, set(), 100)
    assert (commands.stage, commands.store, commands.load) == ({"a": "lease"}, {"a": (0, 5)}, {})
    assert len(commands.host_blocks["a"]) == 10
    assert ledger.num_arriving == 0
    ledger.advance("a", 40)
    ledger.grow("a", 41)
    commands = ledger.take_commands({"a": 40}, set(), 100)
    assert (commands.store, commands.switch) == ({"a": (5, 10)}, {"a": 10})


def test_a_request_that_was_preempted_loads_its_first_blocks_again() -> None:
    ledger = make()
    ledger.admit("a", 40, 20)
    ledger.grow("a", 20)
    assert ledger.take_commands({}, set(), 100).load
    ledger.release("a")
    assert ledger.num_staged_tokens("a") == 20
    ledger.admit("a", 41, 20)
    ledger.grow("a", 20)
    assert ledger.take_commands({}, {"a"}, 100).load == {"a": PREFIX}
    ledger.release("a")
    ledger.forget("a")
    assert ledger.num_staged_tokens("a") == 0


def test_a_request_that_is_never_to_be_sparse_loads_its_blocks_and_takes_no_host_memory() -> None:
    ledger = RequestLedger(LAYOUT, BLOCK, HostBlockManager(64), SwitchRule(is_early=True))
    ledger.expect("a", 0, prefix=PREFIX)
    ledger.admit("a", 40, ledger.num_staged_tokens("a"))
    ledger.grow("a", 20)
    ledger.seat("a", [9, 8, 7, 6, 5])
    assert ledger.take_commands({}, set(), 100).load == {
        "a": Prefix(lease="read", num_blocks=5, block_ids=(9, 8, 7, 6, 5))
    }
    assert ledger.num_arriving == 1
    for num_tokens in range(20, 80):
        ledger.advance("a", num_tokens)
        ledger.grow("a", num_tokens + 1)
        commands = ledger.take_commands({"a": num_tokens}, set(), 100)
        assert (commands.load, commands.store, commands.switch, commands.host_blocks) == ({}, {}, {}, {})
        assert ledger.num_arriving == 0
    assert ledger.num_host_blocks_held == 0
    ledger.release("a")


def test_a_chunk_s_blocks_are_streamed_in_its_own_step_and_stored_in_the_next() -> None:
    ledger = RequestLedger(LAYOUT, BLOCK, HostBlockManager(64), SwitchRule(is_early=True))
    ledger.expect("a", 60, stage="lease")
    ledger.expect("b", 60)
    for name in "ab":
        ledger.admit(name, 42)
        ledger.grow(name, 44)
    computed, found = 0, []
    for num_tokens in (18, 9, 15, 1):
        both = dict.fromkeys("ab", computed)
        commands = ledger.take_commands(both, set(), 100, dict.fromkeys("ab", num_tokens))
        assert commands.stream.keys() <= {"a"}
        found.append((commands.store.get("a"), commands.stream.get("a")))
        computed += num_tokens
    # The active block of 42 tokens is no block of the prompt, and the step that switches streams nothing.
    assert found == [(None, (0, 4)), ((0, 4), (4, 6)), ((4, 6), (6, 10)), ((6, 10), None)]
    assert commands.switch == {"a": 10, "b": 10}


def test_a_decoding_request_that_did_not_switch_yet_streams_none_of_what_it_generates() -> None:
    ledger = RequestLedger(LAYOUT, BLOCK, HostBlockManager(64), SwitchRule(is_early=True))
    ledger.expect("a", 60, stage="lease")
    ledger.admit("a", 11)
    ledger.grow("a", 11)
    assert ledger.take_commands({"a": 0}, set(), 100, {"a": 11}).stream == {"a": (0, 2)}
    ledger.grow("a", 12)
    assert ledger.take_commands({"a": 11}, set(), 100, {"a": 2}).stream == {}
