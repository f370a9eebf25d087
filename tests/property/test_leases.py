import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oasiskv.core.errors import (
    BlockNotFoundError,
    InvalidRequestError,
    LeaseExpiredError,
    PoolExhaustedError,
)
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.leases import LeaseTable
from oasiskv.core.tiers import BlockStatus, Load, Spill, Tier, Tiers

NUM_BLOCKS = 7
NUM_SLOTS = 4
CONFIG = LeaseConfig(
    num_blocks=NUM_BLOCKS, max_blocks_per_peer=5, max_leases_per_peer=5, max_peers=3, max_ttl_s=10.0, peer_ttl_s=25.0
)
CHAINS = [[f"{name}{index}".encode() for index in range(5)] for name in "xy"]
PICKS = st.integers(0, 5)
Item = TypeVar("Item")
REFUSALS = (BlockNotFoundError, InvalidRequestError, LeaseExpiredError, PoolExhaustedError)


def recent(items: list[Item], pick: int) -> Item:
    """One of the latest three: picking among all would nearly always hit what has ended."""
    return items[-1 - pick % min(3, len(items))]


class LeaseModel(RuleBasedStateMachine):
    """Random calls by several peers, with a disk, crashes and time, against what a lease promises.

    `content` is what a writer put into a block: a leased sealed block must keep it, whatever else happens. `slots` is
    what is on disk, with a root record: it outlives a crash of the service.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.findable: set[bytes] = set()
        self.ids = (f"id{number}" for number in itertools.count())
        self.slots: dict[int, tuple[bytes, int, bytes]] = {}
        """By slot: key and generation of the root record, and the bytes that are there."""
        self.seen: Counter[str] = Counter()
        self.start_service()

    def start_service(self) -> None:
        self.tiers = Tiers(
            CONFIG,
            lambda: self.now_s,
            num_disk_blocks=NUM_SLOTS,
            on_change=self.on_change,
            new_id=lambda: next(self.ids),
        )
        self.table = self.tiers.leases
        self.tiers.disk.restore((slot, key, generation) for slot, (key, generation, _) in self.slots.items())
        self.spills: list[tuple[Spill, bytes]] = []
        """With the bytes that the write began with."""
        self.loads: list[tuple[AbstractContextManager[Load], Load, str]] = []
        self.peers: list[str] = []
        self.links: list[str] = []
        self.leases: list[tuple[str, str]] = []
        self.handles: list[str] = []
        self.content: dict[int, bytes] = {}
        self.promised: dict[str, tuple[str, list[int], list[bytes], float]] = {}
        """By read lease: peer, block ids, their content when leased, earliest end."""
        self.writing: dict[str, tuple[str, list[int]]] = {}
        """By write lease that was not released: a peer that maps the pool to write, and its unsealed block ids."""
        self.mapping: set[str] = set()
        self.holds: list[tuple[AbstractContextManager[object], list[int], list[bytes | None]]] = []

    def on_change(self, block_key: bytes, is_held: bool) -> None:
        assert (block_key in self.findable) is not is_held, "an event that changes nothing"
        (self.findable.add if is_held else self.findable.discard)(block_key)

    @contextmanager
    def refused_without_a_trace(self) -> Iterator[None]:
        """A call that raises leaves every count as time alone would have left it."""
        self.table.expire()
        before = self.counts()
        try:
            yield
        except REFUSALS:
            assert self.counts() == before

    def counts(self) -> tuple[object, ...]:
        disk = self.tiers.disk
        generations = self.table.generations.tolist()
        return self.table.counts(), self.table.num_free, self.table.num_cached, generations, disk.num_held

    @rule(may_map=st.booleans())
    def add_peer(self, may_map: bool) -> None:
        if len(self.peers) > 3:
            self.peers.pop(0)
        with self.refused_without_a_trace():
            self.peers.append(self.table.add_peer(may_map_to_write=may_map))
            self.mapping |= {self.peers[-1]} if may_map else set()

    @initialize()
    def begin_with_a_writer_and_a_reader(self) -> None:
        self.add_peer(True)
        self.open_link(0)
        self.add_peer(False)

    @rule(pick=PICKS)
    def open_link(self, pick: int) -> None:
        if self.peers:
            with self.refused_without_a_trace():
                peer_id = recent(self.peers, pick)
                self.table.open_link(peer_id)
                self.links.append(peer_id)

    @rule(pick=PICKS)
    def process_dies(self, pick: int) -> None:
        if self.links and pick < 2:
            peer_id = self.links.pop(pick % len(self.links))
            self.table.close_link(peer_id)
            if peer_id not in self.links:
                self.writing = {name: entry for name, entry in self.writing.items() if entry[0] != peer_id}

    @rule(pick=PICKS, num_blocks=st.sampled_from([0, 1, 1, 2, 2, 3, 6]), ttl_s=st.sampled_from([3.0, 8.0]))
    def allocate(self, pick: int, num_blocks: int, ttl_s: float) -> None:
        if not self.peers:
            return
        peer_id = recent(self.peers, pick)
        before = self.table.generations.copy()
        with self.refused_without_a_trace():
            lease_id, block_ids = self.table.allocate(peer_id, num_blocks, ttl_s)
            assert len(set(block_ids)) == num_blocks
            changed = [i for i in range(NUM_BLOCKS) if self.table.generations[i] != before[i]]
            assert changed == sorted(block_ids), "exactly the blocks that are given out have a new generation"
            for _, held, _ in self.holds:
                assert not set(held) & set(block_ids), "a block in use by an operation was given out"
            for writer_id, own in self.writing.values():
                assert not set(own) & set(block_ids), f"{writer_id} may still write to a block that was given out"
            for block_id in block_ids:
                self.content.pop(block_id, None)
            self.leases.append((peer_id, lease_id))
            if peer_id in self.mapping and peer_id in self.links:
                self.writing[lease_id] = (peer_id, block_ids)

    @rule(pick=PICKS, chain=st.sampled_from(CHAINS), num_blocks=st.integers(1, 5))
    def write_and_seal(self, pick: int, chain: list[bytes], num_blocks: int) -> None:
        if not self.leases:
            return
        peer_id, lease_id = recent(self.leases, pick)
        with self.refused_without_a_trace():
            table = list(self.table.writable(peer_id, lease_id))
            keys = dict(enumerate(chain[: min(num_blocks, len(table))]))
            for index, key in keys.items():
                if not self.table.is_sealed(table[index]):
                    self.content[table[index]] = key
            for index, block_id in enumerate(self.table.seal(peer_id, lease_id, keys)):
                assert self.content[block_id] == keys[index], "the block of a key holds other bytes"
            if lease_id in self.writing:
                own = [block_id for block_id in self.writing[lease_id][1] if block_id not in table[: len(keys)]]
                self.writing[lease_id] = (peer_id, own)

    @rule(pick=PICKS, chain=st.sampled_from(CHAINS), num_blocks=st.integers(1, 5), is_kept=st.booleans())
    def stage_a_prompt(self, pick: int, chain: list[bytes], num_blocks: int, is_kept: bool) -> None:
        before = self.leases[-1:]
        self.allocate(pick, num_blocks, 8.0)
        if self.leases[-1:] != before:
            self.write_and_seal(0, chain, num_blocks)
            if not is_kept:
                self.release(0)

    @rule(pick=PICKS, chain=st.sampled_from(CHAINS), min_blocks=st.integers(0, 3), ttl_s=st.sampled_from([3.0, 8.0]))
    def lease(self, pick: int, chain: list[bytes], min_blocks: int, ttl_s: float) -> None:
        if not self.peers:
            return
        peer_id = recent(self.peers, pick)
        with self.refused_without_a_trace():
            lease_id, block_ids = self.table.lease(peer_id, chain, min_blocks, ttl_s)
            assert [self.content[block_id] for block_id in block_ids] == chain[: len(block_ids)]
            self.leases.append((peer_id, lease_id))
            self.promise(peer_id, lease_id, block_ids, ttl_s)

    def promise(self, peer_id: str, lease_id: str, block_ids: list[int], ttl_s: float) -> None:
        contents = [self.content[block_id] for block_id in block_ids]
        self.promised[lease_id] = (peer_id, block_ids, contents, self.now_s + ttl_s)

    @rule(pick=PICKS, ttl_s=st.sampled_from([3.0, 8.0, 99.0]))
    def renew_all(self, pick: int, ttl_s: float) -> None:
        if not self.peers:
            return
        peer_id = recent(self.peers, pick)
        with self.refused_without_a_trace():
            self.table.renew(peer_id, None, ttl_s)
            for lease_id, (owner, block_ids, contents, end_s) in self.promised.items():
                if owner == peer_id and self.now_s < end_s:
                    self.promised[lease_id] = (owner, block_ids, contents, max(end_s, self.now_s + min(ttl_s, 10.0)))

    @rule(pick=PICKS)
    def offer(self, pick: int) -> None:
        if not self.leases:
            return
        peer_id, lease_id = recent(self.leases, pick)
        with self.refused_without_a_trace():
            self.handles.append(self.table.offer(peer_id, lease_id, 5.0))
            self.promised.pop(lease_id, None)
            self.writing.pop(lease_id, None)

    @rule(pick=PICKS, handle=PICKS, min_blocks=st.integers(0, 3))
    def accept(self, pick: int, handle: int, min_blocks: int) -> None:
        if not (self.peers and self.handles):
            return
        peer_id = recent(self.peers, pick)
        with self.refused_without_a_trace():
            lease_id, block_ids = self.table.accept(peer_id, recent(self.handles, handle), min_blocks, 5.0)
            self.leases.append((peer_id, lease_id))
            self.promise(peer_id, lease_id, block_ids, 5.0)

    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        if self.leases:
            peer_id, lease_id = recent(self.leases, pick)
            with self.refused_without_a_trace():
                if self.table.release(peer_id, [lease_id]):
                    self.promised.pop(lease_id, None)
                    self.writing.pop(lease_id, None)

    @rule(pick=PICKS)
    def release_handle(self, pick: int) -> None:
        if self.handles and self.peers:
            with self.refused_without_a_trace():
                self.table.release(self.peers[-1], [], [recent(self.handles, pick)])

    @rule(pick=PICKS)
    def begin_operation(self, pick: int) -> None:
        if not self.leases:
            return
        peer_id, lease_id = recent(self.leases, pick)
        with self.refused_without_a_trace():
            hold = self.table.hold(peer_id, lease_id)
            block_ids = list(hold.__enter__())
            self.holds.append((hold, block_ids, [self.content.get(block_id) for block_id in block_ids]))

    @rule(pick=PICKS)
    def end_operation(self, pick: int) -> None:
        if self.holds:
            hold, _, _ = self.holds.pop(pick % len(self.holds))
            hold.__exit__(None, None, None)

    @rule(pick=PICKS)
    def drop_corrupt(self, pick: int) -> None:
        if pick < 2:
            for _, load, _ in self.loads:  # which keeps the block, but nobody finds it in memory any more
                load.statuses.pop(self.content.get(pick, b""), None)
            self.table.drop(pick)

    @rule()
    def begin_spill(self) -> None:
        spill = self.tiers.prepare_spill()
        if spill is not None:
            self.slots.pop(spill.to.slot, None)
            self.spills.append((spill, self.content[spill.block_id]))

    def is_current(self, spill: Spill) -> bool:
        return int(self.table.generations[spill.block_id]) == spill.generation

    def write(self, spill: Spill, content: bytes) -> None:
        self.slots[spill.to.slot] = (spill.block_key, spill.to.generation, content)

    @rule(pick=PICKS, status=st.sampled_from([BlockStatus.INTACT] * 4 + [BlockStatus.IO_ERROR, BlockStatus.DISK_FULL]))
    def end_spill(self, pick: int, status: BlockStatus) -> None:
        if not self.spills:
            return
        spill, content = self.spills.pop(pick % len(self.spills))
        if status is BlockStatus.INTACT and not self.is_current(spill):
            status = BlockStatus.STALE
        if status is BlockStatus.INTACT:
            self.write(spill, content)
        self.tiers.complete_spill(spill, status)
        self.seen[f"spill {status.value}"] += 1

    def spill_all(self) -> None:
        for _ in range(NUM_BLOCKS):
            self.begin_spill()
            self.end_spill(0, BlockStatus.INTACT)

    @rule(pick=PICKS, chain=st.sampled_from(CHAINS), min_blocks=st.integers(0, 3))
    def begin_load(self, pick: int, chain: list[bytes], min_blocks: int) -> None:
        if not self.peers:
            return
        peer_id = recent(self.peers, pick)
        with self.refused_without_a_trace():
            context = self.tiers.load(peer_id, chain, min_blocks)
            load = context.__enter__()
            self.loads.append((context, load, peer_id))
            for _, block_id in load.reads.values():
                self.content.pop(block_id, None)

    @rule(pick=PICKS, fails=st.sampled_from([False, False, True]))
    def read_one(self, pick: int, fails: bool) -> None:
        """What is in the slot now is what is read: it may have been written anew since the load began."""
        if not self.loads:
            return
        _, load, _ = self.loads[pick % len(self.loads)]
        for key, (place, block_id) in list(load.reads.items())[:1]:
            status = BlockStatus.IO_ERROR if fails else BlockStatus.CORRUPT
            if status is BlockStatus.CORRUPT and self.slots.get(place.slot) == (key, place.generation, key):
                self.content[block_id] = key
                status = BlockStatus.INTACT
            self.seen[f"load {self.tiers.complete_load(load, key, status).value}"] += 1

    @rule(pick=PICKS, chain=st.sampled_from(CHAINS), min_blocks=st.integers(0, 3))
    def end_load(self, pick: int, chain: list[bytes], min_blocks: int) -> None:
        if not self.loads:
            return
        context, load, peer_id = self.loads.pop(pick % len(self.loads))
        intact = [key for key, status in load.statuses.items() if status is BlockStatus.INTACT]
        if load.owner:
            for key in intact:
                assert self.tiers.tier_of(key) is not Tier.DISK, f"{key!r} is not in memory to the end of its load"
        if peer_id in self.peers:
            self.lease(len(self.peers) - 1 - self.peers.index(peer_id), chain, min_blocks, 8.0)
        context.__exit__(None, None, None)

    @rule(pick=PICKS)
    def cancel_load(self, pick: int) -> None:
        if self.loads:
            context, _, _ = self.loads.pop(pick % len(self.loads))
            context.__exit__(None, None, None)

    @rule(chain=st.sampled_from(CHAINS), num_intact=st.integers(0, 9), is_whole=st.booleans())
    def spill_a_prompt_and_bring_it_back(self, chain: list[bytes], num_intact: int, is_whole: bool) -> None:
        self.stage_a_prompt(1, chain, 3, False)
        self.spill_all()
        for number in range(2):
            self.allocate(number, 5 - number, 3.0)
            self.release(0)
        self.begin_load(0, chain, 0)
        last = len(self.loads) - 1
        for number in range(len(chain) if is_whole else 0):
            self.read_one(last, number == num_intact)
        if is_whole:
            self.end_load(last, chain, 0)

    @rule(pick=st.integers(0, 3))
    def service_is_killed(self, pick: int) -> None:
        """All in memory is gone; of a write under way, the root record may or may not have been written."""
        if pick or not self.slots:
            return
        for spill, content in self.spills:
            if self.is_current(spill) and len(self.slots) % 2:
                self.write(spill, content)
        self.findable.clear()
        self.start_service()
        self.begin_with_a_writer_and_a_reader()
        self.seen["kill"] += 1

    @rule()
    def outlast_a_short_lease(self) -> None:
        self.wait(3.5)

    @rule(seconds=st.sampled_from([0.5, 0.5, 1.0, 2.0, 4.0, 11.0, 26.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.table.expire()

    @invariant()
    def keeps_its_promises(self) -> None:
        self.tiers.check_invariants()
        for block_key in itertools.chain(*CHAINS):
            assert self.tiers.is_held(block_key) is (block_key in self.findable)
            block_id = self.table.find(block_key)
            assert block_id is None or self.content[block_id] == block_key
            place = self.tiers.disk.find(block_key)
            assert place is None or self.slots[place.slot] == (block_key, place.generation, block_key)
        for lease_id, (_, block_ids, contents, end_s) in self.promised.items():
            if self.now_s < end_s:
                assert [self.content[block_id] for block_id in block_ids] == contents, f"{lease_id} lost its content"

    def teardown(self) -> None:
        """After every process died and time passed, every block can be given out again, and nothing is remembered."""
        while self.holds:
            self.end_operation(0)
        while self.loads:
            self.loads.pop()[0].__exit__(None, None, None)
        while self.spills:
            self.end_spill(0, BlockStatus.INTACT)
        while self.links:
            self.process_dies(0)
        self.now_s += 100.0
        self.table.expire()
        self.tiers.check_invariants()
        assert self.table.num_free == NUM_BLOCKS
        assert (self.table.counts().num_peers, self.table.counts().num_leases) == (0, 0)


TestLeases = LeaseModel.TestCase
TestLeases.settings = settings(max_examples=max(200, settings().max_examples), stateful_step_count=50)


def test_a_refused_call_is_seen_as_refused() -> None:
    """The machine above counts on refusals being raised: one that is certain."""
    table = LeaseTable(CONFIG, lambda: 0.0)
    with pytest.raises(PoolExhaustedError):
        table.allocate(table.add_peer(may_map_to_write=False), NUM_BLOCKS + 1, 1.0)
