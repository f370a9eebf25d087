"""How blocks go between memory and SSD: what is spilled, what is read back, and what of it can be found.

The bytes are moved by a service, between `prepare_spill` and `complete_spill`, and within `load`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.disk_blocks import DiskBlock, DiskBlocks
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.leases import LeaseTable


class Tier(Enum):
    """Where a staging service holds a copy."""

    HOST = "host"
    DISK = "disk"


class BlockStatus(Enum):
    """What became of one block; every transfer says it for each of its blocks."""

    INTACT = "intact"
    """The bytes are what their writer wrote."""

    ABSENT = "absent"
    """No tier holds the block."""

    NOT_READ = "not_read"
    """On disk, but no memory is free or evictable for it, the disk is busy, or a block before it is not held."""

    STALE = "stale"
    """The block got other content while it was copied, so the copy is no use."""

    IO_ERROR = "io_error"
    """The device failed, or gave less than was asked for."""

    DISK_FULL = "disk_full"
    """The file system has no room."""

    CORRUPT = "corrupt"
    """Root record or checksum differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """A block to be written to disk: its bytes are right only if `generation` is still that of the block after it."""

    block_key: bytes
    block_id: int
    generation: int
    to: DiskBlock


@dataclass(slots=True, kw_only=True)
class Load:
    """The blocks that a lease needs and that are only on disk."""

    statuses: dict[bytes, BlockStatus]
    """Of every key that was asked for; INTACT for those in memory."""

    reads: dict[bytes, tuple[DiskBlock, int]]
    """What is still to be read, by key: from which slot into which block; in order of block index."""

    owner: str = ""
    """Who owns the blocks that are read into."""

    places: dict[bytes, int] = field(default_factory=dict)
    """By key: index of its block among those of the owner."""


