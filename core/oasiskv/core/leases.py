"""Who may use which host blocks of a pool that several processes share, and until when; a service moves the bytes.

A lease is an owner in `HostBlockManager`: what no lease references is free, or cached and evictable. Whatever ends a
lease goes through one place here, so no exit can forget its blocks.
"""

import heapq
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import BlockNotFoundError, InvalidRequestError, LeaseExpiredError, PoolExhaustedError
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.lease_limits import LeaseConfig, LeaseCounts
from oasiskv.core.lease_records import LeaseRecord, LeaseState, PeerRecord


class LeaseTable:
    """Give out, prolong and end leases on the blocks of one pool; not thread-safe.

    Every call first ends what is over by the clock, so a waiting peer gets room without any reaper. A call that raises
    has taken nothing.
    """

    def __init__(
        self,
        config: LeaseConfig,
        clock: Callable[[], float],
        *,
        generations: NDArray[np.uint64] | None = None,
        on_change: Callable[[bytes, bool], None] | None = None,
        on_cached: Callable[[bytes], None] | None = None,
        on_free: Callable[[int], None] | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        """Start with all blocks free.

        Args:
            config: Limits.
            clock: Seconds that never go back.
            generations: `[num_blocks]`, changed in place when a block is given out for new content; may be memory that
                readers see. None to keep them here.
            on_change: Called with a block key and whether it can be found from now on.
            on_cached: Called with the key of a block that no lease references any more; it can be evicted from now on.
            on_free: Called with the id of a block whose content nobody can use any more.
            new_id: Makes identifiers; they must be unguessable where peers do not trust one another.
        """
        self._config = config
        self._clock = clock
        self._new_id = new_id
        self._on_change = on_change or (lambda block_key, is_held: None)
        self.blocks = HostBlockManager(
            config.num_blocks, lambda block_key: self._on_change(block_key, False), on_cached, on_free
        )
        """Who owns which block; others than this table change it only for an owner of `temporary_owner`."""
        self.generations = np.zeros(config.num_blocks, np.uint64) if generations is None else generations
        """`[num_blocks]`, by block id."""
        self._peers: dict[str, PeerRecord] = {}
        self._leases: dict[str, LeaseRecord] = {}
        self._handles: dict[str, str] = {}
        # One entry per peer or lease, perhaps earlier than its deadline: renewing must not cost a search.
        self._timers: list[tuple[float, str]] = []
        self._num_expired = 0
        self._holds: set[str] = set()
        self._hold_numbers = itertools.count()

    @property
    def num_free(self) -> int:
        """Blocks that can be given out, the cached ones among them."""
        return self.blocks.num_free

    @property
    def num_cached(self) -> int:
        """Sealed blocks that no lease references."""
        return self.blocks.num_cached

    @property
    def num_timers(self) -> int:
        """Entries that wait for their time; bounded by the peers and leases there are."""
        return len(self._timers)

    @property
    def num_leases(self) -> int:
        """Leases and handles, the fenced ones among them; O(1)."""
        return len(self._leases)

    def counts(self) -> LeaseCounts:
        """Return what is held; costs O(leases)."""
        states = [(lease.state, lease_id) for lease_id, lease in self._leases.items()]
        return LeaseCounts(
            num_peers=len(self._peers),
            num_leases=sum(state in (LeaseState.ACTIVE, LeaseState.OFFERED) for state, _ in states),
            num_fenced_blocks=sum(len(self.blocks.table(name)) for state, name in states if state is LeaseState.FENCED),
            num_links=sum(peer.num_links for peer in self._peers.values()),
            num_expired_total=self._num_expired,
        )

    def add_peer(self, *, may_map_to_write: bool) -> str:
        """Return the id of a new peer; where there are `max_peers`, in place of the idle one silent for longest.

        Processes that end without a word would keep living ones out for `peer_ttl_s`; these lose no block by it.

        Args:
            may_map_to_write: Whether the peer can write to blocks without asking, once it has a link.

        Raises:
            PoolExhaustedError: There are `max_peers` already, and none is idle.
        """
        self.expire()
        if len(self._peers) >= self._config.max_peers:
            idle = [(peer.deadline_s, name) for name, peer in self._peers.items() if peer.is_idle]
            if not idle:
                raise PoolExhaustedError(f"max_peers: expected at most {self._config.max_peers} peers, got one more")
            del self._peers[min(idle)[1]]
        peer_id = self._new_id()
        deadline_s = self._clock() + self._config.peer_ttl_s
        self._peers[peer_id] = PeerRecord(may_map_to_write, deadline_s)
        self._start_timer(deadline_s, peer_id)
        return peer_id

    def has_peer(self, peer_id: str) -> bool:
        """Whether a peer is known."""
        return peer_id in self._peers

    def touch(self, peer_id: str) -> None:
        """Keep a peer alive.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
        """
        self._peer(peer_id)

    def open_link(self, peer_id: str) -> None:
        """Note that a process of the peer is being given the memory; it may write until `close_link`.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
        """
        self._peer(peer_id).num_links += 1

    def close_link(self, peer_id: str) -> None:
        """Note that a process of the peer is gone; with the last one its fenced blocks are free. Never fails."""
        self.expire()
        peer = self._peers[peer_id]  # a peer with links is not forgotten
        peer.num_links -= 1
        if not peer.num_links:
            for lease in [self._leases[name] for name in peer.lease_ids]:
                if lease.state is LeaseState.FENCED:
                    self._end(lease)

    def allocate(
        self, peer_id: str, num_blocks: int, ttl_s: float, keys: Sequence[bytes] = ()
    ) -> tuple[str, list[int]]:
        """Take blocks to write to, and return the id of a write lease and the block ids; their generations change.

        The longest prefix of `keys` that is held comes first in the lease, as it is: these blocks are sealed.

        Raises:
            InvalidRequestError: `num_blocks` or `ttl_s` is not positive.
            LeaseExpiredError: The peer is unknown or forgotten.
            PoolExhaustedError: Too little is free or evictable, or a quota is reached; nothing is taken.
        """
        if num_blocks <= 0:
            raise InvalidRequestError(f"num_blocks: expected a positive number, got {num_blocks}")
        peer = self._peer(peer_id)
        ttl_s = self._config.granted_ttl(ttl_s)
        self._check_quota(peer, num_blocks)
        lease_id = self._new_id()
        held, new = self.blocks.continue_prefix(lease_id, keys[:num_blocks], num_blocks)
        self.generations[new] += np.uint64(1)
        self._attach(LeaseRecord(lease_id, None, True, 0.0), peer_id, ttl_s)
        return lease_id, held + new

    def seal(self, peer_id: str, lease_id: str, block_keys: Mapping[int, bytes]) -> list[int]:
        """Declare blocks of a write lease final and findable; sealing again under the same key changes nothing.

        Args:
            peer_id: Owner of the lease.
            lease_id: A write lease.
            block_keys: Key by block index.

        Returns:
            Block ids, in the order of `block_keys`. Another than the allocated one where the key was held already: the
            lease then references that one, and the peer's own is given back.

        Raises:
            InvalidRequestError: No write lease, no such block, or it has another key; nothing is sealed.
            LeaseExpiredError: The peer or the lease is unknown or has ended; nothing is sealed.
        """
        table = self.writable(peer_id, lease_id)
        for block_index, block_key in block_keys.items():
            if not 0 <= block_index < len(table):
                raise InvalidRequestError(f"block_index: expected less than {len(table)}, got {block_index}")
            sealed_key = self.blocks.key_of(table[block_index])
            if sealed_key not in (None, block_key):
                raise InvalidRequestError(f"block_key: expected the key under which block {block_index} is sealed")
        block_ids = []
        for block_index, block_key in block_keys.items():
            is_new = self.blocks.find(block_key) is None
            block_ids.append(self.blocks.seal_or_share(lease_id, block_index, block_key))
            if is_new:
                self._on_change(block_key, True)
        return block_ids

    def find(self, block_key: bytes) -> int | None:
        """Return the block that is sealed under a key; None if there is none. Without a lease it may be evicted."""
        return self.blocks.find(block_key)

    def is_sealed(self, block_id: int) -> bool:
        """Whether the content of a block is final."""
        return self.blocks.key_of(block_id) is not None

    def lease(self, peer_id: str, block_keys: Sequence[bytes], min_blocks: int, ttl_s: float) -> tuple[str, list[int]]:
        """Take a read lease on the longest prefix of keys that is held, and return its id and the block ids.

        Raises:
            BlockNotFoundError: Fewer than `min_blocks`, or than one, are held; nothing is taken.
            InvalidRequestError: `ttl_s` is not positive.
            LeaseExpiredError: The peer is unknown or forgotten.
            PoolExhaustedError: A quota is reached; nothing is taken.
        """
        peer = self._peer(peer_id)
        ttl_s = self._config.granted_ttl(ttl_s)
        num_found = next((i for i, key in enumerate(block_keys) if self.blocks.find(key) is None), len(block_keys))
        if num_found < max(1, min_blocks):
            raise BlockNotFoundError(f"min_blocks: expected {max(1, min_blocks)} blocks to be held, got {num_found}")
        self._check_quota(peer, num_found)
        lease_id = self._new_id()
        block_ids = self.blocks.adopt(lease_id, block_keys)
        self._attach(LeaseRecord(lease_id, None, False, 0.0), peer_id, ttl_s)
        return lease_id, block_ids

    def offer(self, peer_id: str, lease_id: str, ttl_s: float) -> str:
        """Turn a lease into a handle that any peer can accept; it counts for this peer until then.

        Raises:
            InvalidRequestError: A block of it is not sealed, or `ttl_s` is not positive; the lease goes on.
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        ttl_s = self._config.granted_ttl(ttl_s)
        lease = self._lease(peer_id, lease_id)
        for block_index, block_id in enumerate(self.blocks.table(lease_id)):
            if not self.is_sealed(block_id):
                raise InvalidRequestError(f"lease_id: expected all blocks sealed, got block {block_index} not sealed")
        handle = self._new_id()
        self._handles[handle] = lease_id
        lease.handle = handle
        lease.state = LeaseState.OFFERED
        lease.deadline_s = self._clock() + ttl_s
        self._start_timer(lease.deadline_s, lease_id)
        return handle

    def accept(self, peer_id: str, handle: str, min_blocks: int, ttl_s: float) -> tuple[str, list[int]]:
        """Take over a handle as a read lease; as `lease` otherwise, and on an error the handle stays.

        Raises:
            LeaseExpiredError: Also if the handle is unknown, used up or has ended.
        """
        peer = self._peer(peer_id)
        ttl_s = self._config.granted_ttl(ttl_s)
        lease_id = self._handles.get(handle)
        if lease_id is None:
            raise LeaseExpiredError("handle: expected one that waits for a peer, got one that is unknown or has ended")
        block_ids = list(self.blocks.table(lease_id))
        if len(block_ids) < min_blocks:
            raise BlockNotFoundError(f"min_blocks: expected {min_blocks} blocks to be held, got {len(block_ids)}")
        lease = self._leases[lease_id]
        if lease.peer_id != peer_id:
            self._check_quota(peer, len(block_ids))
        del self._handles[handle]
        self._detach(lease)
        # Under a new id, since the one who offered it knows the old one.
        accepted_id = self._new_id()
        self.blocks.rename(lease_id, accepted_id)
        del self._leases[lease_id]
        lease.lease_id, lease.is_write, lease.state, lease.handle = accepted_id, False, LeaseState.ACTIVE, None
        self._attach(lease, peer_id, ttl_s)
        return accepted_id, block_ids

    def renew(self, peer_id: str, lease_ids: Iterable[str] | None, ttl_s: float) -> list[str]:
        """Prolong leases, None for all, to `ttl_s` from now, shortening none; return those that are unknown or ended.

        Raises:
            InvalidRequestError: `ttl_s` is not positive.
            LeaseExpiredError: The peer is unknown or forgotten.
        """
        deadline_s = self._clock() + self._config.granted_ttl(ttl_s)
        peer = self._peer(peer_id)
        active = {name for name in peer.lease_ids if self._leases[name].state is LeaseState.ACTIVE}
        wanted = active if lease_ids is None else set(lease_ids)
        for lease_id in wanted & active:
            lease = self._leases[lease_id]
            lease.deadline_s = max(lease.deadline_s, deadline_s)
        return sorted(wanted - active)

    def release(self, peer_id: str, lease_ids: Iterable[str], handles: Iterable[str] = ()) -> int:
        """End leases and handles; those that are unknown or have ended are passed over.

        A fenced lease is freed by it too: the peer promises that it writes no more.

        Returns:
            How many ended by this call.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
        """
        peer = self._peer(peer_id)
        own = [self._leases[lease_id] for lease_id in set(lease_ids) & peer.lease_ids]
        ending = [lease for lease in own if lease.state in (LeaseState.ACTIVE, LeaseState.FENCED)]
        ending += [self._leases[self._handles[handle]] for handle in set(handles) & self._handles.keys()]
        for lease in ending:
            self._end(lease)
        return len(ending)

    def discard(self, lease_id: str) -> None:
        """End a lease whose id no peer has learnt; an unknown one is passed over."""
        if lease_id in self._leases:
            self._end(self._leases[lease_id])

    def readable(self, peer_id: str, lease_id: str) -> Sequence[int]:
        """Return the block ids of a lease by block index, valid until the next call.

        Raises:
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        self._lease(peer_id, lease_id)
        return self.blocks.table(lease_id)

    def writable(self, peer_id: str, lease_id: str) -> Sequence[int]:
        """As `readable`, for a write lease.

        Raises:
            InvalidRequestError: The lease is no write lease.
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        if not self._lease(peer_id, lease_id).is_write:
            raise InvalidRequestError("lease_id: expected a write lease, got a read lease")
        return self.blocks.table(lease_id)

    @contextmanager
    def hold(self, peer_id: str, lease_id: str) -> Iterator[Sequence[int]]:
        """Keep the blocks of a lease from anyone else while an operation of this process uses them.

        The lease may end meanwhile, and so may the peer; the blocks are given back when the operation is over, however
        it ends. Yields the block ids by block index.

        Raises:
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        self._lease(peer_id, lease_id)
        with self.temporary_owner() as hold_id:
            self.blocks.fork(lease_id, hold_id)
            yield self.blocks.table(hold_id)

    @contextmanager
    def temporary_owner(self) -> Iterator[str]:
        """Yield a name for an owner of blocks that is no lease; all that it owns is given back at the end."""
        hold_id = f"hold {next(self._hold_numbers)}"
        self._holds.add(hold_id)
        try:
            yield hold_id
        finally:
            self._holds.remove(hold_id)
            self.blocks.release(hold_id)

    def drop(self, block_id: int) -> None:
        """Let a block with wrong bytes not be found any more; the leases on it go on, its content is not theirs."""
        block_key = self.blocks.key_of(block_id)
        if block_key is not None:
            self.blocks.forget(block_id)
            self._on_change(block_key, False)

    def expire(self) -> None:
        """End what is over by the clock; O(log n) for each."""
        now_s = self._clock()
        while self._timers and self._timers[0][0] <= now_s:
            _, name = heapq.heappop(self._timers)
            owner = self._leases.get(name) or self._peers.get(name)
            if owner is None:
                continue
            if owner.deadline_s > now_s:
                heapq.heappush(self._timers, (owner.deadline_s, name))
            elif isinstance(owner, LeaseRecord):
                self._expire_lease(owner)
            else:
                self._expire_peer(name, owner, now_s)

    def check_invariants(self) -> None:
        """Assert what always holds; costs O(blocks + leases)."""
        self.blocks.check_invariants()
        owners = self.blocks.owners()
        assert self._leases.keys() == owners - self._holds, "blocks without a lease, or the reverse"
        for peer_id, peer in self._peers.items():
            own = {name for name, lease in self._leases.items() if lease.peer_id == peer_id}
            assert peer.lease_ids == own, "a peer and its leases disagree"
            assert peer.num_blocks == sum(len(self.blocks.table(name)) for name in own), "a quota is miscounted"
            assert peer.num_blocks <= self._config.max_blocks_per_peer
            assert peer.num_links >= 0
        offered = {name for name, lease in self._leases.items() if lease.state is LeaseState.OFFERED}
        assert sorted(self._handles.values()) == sorted(offered), "a handle without a lease, or the reverse"
        timed = {name for _, name in self._timers}
        for lease_id, lease in self._leases.items():
            if lease.state in (LeaseState.ACTIVE, LeaseState.OFFERED):
                assert lease_id in timed, "a lease that never ends"
            if lease.state is LeaseState.FENCED:
                assert lease.peer_id is not None
                assert self._peers[lease.peer_id].num_links > 0, "a fence around a writer that is gone"

    def _peer(self, peer_id: str) -> PeerRecord:
        self.expire()
        peer = self._peers.get(peer_id)
        if peer is None:
            raise LeaseExpiredError("peer_id: expected a registered peer, got one that is unknown or forgotten")
        peer.deadline_s = self._clock() + self._config.peer_ttl_s
        return peer

    def _lease(self, peer_id: str, lease_id: str) -> LeaseRecord:
        peer = self._peer(peer_id)
        if lease_id in peer.lease_ids and self._leases[lease_id].state is LeaseState.ACTIVE:
            return self._leases[lease_id]
        raise LeaseExpiredError("lease_id: expected a lease of this peer, got one that is unknown or has ended")

    def check_quota(self, peer_id: str, num_blocks: int) -> None:
        """Refuse a peer that may not lease as many blocks more.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
            PoolExhaustedError: A quota is reached.
        """
        self._check_quota(self._peer(peer_id), num_blocks)

    def _check_quota(self, peer: PeerRecord, num_blocks: int, num_leases: int = 1) -> None:
        if peer.num_blocks + num_blocks > self._config.max_blocks_per_peer:
            left = self._config.max_blocks_per_peer - peer.num_blocks
            raise PoolExhaustedError(f"num_blocks: expected at most {left} within the quota, got {num_blocks}")
        if len(peer.lease_ids) + num_leases > self._config.max_leases_per_peer:
            raise PoolExhaustedError(f"max_leases_per_peer: expected at most {self._config.max_leases_per_peer} leases")

    def _attach(self, lease: LeaseRecord, peer_id: str, ttl_s: float) -> None:
        """Give a lease that counts for no peer to one, from now on."""
        lease.peer_id = peer_id
        lease.deadline_s = self._clock() + ttl_s
        self._leases[lease.lease_id] = lease
        peer = self._peers[peer_id]
        peer.lease_ids.add(lease.lease_id)
        peer.num_blocks += len(self.blocks.table(lease.lease_id))
        self._start_timer(lease.deadline_s, lease.lease_id)

    def _start_timer(self, deadline_s: float, name: str) -> None:
        heapq.heappush(self._timers, (deadline_s, name))
        # What ended early leaves its entry behind; without this a busy hour would be remembered for a whole lease.
        if len(self._timers) > 64 + 4 * (len(self._leases) + len(self._peers)):
            owners: dict[str, LeaseRecord | PeerRecord] = {**self._leases, **self._peers}
            self._timers = [(owner.deadline_s, name) for name, owner in owners.items()]
            heapq.heapify(self._timers)

    def _expire_lease(self, lease: LeaseRecord) -> None:
        if lease.state not in (LeaseState.ACTIVE, LeaseState.OFFERED):
            return
        self._num_expired += 1
        peer = self._peers.get(lease.peer_id) if lease.peer_id is not None else None
        is_mapped = peer is not None and peer.may_map_to_write and peer.num_links > 0
        # A sealed block is written no more: whoever sealed it said so, and the checksums were right then. That all
        # blocks of a handle were sealed is sure even if one of them was found to be corrupt since.
        is_open = lease.state is LeaseState.ACTIVE and not all(map(self.is_sealed, self.blocks.table(lease.lease_id)))
        if lease.is_write and is_mapped and is_open:
            lease.state = LeaseState.FENCED
        else:
            self._end(lease)

    def _expire_peer(self, peer_id: str, peer: PeerRecord, now_s: float) -> None:
        if peer.num_links:  # it lives, and the end of its last link will be noticed
            peer.deadline_s = now_s + self._config.peer_ttl_s
            heapq.heappush(self._timers, (peer.deadline_s, peer_id))
            return
        # All of them are due as well: no lease and no handle outlasts `peer_ttl_s` after the peer's last call.
        for lease_id in list(peer.lease_ids):
            self._end(self._leases[lease_id])
        del self._peers[peer_id]

    def _end(self, lease: LeaseRecord) -> None:
        """The only way out of a lease, whatever the reason."""
        if lease.handle is not None:
            del self._handles[lease.handle]
        self._detach(lease)
        del self._leases[lease.lease_id]
        self.blocks.release(lease.lease_id)

    def _detach(self, lease: LeaseRecord) -> None:
        """Let a lease count for no peer any more."""
        if lease.peer_id is not None:
            peer = self._peers[lease.peer_id]
            peer.lease_ids.discard(lease.lease_id)
            peer.num_blocks -= len(self.blocks.table(lease.lease_id))
            lease.peer_id = None
