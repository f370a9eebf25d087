"""What `HostBlockManager` promises, case by case; tests/property/test_host_blocks.py tries any order of calls."""

from collections.abc import Iterator

import pytest

from oasiskv.core.errors import ConfigError, InvalidRequestError, PoolExhaustedError
from oasiskv.core.host_blocks import HostBlockManager


@pytest.fixture
def manager() -> Iterator[HostBlockManager]:
    """Seven blocks; the invariants are checked when the test ends."""
    manager = HostBlockManager(7)
    yield manager
    manager.check_invariants()


def fill(manager: HostBlockManager, request_id: str, block_keys: list[bytes]) -> list[int]:
    """Let a request own one sealed block per key."""
    block_ids = manager.extend(request_id, len(block_keys))
    for block_index, block_key in enumerate(block_keys):
        manager.seal(request_id, block_index, block_key)
    return block_ids


def test_extend_returns_only_the_new_blocks_in_table_order(manager: HostBlockManager) -> None:
    first = manager.extend("a", 2)
    second = manager.extend("a", 5)
    assert (len(first), len(second)) == (2, 3)
    assert list(manager.table("a")) == first + second
    assert len(set(first + second)) == 5


def test_extend_to_fewer_blocks_than_owned_changes_nothing(manager: HostBlockManager) -> None:
    owned = manager.extend("a", 3)
    assert manager.extend("a", 2) == []
    assert manager.extend("a", 0) == []
    assert list(manager.table("a")) == owned


def test_an_extension_that_does_not_fit_takes_nothing(manager: HostBlockManager) -> None:
    fill(manager, "cached", [b"x"])
    manager.release("cached")
    owned = manager.extend("a", 3)
    with pytest.raises(PoolExhaustedError, match=r"^num_blocks: expected at most 4 more host blocks for 'a', got 5$"):
        manager.extend("a", 8)
    assert list(manager.table("a")) == owned
    assert (manager.num_free, manager.num_cached) == (4, 1)


def test_a_request_that_got_nothing_is_unknown(manager: HostBlockManager) -> None:
    manager.extend("a", 7)
    with pytest.raises(PoolExhaustedError):
        manager.extend("b", 1)
    assert manager.extend("c", 0) == []
    assert manager.adopt("c", [b"absent"]) == []
    assert list(manager.table("b")) == list(manager.table("c")) == []


@pytest.mark.parametrize(("num_blocks", "fits"), [(0, True), (3, True), (7, True), (8, False)])
def test_can_extend_tells_what_extend_would_do(manager: HostBlockManager, num_blocks: int, fits: bool) -> None:
    manager.extend("a", 3)
    assert manager.can_extend("a", num_blocks) is fits


def test_can_extend_counts_cached_blocks_and_those_of_others(manager: HostBlockManager) -> None:
    fill(manager, "cached", [b"x", b"y"])
    manager.release("cached")
    manager.extend("b", 2)
    assert manager.can_extend("a", 5)
    assert not manager.can_extend("a", 6)


