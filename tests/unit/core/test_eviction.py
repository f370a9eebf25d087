"""The order in which blocks make room, beside the same in plain lists, and what it is for."""

import random

import pytest

from oasiskv.core.disk_blocks import DiskBlocks
from oasiskv.core.eviction import EvictionOrder
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.leases import LeaseTable
from oasiskv.core.tiers import BlockStatus, Tiers

PROMPT = [b"system %d" % i for i in range(8)]


class PlainOrder:
    """Every item with when and how it came; all else is searched for."""

    def __init__(self, max_again: int) -> None:
        self.max_again = max_again
        self.came: dict[int, int] = {}
        self.again: dict[int, bool] = {}
        self.time = 0

    def in_order(self) -> list[int]:
        return sorted(self.came, key=lambda item: (self.again[item], self.came[item]))

    def add(self, item: int, is_again: bool) -> None:
        self.time += 1
        self.came[item], self.again[item] = self.time, is_again
        kept = [one for one in self.in_order() if self.again[one]]
        if len(kept) > self.max_again:
            self.add(kept[0], False)

    def discard(self, item: int) -> None:
        self.came.pop(item, None)


@pytest.mark.parametrize("max_again", [0, 1, 3, 20])
def test_any_order_of_calls_evicts_as_plain_lists_do(max_again: int) -> None:
    rng = random.Random(max_again)
    order: EvictionOrder[int] = EvictionOrder(max_again)
    plain = PlainOrder(max_again)
    for _ in range(3000):
        item = rng.randrange(12)
        match rng.randrange(6):
            case 0 if plain.came:
                expected = plain.in_order()[0]
                assert order.pop() == expected
                plain.discard(expected)
            case 1:
                order.discard(item)
                plain.discard(item)
            case kind:
                is_again = kind < 4
                order.add(item, is_again=is_again)
                plain.add(item, is_again)
        order.check_invariants()
        assert list(order) == plain.in_order()
        assert len(order) == len(plain.came)
        assert [one in order for one in range(12)] == [one in plain.came for one in range(12)]


def stage(table: LeaseTable, peer_id: str, block_keys: list[bytes]) -> None:
    lease_id, _ = table.allocate(peer_id, len(block_keys), 1.0, block_keys)
    table.seal(peer_id, lease_id, dict(enumerate(block_keys)))
    table.release(peer_id, [lease_id])


def scan(table: LeaseTable, peer_id: str, numbers: range) -> None:
    """Stage prompts that nobody asks for again, each of half the pool."""
    for number in numbers:
        stage(table, peer_id, [b"%d of scan %d" % (i, number) for i in range(10)])


def held(table: LeaseTable, block_keys: list[bytes]) -> int:
    return sum(table.find(key) is not None for key in block_keys)


def test_a_scan_of_long_prompts_leaves_a_shared_prefix_in_place() -> None:
    table = LeaseTable(LeaseConfig(num_blocks=20, max_blocks_per_peer=20), lambda: 0.0)
    peer_id = table.add_peer(may_map_to_write=False)
    stage(table, peer_id, PROMPT)
    lease_id, block_ids = table.lease(peer_id, PROMPT, len(PROMPT), 1.0)
    table.release(peer_id, [lease_id])
    scan(table, peer_id, range(50))
    assert [table.find(key) for key in PROMPT] == block_ids
    table.check_invariants()


def test_a_prompt_that_continues_a_shared_prefix_lets_it_stay_and_goes_itself() -> None:
    table = LeaseTable(LeaseConfig(num_blocks=20, max_blocks_per_peer=20), lambda: 0.0)
    peer_id = table.add_peer(may_map_to_write=False)
    stage(table, peer_id, PROMPT)
    stage(table, peer_id, [*PROMPT, b"question"])
    scan(table, peer_id, range(5))
    assert held(table, PROMPT) == len(PROMPT)
    assert table.find(b"question") is None


def test_a_handle_that_is_accepted_is_no_second_use() -> None:
    table = LeaseTable(LeaseConfig(num_blocks=20, max_blocks_per_peer=20), lambda: 0.0)
    peer_id, other_id = (table.add_peer(may_map_to_write=False) for _ in range(2))
    lease_id, _ = table.allocate(peer_id, len(PROMPT), 1.0)
    table.seal(peer_id, lease_id, dict(enumerate(PROMPT)))
    accepted_id, _ = table.accept(other_id, table.offer(peer_id, lease_id, 1.0), 1, 1.0)
    table.release(other_id, [accepted_id])
    scan(table, peer_id, range(2))
    assert held(table, PROMPT) == 0, "every prompt goes from a prefill service to a decode service once"


def test_what_was_shared_once_has_half_the_pool_at_most() -> None:
    manager = HostBlockManager(20)
    for number in range(2):
        keys = [b"%d of old %d" % (i, number) for i in range(10)]
        for _ in range(2):
            if not manager.adopt("a", keys):
                manager.extend("a", len(keys))
                for index, key in enumerate(keys):
                    manager.seal("a", index, key)
            manager.release("a")
    manager.extend("new", 10)
    assert [manager.find(b"0 of old %d" % number) is not None for number in range(2)] == [False, True]
    manager.check_invariants()


def test_a_scan_leaves_a_shared_prefix_on_disk_too() -> None:
    disk = DiskBlocks(20)

    def write(block_key: bytes) -> None:
        assert disk.prepare_write(block_key) is not None
        disk.complete_write(block_key, is_written=True)

    for key in PROMPT:
        write(key)
    for key in PROMPT:
        disk.touch(key)
    for number in range(500):
        write(b"scan %d" % number)
    assert all(disk.find(key) is not None for key in PROMPT)
    disk.check_invariants()


def test_a_prefix_that_is_read_back_and_leased_stays_through_a_scan() -> None:
    config = LeaseConfig(num_blocks=20, max_blocks_per_peer=20)
    tiers = Tiers(config, lambda: 0.0, num_disk_blocks=100)
    table = tiers.leases
    peer_id = table.add_peer(may_map_to_write=False)
    stage(table, peer_id, PROMPT)
    while (spill := tiers.prepare_spill()) is not None:
        tiers.complete_spill(spill, BlockStatus.INTACT)
    scan(table, peer_id, range(2))
    assert held(table, PROMPT) == 0
    with tiers.load(peer_id, PROMPT, 1) as load:
        for key in PROMPT:
            tiers.complete_load(load, key, BlockStatus.INTACT)
        lease_id, _ = table.lease(peer_id, PROMPT, len(PROMPT), 1.0)
    table.release(peer_id, [lease_id])
    scan(table, peer_id, range(2, 7))
    assert held(table, PROMPT) == len(PROMPT)
    tiers.check_invariants()
