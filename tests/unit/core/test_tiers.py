import pytest

from oasiskv.core.errors import PoolExhaustedError
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.tiers import BlockStatus, Tier, Tiers

KEYS = [f"k{number}".encode() for number in range(8)]


def make(num_blocks: int = 10, quota: int = 10, num_slots: int = 8) -> tuple[Tiers, str]:
    config = LeaseConfig(num_blocks=num_blocks, max_blocks_per_peer=quota)
    tiers = Tiers(config, lambda: 0.0, num_disk_blocks=num_slots)
    return tiers, tiers.leases.add_peer(may_map_to_write=False)


def stage(tiers: Tiers, peer_id: str, keys: list[bytes]) -> None:
    lease_id, _ = tiers.leases.allocate(peer_id, len(keys), 9.0)
    tiers.leases.seal(peer_id, lease_id, dict(enumerate(keys)))
    tiers.leases.release(peer_id, [lease_id])


def spill_all(tiers: Tiers) -> None:
    while (spill := tiers.prepare_spill()) is not None:
        tiers.complete_spill(spill, BlockStatus.INTACT)


def crowd_out(tiers: Tiers, peer_id: str) -> None:
    lease_id, _ = tiers.leases.allocate(peer_id, tiers.leases.num_free, 9.0)
    tiers.leases.release(peer_id, [lease_id])


def spilled() -> tuple[Tiers, str]:
    tiers, peer_id = make()
    stage(tiers, peer_id, KEYS)
    spill_all(tiers)
    crowd_out(tiers, peer_id)
    assert [tiers.tier_of(key) for key in KEYS] == [Tier.DISK] * 8
    return tiers, peer_id


def test_what_is_evicted_from_memory_is_found_on_disk_and_comes_back() -> None:
    tiers, peer_id = spilled()
    before = tiers.leases.generations.copy()
    with tiers.load(peer_id, KEYS, 1) as load:
        assert list(load.reads) == KEYS
        taken = [block_id for _, block_id in load.reads.values()]
        assert [i for i in range(10) if tiers.leases.generations[i] != before[i]] == sorted(taken)
        for key in KEYS:
            assert tiers.complete_load(load, key, BlockStatus.INTACT) is BlockStatus.INTACT
        _, block_ids = tiers.leases.lease(peer_id, KEYS, 1, 9.0)
    assert len(block_ids) == 8
    assert [tiers.tier_of(key) for key in KEYS] == [Tier.HOST] * 8
    tiers.check_invariants()


def test_a_load_that_fails_at_the_fifth_of_eight_blocks_pins_nothing() -> None:
    tiers, peer_id = spilled()
    with tiers.load(peer_id, KEYS, 1) as load:
        for number, key in enumerate(KEYS):
            tiers.complete_load(load, key, BlockStatus.IO_ERROR if number == 4 else BlockStatus.INTACT)
        lease_id, block_ids = tiers.leases.lease(peer_id, KEYS, 1, 9.0)
    assert len(block_ids) == 4
    assert tiers.leases.num_free == 6, "only the four blocks of the lease are pinned"
    assert not tiers.is_held(KEYS[4]), "nobody tries the broken block again"
    tiers.leases.release(peer_id, [lease_id])
    assert tiers.leases.num_free == 10
    tiers.leases.allocate(peer_id, 10, 9.0)  # a later request is admitted with no other trigger
    tiers.check_invariants()


def test_a_load_that_raises_pins_nothing() -> None:
    tiers, peer_id = spilled()

    def fail() -> None:
        with tiers.load(peer_id, KEYS, 1) as load:
            tiers.complete_load(load, KEYS[0], BlockStatus.INTACT)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert tiers.leases.num_free == 10
    tiers.check_invariants()


def test_no_more_is_read_than_there_is_memory_for_and_a_blocks_own_prefix_is_not_evicted_for_it() -> None:
    tiers, peer_id = spilled()
    with tiers.load(peer_id, KEYS[:2], 1) as load:
        for key in KEYS[:2]:
            tiers.complete_load(load, key, BlockStatus.INTACT)
    tiers.leases.allocate(peer_id, 6, 9.0)
    other_id = tiers.leases.add_peer(may_map_to_write=False)
    with tiers.load(other_id, KEYS[:5], 1) as load:
        assert list(load.reads) == KEYS[2:4]
        assert [tiers.tier_of(key) for key in KEYS[:2]] == [Tier.HOST] * 2
        assert [load.statuses[key] for key in KEYS[:5]] == [BlockStatus.INTACT] * 2 + [BlockStatus.NOT_READ] * 3
    tiers.check_invariants()


def test_a_quota_is_refused_before_anything_is_taken() -> None:
    tiers, peer_id = make(num_blocks=12, quota=8)
    stage(tiers, peer_id, KEYS)
    spill_all(tiers)
    other_id = tiers.leases.add_peer(may_map_to_write=False)
    tiers.leases.allocate(other_id, 8, 9.0)
    tiers.leases.allocate(peer_id, 4, 9.0)
    with pytest.raises(PoolExhaustedError, match="quota"), tiers.load(peer_id, KEYS, 1):
        pass
    tiers.check_invariants()


def test_memory_does_not_wait_for_the_disk_and_what_is_lost_is_counted() -> None:
    tiers, peer_id = make()
    stage(tiers, peer_id, KEYS)
    spill = tiers.prepare_spill()
    assert spill is not None
    assert tiers.num_unwritten == 7
    crowd_out(tiers, peer_id)
    assert tiers.num_unwritten == 0
    assert tiers.num_lost == 8
    assert spill.generation != tiers.leases.generations[spill.block_id], "the writer can tell"
    tiers.complete_spill(spill, BlockStatus.STALE)
    assert not any(tiers.is_held(key) for key in KEYS)
    tiers.check_invariants()


def test_a_key_that_was_sealed_anew_during_a_stale_write_is_written_after_it() -> None:
    tiers, peer_id = make()
    stage(tiers, peer_id, KEYS[:1])
    first = tiers.prepare_spill()
    assert first is not None
    crowd_out(tiers, peer_id)
    stage(tiers, peer_id, KEYS[:1])
    assert tiers.prepare_spill() is None, "the first write is under way"
    tiers.complete_spill(first, BlockStatus.STALE)
    second = tiers.prepare_spill()
    assert second is not None
    assert second.block_key == KEYS[0]


def test_a_slot_that_was_written_anew_while_it_was_read_is_no_fault_of_the_disk() -> None:
    tiers, peer_id = make(num_slots=1)
    stage(tiers, peer_id, KEYS[:1])
    spill_all(tiers)
    crowd_out(tiers, peer_id)
    with tiers.load(peer_id, KEYS[:1], 1) as load:
        stage(tiers, peer_id, KEYS[1:2])
        spill_all(tiers)
        assert tiers.complete_load(load, KEYS[0], BlockStatus.CORRUPT) is BlockStatus.ABSENT
    assert tiers.disk.find(KEYS[1]) is not None
    assert tiers.disk.num_retired == 0
    tiers.check_invariants()


def test_without_a_disk_nothing_waits_to_be_spilled_or_counts_as_lost() -> None:
    tiers, peer_id = make(num_slots=0)
    stage(tiers, peer_id, KEYS)
    assert tiers.num_unwritten == 0
    crowd_out(tiers, peer_id)
    assert tiers.num_lost == 0
    assert tiers.num_left == 8
