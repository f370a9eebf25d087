import pytest

from oasiskv.core.errors import (
    BlockNotFoundError,
    ConfigError,
    InvalidRequestError,
    LeaseExpiredError,
    PoolExhaustedError,
)
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.leases import LeaseTable

KEYS = [f"key {index}".encode() for index in range(8)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    config = LeaseConfig(
        num_blocks=8,
        max_blocks_per_peer=7,
        max_leases_per_peer=3,
        max_peers=2,
        max_ttl_s=10.0,
        peer_ttl_s=30.0,
    )
    return LeaseTable(config, clock)


@pytest.fixture
def peer_id(table: LeaseTable) -> str:
    return table.add_peer(may_map_to_write=True)


def stage(table: LeaseTable, peer_id: str, block_keys: list[bytes]) -> str:
    lease_id, _ = table.allocate(peer_id, len(block_keys), 5.0)
    table.seal(peer_id, lease_id, dict(enumerate(block_keys)))
    return lease_id


def test_a_lease_that_does_not_fit_takes_nothing(table: LeaseTable, peer_id: str) -> None:
    other_id = table.add_peer(may_map_to_write=False)
    table.allocate(peer_id, 5, 5.0)
    with pytest.raises(PoolExhaustedError, match="num_blocks"):
        table.allocate(other_id, 4, 5.0)
    assert table.num_free == 3
    assert table.counts().num_leases == 1
    assert len(table.allocate(other_id, 3, 5.0)[1]) == 3


def test_a_write_lease_begins_with_blocks_that_are_held_and_only_the_others_are_new(
    table: LeaseTable, peer_id: str
) -> None:
    first = stage(table, peer_id, [b"0", b"1", b"2"])
    held = list(table.readable(peer_id, first))
    table.release(peer_id, [first])
    before = table.generations.copy()
    lease_id, block_ids = table.allocate(peer_id, 4, 5.0, [b"0", b"1", b"absent", b"2"])
    assert block_ids[:2] == held[:2]
    assert [table.is_sealed(block_id) for block_id in block_ids] == [True, True, False, False]
    changed = (table.generations != before).nonzero()[0].tolist()
    assert sorted(changed) == sorted(block_ids[2:])
    table.seal(peer_id, lease_id, {2: b"x", 3: b"y"})
    handle = table.offer(peer_id, lease_id, 5.0)
    assert table.accept(peer_id, handle, 4, 5.0)[1] == block_ids
    with pytest.raises(PoolExhaustedError):
        table.allocate(table.add_peer(may_map_to_write=False), 7, 5.0, [b"0", b"1"])
    assert table.num_free == 4


def test_a_quota_bounds_the_blocks_and_the_leases_of_a_peer(table: LeaseTable, peer_id: str) -> None:
    with pytest.raises(PoolExhaustedError, match="quota"):
        table.allocate(peer_id, 8, 5.0)
    for _ in range(3):
        table.allocate(peer_id, 1, 5.0)
    with pytest.raises(PoolExhaustedError, match="max_leases_per_peer"):
        table.allocate(peer_id, 1, 5.0)
    assert table.num_free == 5


def test_no_more_peers_than_allowed_until_one_is_forgotten(table: LeaseTable, clock: Clock) -> None:
    first_id = table.add_peer(may_map_to_write=False)
    table.open_link(first_id)
    clock.now_s = 20.0
    second_id = table.add_peer(may_map_to_write=False)
    table.allocate(second_id, 1, 10.0)
    with pytest.raises(PoolExhaustedError, match="max_peers"):
        table.add_peer(may_map_to_write=False)
    table.close_link(first_id)
    table.add_peer(may_map_to_write=False)
    with pytest.raises(LeaseExpiredError, match="peer_id"):
        table.touch(first_id)


def test_peers_that_vanish_keep_nobody_out_and_the_most_silent_goes_first(table: LeaseTable, clock: Clock) -> None:
    living_id = table.add_peer(may_map_to_write=False)
    for number in range(1, 50):
        clock.now_s = number / 10
        vanished_id = table.add_peer(may_map_to_write=False)
        clock.now_s += 0.05
        table.touch(living_id)
        table.check_invariants()
    table.touch(vanished_id)
    table.touch(living_id)
    assert table.counts().num_peers == 2
    assert table.num_timers < 100


def test_the_lease_of_a_peer_that_went_silent_gives_its_blocks_back(table: LeaseTable, clock: Clock) -> None:
    peer_id = table.add_peer(may_map_to_write=False)
    lease_id, _ = table.allocate(peer_id, 4, 5.0)
    clock.now_s = 5.0
    table.expire()
    assert table.num_free == 8
    assert table.counts().num_expired_total == 1
    with pytest.raises(LeaseExpiredError, match="lease_id"):
        table.seal(peer_id, lease_id, {0: KEYS[0]})


def test_one_call_renews_all_leases_of_a_peer(table: LeaseTable, clock: Clock, peer_id: str) -> None:
    lease_ids = [table.allocate(peer_id, 1, 5.0)[0] for _ in range(3)]
    clock.now_s = 4.0
    assert table.renew(peer_id, None, 5.0) == []
    clock.now_s = 8.0
    assert [len(table.readable(peer_id, lease_id)) for lease_id in lease_ids] == [1, 1, 1]


def test_renewing_names_what_is_lost_and_shortens_nothing(table: LeaseTable, clock: Clock, peer_id: str) -> None:
    lease_id, _ = table.allocate(peer_id, 1, 5.0)
    assert table.renew(peer_id, [lease_id, "unknown"], 1.0) == ["unknown"]
    clock.now_s = 4.9
    assert len(table.readable(peer_id, lease_id)) == 1


def test_a_lease_lasts_no_longer_than_the_limit(table: LeaseTable, clock: Clock, peer_id: str) -> None:
    table.allocate(peer_id, 1, 1e9)
    clock.now_s = 10.0
    table.expire()
    assert table.counts().num_leases == 0


def test_leased_blocks_are_never_evicted_and_unleased_ones_oldest_first(table: LeaseTable, peer_id: str) -> None:
    leases = [stage(table, peer_id, KEYS[:2]), stage(table, peer_id, KEYS[2:4]), stage(table, peer_id, KEYS[4:6])]
    table.release(peer_id, [leases[1]])
    table.release(peer_id, [leases[0]])
    other_id = table.add_peer(may_map_to_write=False)
    table.allocate(other_id, 4, 5.0)  # 2 free, and then the 2 released first
    assert [table.find(key) is not None for key in KEYS[:6]] == [True, True, False, False, True, True]
    with pytest.raises(PoolExhaustedError):
        table.allocate(other_id, 3, 5.0)


def test_a_lease_takes_the_longest_prefix_that_is_held(table: LeaseTable, peer_id: str) -> None:
    table.release(peer_id, [stage(table, peer_id, KEYS[:3])])
    assert table.num_cached == 3
    lease_id, block_ids = table.lease(peer_id, [*KEYS[:2], b"absent", KEYS[2]], 1, 5.0)
    assert block_ids == [table.find(KEYS[0]), table.find(KEYS[1])]
    assert table.num_cached == 1
    table.release(peer_id, [lease_id])
    with pytest.raises(BlockNotFoundError, match="min_blocks"):
        table.lease(peer_id, [KEYS[0], b"absent"], 2, 5.0)
    assert table.num_cached == 3


def test_the_same_content_is_kept_once_and_both_leases_hold_it(table: LeaseTable, peer_id: str) -> None:
    first = stage(table, peer_id, KEYS[:1])
    second, (own_id,) = table.allocate(peer_id, 1, 5.0)
    (block_id,) = table.seal(peer_id, second, {0: KEYS[0]})
    assert block_id == table.find(KEYS[0]) != own_id
    assert table.num_free == 7
    table.release(peer_id, [first])
    assert table.num_cached == 0
    table.check_invariants()


def test_sealing_is_all_or_nothing(table: LeaseTable, peer_id: str) -> None:
    lease_id, _ = table.allocate(peer_id, 2, 5.0)
    with pytest.raises(InvalidRequestError, match="block_index"):
        table.seal(peer_id, lease_id, {0: KEYS[0], 2: KEYS[2]})
    assert table.find(KEYS[0]) is None
    table.seal(peer_id, lease_id, {0: KEYS[0]})
    with pytest.raises(InvalidRequestError, match="block_key"):
        table.seal(peer_id, lease_id, {1: KEYS[1], 0: KEYS[2]})
    assert table.find(KEYS[1]) is None
    assert table.seal(peer_id, lease_id, {0: KEYS[0]}) == [table.find(KEYS[0])]


def test_a_stale_writer_that_maps_the_pool_keeps_its_blocks_out_of_use(
    table: LeaseTable, clock: Clock, peer_id: str
) -> None:
    table.open_link(peer_id)
    lease_id, _ = table.allocate(peer_id, 3, 5.0)
    clock.now_s = 6.0
    table.expire()
    assert table.counts().num_fenced_blocks == 3
    assert table.num_free == 5
    with pytest.raises(LeaseExpiredError):
        table.seal(peer_id, lease_id, {0: KEYS[0]})
    assert table.renew(peer_id, [lease_id], 5.0) == [lease_id]
    table.release(peer_id, [lease_id])
    assert table.num_free == 8


def test_the_death_of_a_stale_writer_frees_its_blocks(table: LeaseTable, clock: Clock, peer_id: str) -> None:
    table.open_link(peer_id)
    table.open_link(peer_id)
    table.allocate(peer_id, 3, 5.0)
    table.close_link(peer_id)
    clock.now_s = 6.0
    table.expire()
    assert table.num_free == 5
    table.close_link(peer_id)
    assert table.num_free == 8
    table.check_invariants()


def test_a_handle_outlives_the_lease_that_it_came_from(table: LeaseTable, clock: Clock) -> None:
    giver_id = table.add_peer(may_map_to_write=False)
    lease_id = stage(table, giver_id, KEYS[:2])
    clock.now_s = 4.0
    handle = table.offer(giver_id, lease_id, 10.0)
    clock.now_s = 13.0
    taker_id = table.add_peer(may_map_to_write=False)
    accepted_id, block_ids = table.accept(taker_id, handle, 2, 5.0)
    assert block_ids == [table.find(KEYS[0]), table.find(KEYS[1])]
    with pytest.raises(LeaseExpiredError, match="lease_id"):
        table.readable(giver_id, lease_id)
    with pytest.raises(LeaseExpiredError, match="handle"):
        table.accept(taker_id, handle, 2, 5.0)
    with pytest.raises(LeaseExpiredError, match="lease_id"):
        table.readable(giver_id, accepted_id)
    table.check_invariants()


def test_a_handle_that_nobody_takes_ends_by_time(table: LeaseTable, clock: Clock, peer_id: str) -> None:
    handle = table.offer(peer_id, stage(table, peer_id, KEYS[:2]), 5.0)
    clock.now_s = 5.0
    with pytest.raises(LeaseExpiredError, match="handle"):
        table.accept(peer_id, handle, 0, 5.0)
    assert table.num_cached == 2


def test_a_lease_with_an_open_block_is_not_offered(table: LeaseTable, peer_id: str) -> None:
    lease_id, _ = table.allocate(peer_id, 2, 5.0)
    table.seal(peer_id, lease_id, {0: KEYS[0]})
    with pytest.raises(InvalidRequestError, match="block 1 not sealed"):
        table.offer(peer_id, lease_id, 5.0)
    assert len(table.writable(peer_id, lease_id)) == 2


def test_an_operation_that_fails_halfway_leaves_nothing_pinned(table: LeaseTable, peer_id: str) -> None:
    def load_eight_blocks_but_fail_at_the_fifth() -> None:
        with table.hold(peer_id, lease_id) as block_ids:
            for number, _ in enumerate(block_ids):
                if number == 4:
                    table.release(peer_id, [lease_id])
                    assert table.num_free == 8 - len(block_ids)
                    raise OSError("the fifth block")

    lease_id, _ = table.allocate(peer_id, 7, 5.0)
    with pytest.raises(OSError, match="fifth"):
        load_eight_blocks_but_fail_at_the_fifth()
    assert table.num_free == 8
    assert table.counts().num_leases == 0
    table.check_invariants()


def test_a_corrupt_block_is_not_found_any_more_and_room_again_after_its_leases(table: LeaseTable, peer_id: str) -> None:
    lease_id = stage(table, peer_id, KEYS[:2])
    block_id = table.find(KEYS[0])
    assert block_id is not None
    table.drop(block_id)
    assert table.find(KEYS[0]) is None
    assert not table.is_sealed(block_id)
    table.release(peer_id, [lease_id])
    assert (table.num_free, table.num_cached) == (8, 1)


def test_a_handle_with_a_corrupt_block_ends_by_time_as_others_do(table: LeaseTable, peer_id: str, clock: Clock) -> None:
    table.open_link(peer_id)
    lease_id = stage(table, peer_id, KEYS[:2])
    (first, _) = table.readable(peer_id, lease_id)
    table.offer(peer_id, lease_id, 5.0)
    table.drop(first)
    clock.now_s += 6.0
    table.expire()
    table.check_invariants()
    assert table.num_free == 8


def test_the_number_of_leases_is_that_of_those_that_hold_blocks(table: LeaseTable, peer_id: str, clock: Clock) -> None:
    stage(table, peer_id, KEYS[:2])
    table.open_link(peer_id)
    table.allocate(peer_id, 1, 5.0)
    assert table.num_leases == table.counts().num_leases == 2
    clock.now_s += 6.0
    table.expire()
    assert (table.num_leases, table.counts().num_leases) == (1, 0), "one is fenced"


def test_what_ended_early_is_not_remembered(table: LeaseTable, peer_id: str) -> None:
    for _ in range(1000):
        table.release(peer_id, [table.allocate(peer_id, 1, 10.0)[0]])
    assert table.num_timers < 100


@pytest.mark.parametrize("name", ["num_blocks", "max_blocks_per_peer", "max_peers", "max_ttl_s", "peer_ttl_s"])
def test_a_limit_that_is_not_positive_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LeaseConfig(**{"num_blocks": 1, "max_blocks_per_peer": 1, name: 0})


def test_a_peer_is_not_forgotten_before_its_leases_end() -> None:
    with pytest.raises(ConfigError, match="peer_ttl_s"):
        LeaseConfig(num_blocks=1, max_blocks_per_peer=1, max_ttl_s=10.0, peer_ttl_s=9.0)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_time_that_is_not_positive_is_refused(table: LeaseTable, peer_id: str, ttl_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="ttl_ms"):
        table.allocate(peer_id, 1, ttl_s)
    assert table.num_free == 8