def test_a_released_sealed_block_is_adopted_with_its_id(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0", b"1"])
    manager.release("a")
    assert (manager.num_free, manager.num_cached) == (7, 2)
    assert manager.adopt("b", [b"0", b"1"]) == block_ids
    assert (manager.num_free, manager.num_cached) == (5, 0)


def test_adopt_stops_at_the_first_key_that_is_not_found(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0", b"1", b"2"])
    assert manager.adopt("b", [b"0", b"absent", b"2"]) == block_ids[:1]


def test_a_shared_block_stays_referenced_until_its_last_owner_releases_it(manager: HostBlockManager) -> None:
    fill(manager, "a", [b"0"])
    manager.adopt("b", [b"0"])
    manager.release("a")
    assert (manager.num_free, manager.num_cached) == (6, 0)
    manager.release("b")
    assert (manager.num_free, manager.num_cached) == (7, 1)


def test_adopted_blocks_are_extended_with_own_ones(manager: HostBlockManager) -> None:
    shared = fill(manager, "a", [b"0", b"1"])
    manager.adopt("b", [b"0", b"1"])
    own = manager.extend("b", 4)
    assert list(manager.table("b")) == shared + own
    assert set(own).isdisjoint(manager.table("a"))


def test_new_blocks_behind_a_prefix_are_all_there_or_nothing_is_taken(manager: HostBlockManager) -> None:
    held = fill(manager, "a", [b"0", b"1"])
    manager.release("a")
    assert manager.continue_prefix("b", [b"0", b"1", b"absent"], 5) == (held, list(manager.table("b"))[2:])
    assert len(manager.table("b")) == 5
    manager.release("b")
    with pytest.raises(PoolExhaustedError):
        manager.continue_prefix("b", [b"0"], 8)
    assert (manager.num_free, list(manager.table("b")), manager.find(b"0")) == (7, [], held[0])


def test_adopt_refuses_a_request_that_owns_blocks(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0"])
    with pytest.raises(InvalidRequestError, match=r"^request_id: expected a request without host blocks, got 'a' with"):
        manager.adopt("a", [b"0"])
    assert list(manager.table("a")) == block_ids
    manager.release("a")
    assert manager.num_free == 7


def test_changing_the_list_that_adopt_returned_changes_no_table(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0"])
    manager.adopt("b", [b"0"]).clear()
    assert list(manager.table("b")) == block_ids


def test_unsealed_blocks_are_reused_before_sealed_ones(manager: HostBlockManager) -> None:
    fill(manager, "sealed", [b"0", b"1"])
    unsealed = manager.extend("unsealed", 3)
    manager.release("sealed")
    manager.release("unsealed")
    assert set(unsealed) < set(manager.extend("a", 5))
    assert manager.num_cached == 2


def test_the_least_recently_released_goes_first_and_a_tail_before_its_head(manager: HostBlockManager) -> None:
    first = fill(manager, "first", [b"f0", b"f1"])
    second = fill(manager, "second", [b"s0", b"s1"])
    manager.extend("full", 3)
    manager.release("second")
    manager.release("first")
    assert manager.extend("a", 4) == [second[1], second[0], first[1], first[0]]


def test_an_adopted_block_counts_as_released_when_it_is_released_again(manager: HostBlockManager) -> None:
    old = fill(manager, "old", [b"o"])
    new = fill(manager, "new", [b"n"])
    manager.extend("full", 5)
    manager.release("old")
    manager.release("new")
    manager.adopt("again", [b"o"])
    manager.release("again")
    assert manager.extend("a", 2) == new + old


def test_an_evicted_key_is_not_found(manager: HostBlockManager) -> None:
    fill(manager, "a", [b"0", b"1"])
    manager.release("a")
    manager.extend("b", 6)
    assert manager.adopt("c", [b"0", b"1"]) == [manager.table("c")[0]]
    manager.release("c")
    manager.extend("b", 7)
    assert manager.adopt("c", [b"0"]) == []


def test_sealing_twice_under_one_key_changes_nothing(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0"])
    manager.seal("a", 0, b"0")
    assert manager.adopt("b", [b"0"]) == block_ids


def test_sealing_under_another_key_is_refused(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"\x00"])
    with pytest.raises(InvalidRequestError, match=r"^block_key: expected 00, under which host block \d is sealed, got"):
        manager.seal("a", 0, b"\x01")
    assert manager.adopt("b", [b"\x01"]) == []
    assert manager.adopt("c", [b"\x00"]) == block_ids


def test_of_two_blocks_with_one_content_the_older_is_found(manager: HostBlockManager) -> None:
    older = fill(manager, "older", [b"0"])
    fill(manager, "newer", [b"0"])
    assert manager.adopt("b", [b"0"]) == older


def test_a_block_whose_content_another_holds_is_free_once_released(manager: HostBlockManager) -> None:
    fill(manager, "older", [b"0"])
    duplicate = fill(manager, "newer", [b"0"])
    manager.release("newer")
    assert (manager.num_free, manager.num_cached) == (6, 0)
    assert manager.extend("b", 1) == duplicate


@pytest.mark.parametrize("block_index", [-1, 2, 3])
def test_sealing_a_block_that_the_request_does_not_own_is_refused(manager: HostBlockManager, block_index: int) -> None:
    manager.extend("a", 2)
    with pytest.raises(InvalidRequestError, match=r"^block_index: expected one of the 2 blocks of 'a', got"):
        manager.seal("a", block_index, b"0")
    assert manager.adopt("b", [b"0"]) == []


def test_truncate_keeps_the_head_and_gives_the_rest_back(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0", b"1"]) + manager.extend("a", 4)
    manager.truncate("a", 1)
    assert list(manager.table("a")) == block_ids[:1]
    assert (manager.num_free, manager.num_cached) == (6, 1)
    assert manager.adopt("b", [b"0", b"1"]) == block_ids[:2]


def test_truncate_to_more_blocks_than_owned_changes_nothing(manager: HostBlockManager) -> None:
    block_ids = manager.extend("a", 2)
    manager.truncate("a", 3)
    manager.truncate("unknown", 3)
    assert list(manager.table("a")) == block_ids
    assert manager.num_free == 5


def test_truncate_to_a_negative_number_is_refused(manager: HostBlockManager) -> None:
    manager.extend("a", 2)
    with pytest.raises(InvalidRequestError, match=r"^num_blocks: expected a number of blocks to keep, got -1$"):
        manager.truncate("a", -1)
    assert len(manager.table("a")) == 2


def test_a_request_truncated_to_nothing_may_adopt_again(manager: HostBlockManager) -> None:
    block_ids = fill(manager, "a", [b"0"])
    manager.truncate("a", 0)
    assert manager.adopt("a", [b"0"]) == block_ids


def test_releasing_twice_or_an_unknown_request_changes_nothing(manager: HostBlockManager) -> None:
    manager.extend("a", 2)
    manager.release("unknown")
    assert manager.num_free == 5
    manager.release("a")
    manager.release("a")
    assert manager.num_free == 7


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=rf"^num_blocks: expected a positive number, got {num_blocks}$"):
        HostBlockManager(num_blocks)


def test_a_hundred_thousand_blocks_change_owner_twice() -> None:
    manager = HostBlockManager(100_000)
    for request in range(10):
        fill(manager, f"{request}", [f"{request}-{block_index}".encode() for block_index in range(10_000)])
        manager.release(f"{request}")
    assert manager.num_cached == 100_000
    for request in range(10):
        manager.extend(f"new-{request}", 10_000)
    assert (manager.num_free, manager.num_cached) == (0, 0)
    manager.check_invariants()


def test_the_sealed_keys_begin_with_what_is_referenced_and_end_with_what_is_evicted_next(
    manager: HostBlockManager,
) -> None:
    fill(manager, "a", [b"a0", b"a1"])
    fill(manager, "b", [b"b0"])
    fill(manager, "c", [b"c0", b"c1"])
    manager.extend("d", 1)
    manager.release("c")
    manager.release("a")
    assert manager.sealed_keys() == [b"b0", b"a0", b"a1", b"c0", b"c1"]
    manager.release("b")
    manager.extend("e", 2)  # one is free, one is evicted
    assert manager.sealed_keys() == [b"b0", b"a0", b"a1", b"c0"]


def test_a_block_is_said_to_be_free_when_nobody_has_or_finds_it_and_not_when_it_is_evicted() -> None:
    freed: list[int] = []
    manager = HostBlockManager(3, on_free=freed.append)
    first, second, third = manager.extend("a", 3)
    manager.seal("a", 0, b"k")
    manager.fork("a", "b")
    manager.release("a")
    assert freed == []
    manager.release("b")
    assert freed == [third, second]
    manager.forget(first)
    assert freed == [third, second, first]
    manager.extend("c", 3)
    manager.seal("c", 0, b"k")
    manager.truncate("c", 1)
    manager.release("c")
    del freed[:]
    manager.extend("d", 3)
    assert freed == []
    manager.seal_or_share("d", 0, b"x")
    manager.seal_or_share("d", 1, b"x")
    assert len(freed) == 1
