import itertools
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

NUM_BLOCKS = 7
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
    """Random calls by several peers, with crashes and time, against what a lease promises.

    `content` is what a writer put into a block: a leased sealed block must keep it, whatever else happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.findable: set[bytes] = set()
        ids = (f"id{number}" for number in itertools.count())
        self.table = LeaseTable(CONFIG, lambda: self.now_s, on_change=self.on_change, new_id=lambda: next(ids))
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
        before = (self.table.counts(), self.table.num_free, self.table.num_cached, self.table.generations.tolist())
        try:
            yield
        except REFUSALS:
            after = (self.table.counts(), self.table.num_free, self.table.num_cached, self.table.generations.tolist())
            assert after == before

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
            self.table.drop(pick)

    @rule()
    def outlast_a_short_lease(self) -> None:
        self.wait(3.5)

    @rule(seconds=st.sampled_from([0.5, 0.5, 1.0, 2.0, 4.0, 11.0, 26.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.table.expire()

    @invariant()
    def keeps_its_promises(self) -> None:
        self.table.check_invariants()
        for block_key in itertools.chain(*CHAINS):
            block_id = self.table.find(block_key)
            assert (block_id is not None) is (block_key in self.findable)
            assert block_id is None or self.content[block_id] == block_key
        for lease_id, (_, block_ids, contents, end_s) in self.promised.items():
            if self.now_s < end_s:
                assert [self.content[block_id] for block_id in block_ids] == contents, f"{lease_id} lost its content"

    def teardown(self) -> None:
        """After every process died and time passed, every block can be given out again, and nothing is remembered."""
        while self.holds:
            self.end_operation(0)
        while self.links:
            self.process_dies(0)
        self.now_s += 100.0
        self.table.expire()
        self.table.check_invariants()
        assert self.table.num_free == NUM_BLOCKS
        assert (self.table.counts().num_peers, self.table.counts().num_leases) == (0, 0)


TestLeases = LeaseModel.TestCase
TestLeases.settings = settings(derandomize=True, deadline=None, max_examples=200, stateful_step_count=50)


def test_a_refused_call_is_seen_as_refused() -> None:
    """The machine above counts on refusals being raised: one that is certain."""
    table = LeaseTable(CONFIG, lambda: 0.0)
    with pytest.raises(PoolExhaustedError):
        table.allocate(table.add_peer(may_map_to_write=False), NUM_BLOCKS + 1, 1.0)