class Tiers:
    """A lease table over memory and a disk below it; not thread-safe, as the lease table.

    A block that no lease references any more waits to be spilled, in the order of release, and stays in memory until
    its room is needed. Memory never waits for the disk: what is evicted before its turn is lost, and counted.
    """

    def __init__(
        self,
        config: LeaseConfig,
        clock: Callable[[], float],
        *,
        num_disk_blocks: int = 0,
        generations: NDArray[np.uint64] | None = None,
        on_change: Callable[[bytes, bool], None] | None = None,
        on_spill_due: Callable[[], None] = lambda: None,
        on_free: Callable[[int], None] | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            config: Limits.
            clock: Seconds that never go back.
            num_disk_blocks: Capacity of the disk, in host blocks; 0 for none.
            generations: As for `LeaseTable`.
            on_change: Called with a block key and whether any tier holds it from now on.
            on_spill_due: Called when `prepare_spill` has something to do.
            on_free: As for `LeaseTable`.
            new_id: As for `LeaseTable`.
        """
        self._on_change = on_change or (lambda block_key, is_held: None)
        self._on_spill_due = on_spill_due
        self._unwritten: dict[bytes, None] = {}
        self.num_sealed = 0
        """Blocks that got into memory by sealing, since the start."""
        self.num_left = 0
        """Blocks that left memory, evicted or dropped, since the start."""
        self.num_lost = 0
        """Blocks that were evicted from memory before they were on disk, since the start; 0 without a disk."""
        self.disk = DiskBlocks(num_disk_blocks, self._disk_changed)
        ids = {} if new_id is None else {"new_id": new_id}
        self.leases = LeaseTable(
            config,
            clock,
            generations=generations,
            on_change=self._memory_changed,
            on_cached=self._cached if num_disk_blocks else None,
            on_free=on_free,
            **ids,
        )

    @property
    def num_unwritten(self) -> int:
        """Blocks that wait to be spilled."""
        return len(self._unwritten)

    def missing(self, block_keys: Sequence[bytes]) -> tuple[int, dict[bytes, DiskBlock]]:
        """Return the length of the longest prefix that some tier holds, and where those of it are that memory lacks."""
        num_found = next((i for i, key in enumerate(block_keys) if not self.is_held(key)), len(block_keys))
        absent = (key for key in block_keys[:num_found] if self.leases.find(key) is None)
        return num_found, {key: place for key in absent if (place := self.disk.find(key)) is not None}

    def is_held(self, block_key: bytes) -> bool:
        """Whether any tier holds a block."""
        return self.tier_of(block_key) is not None

    def tier_of(self, block_key: bytes) -> Tier | None:
        """Return the highest tier that holds a block."""
        if self.leases.find(block_key) is not None:
            return Tier.HOST
        return None if self.disk.find(block_key) is None else Tier.DISK

    def statuses(self, block_keys: Sequence[bytes]) -> list[BlockStatus]:
        """Return what each block is without reading any."""
        before = {Tier.HOST: BlockStatus.INTACT, Tier.DISK: BlockStatus.NOT_READ, None: BlockStatus.ABSENT}
        return [before[self.tier_of(block_key)] for block_key in block_keys]

    def prepare_spill(self) -> Spill | None:
        """Return the next block to write to disk, None if there is none; `complete_spill` must follow.

        Nothing is pinned by it: the block may be evicted while it is written, which its generation tells.
        """
        while self._unwritten and self.disk.has_room:
            block_key = next(iter(self._unwritten))
            del self._unwritten[block_key]
            block_id = self.leases.find(block_key)
            assert block_id is not None, "what leaves memory waits no more"
            place = self.disk.prepare_write(block_key)
            if place is not None:
                generation = int(self.leases.generations[block_id])
                return Spill(block_key=block_key, block_id=block_id, generation=generation, to=place)
        return None

    def complete_spill(self, spill: Spill, status: BlockStatus) -> None:
        """End a spill; after a failure the block is not on disk, and waits again only when it is next released."""
        is_bad = status is BlockStatus.IO_ERROR
        self.disk.complete_write(spill.block_key, is_written=status is BlockStatus.INTACT, is_bad=is_bad)
        # Its key was sealed anew meanwhile, in another block, and perhaps released while this write was under way.
        if status is BlockStatus.STALE and self.leases.find(spill.block_key) is not None:
            self._cached(spill.block_key)

    @contextmanager
    def load(self, peer_id: str, block_keys: Sequence[bytes], min_blocks: int) -> Iterator[Load]:
        """Keep the longest prefix of keys that some tier holds, and take memory for those that are only on disk.

        What is read is told to `complete_load`, each block once. At the end all is given back: the caller takes its
        lease before. Nothing is taken if the prefix is shorter than `min_blocks`.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
            PoolExhaustedError: A quota is reached; nothing is taken.
        """
        num_found, missing = self.missing(block_keys)
        load = Load(statuses=dict(zip(block_keys, self.statuses(block_keys), strict=True)), reads={})
        if not missing or num_found < min_blocks:
            yield load
            return
        self.leases.check_quota(peer_id, num_found)
        blocks = self.leases.blocks
        with self.leases.temporary_owner() as kept, self.leases.temporary_owner() as load.owner:
            blocks.adopt(kept, [key for key in dict.fromkeys(block_keys[:num_found]) if key not in missing])
            block_ids = blocks.extend(load.owner, min(len(missing), blocks.num_free))
            self.leases.generations[block_ids] += np.uint64(1)
            for index, (block_key, block_id) in enumerate(zip(missing, block_ids, strict=False)):
                load.reads[block_key] = (missing[block_key], block_id)
                load.places[block_key] = index
            yield load

    def complete_load(self, load: Load, block_key: bytes, status: BlockStatus) -> BlockStatus:
        """End the reading of one block; one that failed cannot be found on disk any more, so nobody tries it again.

        Returns:
            The status; ABSENT for a block whose slot got other content meanwhile, which is no fault of the disk.
        """
        place, _ = load.reads.pop(block_key)
        if status is BlockStatus.INTACT:
            was_held = self.is_held(block_key)
            self.leases.blocks.seal_or_share(load.owner, load.places[block_key], block_key)
            if not was_held:  # its slot went to another while it was read
                self._on_change(block_key, True)
        elif self.disk.find(block_key) == place:
            self.disk.drop(block_key, is_bad=status is BlockStatus.IO_ERROR)
        else:
            status = BlockStatus.ABSENT
        load.statuses[block_key] = status
        return status

    def check_invariants(self) -> None:
        """Assert what always holds; costs O(blocks + slots + leases)."""
        self.leases.check_invariants()
        self.disk.check_invariants()
        for block_key in self._unwritten:
            assert self.leases.find(block_key) is not None, "a block waits to be spilled and is not in memory"

    def _cached(self, block_key: bytes) -> None:
        self.disk.touch(block_key)
        if self.disk.find(block_key) is None and not self.disk.is_writing(block_key):
            self._unwritten[block_key] = None
            self._on_spill_due()

    def _memory_changed(self, block_key: bytes, is_held: bool) -> None:
        is_on_disk = self.disk.find(block_key) is not None
        if is_held:
            self.num_sealed += 1
        else:
            self.num_left += 1
            self._unwritten.pop(block_key, None)
            self.num_lost += bool(self.disk.num_slots) and not is_on_disk
        if not is_on_disk:
            self._on_change(block_key, is_held)

    def _disk_changed(self, block_key: bytes, is_held: bool) -> None:
        if self.leases.find(block_key) is None:
            self._on_change(block_key, is_held)
