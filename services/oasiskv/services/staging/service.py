"""Decides what happens to blocks: the rules are those of `core.leases`, the bytes those of `memory`."""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import (
    CorruptBlockError,
    InvalidRequestError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.tiers import BlockStatus, Tier, Tiers
from oasiskv.services.checksums import block_checksums, checksum
from oasiskv.services.staging.changes import ChangeLog
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.directory import Directory, ServiceLoad
from oasiskv.services.staging.disk_file import DiskFile
from oasiskv.services.staging.disk_tier import DISK_ERRORS, DiskTier
from oasiskv.services.staging.keys import check_key, check_keys
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.wiper import Wiper
from oasiskv.services.threads import in_thread

logger = logging.getLogger(__name__)


class Access(Enum):
    """How a peer moves bytes."""

    STREAM = "stream"
    MAP_READ = "map_read"
    MAP_WRITE = "map_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer of one rank of a block, as it travels."""

    block_index: int
    part: int
    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRequest:
    """A block that its writer says is final."""

    block_index: int
    block_key: bytes
    checksums: Sequence[int] | NDArray[np.uint64]
    """By part, as the writer computed them from its own copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRange:
    """Consecutive parts of one block."""

    block_index: int
    first_part: int
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Where sealed blocks are and what they must hash to."""

    block_indices: Sequence[int]
    block_ids: NDArray[np.uint64]
    """`[n]`."""
    generations: NDArray[np.uint64]
    """`[n]`."""
    checksums: NDArray[np.uint64]
    """`[n, num_parts]`."""


class StagingService:
    """One pool of host blocks and those who use it; one event loop calls it and alone changes its state.

    What takes long, hashing and wiping, runs in threads while the lease's blocks are held, so that the loop goes on.
    """

    def __init__(
        self,
        config: StagingConfig,
        memory: StagingMemory,
        clock: Callable[[], float] = time.monotonic,
        disk_file: DiskFile | None = None,
    ) -> None:
        """Start with all memory free.

        Args:
            config: What is held, and for whom.
            memory: The pool.
            clock: Seconds that never go back.
            disk_file: The SSD tier, if there is one; its traffic begins with `disk_tier.start`.
        """
        self.config = config
        self.memory = memory
        self.epoch = secrets.token_hex(8)
        """Changes with every start, which loses the blocks."""
        self.changes = ChangeLog()
        self.num_corrupt_blocks = 0
        """Blocks whose bytes differed from their checksum, since the start."""
        self.num_leased = {Tier.HOST.value: 0, Tier.DISK.value: 0}
        """Blocks given to leases by key, by the tier that held them, since the start."""
        self.num_missed = {status.value: 0 for status in BlockStatus if status is not BlockStatus.INTACT}
        """Leases by key that ended before the last key that was asked for, by what became of the next block."""
        self.is_draining = False
        self.wiper = Wiper(memory)
        self.tiers = Tiers(
            config.leases,
            clock,
            num_disk_blocks=disk_file.num_slots if disk_file else 0,
            generations=memory.generations,
            on_change=self.changes.add,
            on_spill_due=lambda: self.disk_tier.spill_is_due() if self.disk_tier else None,
            on_free=self.wiper.freed,
        )
        self.leases = self.tiers.leases
        self.disk_tier: DiskTier | None = None
        if config.disk and disk_file:
            self.disk_tier = DiskTier(config.disk, disk_file, self.tiers, memory, self.wiper)
        self.directory = Directory(
            config.directory, config.fingerprint, self.epoch, self.changes, self.tiers.is_held, self._load
        )
        self._access: dict[str, Access] = {}

    def register_peer(self, fingerprint: Fingerprint, name: str, access: Access) -> str:
        """Return the id of a new peer.

        Raises:
            InvalidRequestError: The name is empty or longer than 128 characters.
            PeerUnavailableError: The service drains.
            PoolExhaustedError: There are too many peers.
            UnsupportedError: The fingerprint differs, or the service is strict and the peer wants to map the pool.
        """
        self._refuse_if_draining()
        if not 1 <= len(name) <= 128:
            raise InvalidRequestError(f"name: expected 1 to 128 characters, got {len(name)}")
        self.config.fingerprint.require(fingerprint)
        if self.config.is_strict and access is not Access.STREAM:
            raise UnsupportedError("access: expected ACCESS_STREAM, since the service is strict, got one that maps")
        peer_id = self.leases.add_peer(may_map_to_write=access is Access.MAP_WRITE)
        self._access = {known: self._access[known] for known in self._access if self.leases.has_peer(known)}
        self._access[peer_id] = access
        logger.info("peer %r registered to %s", name, access.value)
        return peer_id

    @property
    def num_known_access(self) -> int:
        """Peers whose way of access is remembered; those forgotten go with the next that registers."""
        return len(self._access)

    @property
    def num_disk_errors(self) -> int:
        """Blocks that the disk failed to write, or to give back as they were, since the start."""
        counts = self.disk_tier.counts if self.disk_tier else {}
        return sum(number for (_, status), number in counts.items() if status in DISK_ERRORS)

    def open_link(self, peer_id: str) -> bool:
        """Note that a process of a peer gets the memory, and return whether it may write.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
            UnsupportedError: The peer registered for streams only.
        """
        self.require_mapping(peer_id)
        self.leases.open_link(peer_id)
        return self._access[peer_id] is Access.MAP_WRITE

    def require_mapping(self, peer_id: str) -> None:
        """Refuse a peer that may not use the memory itself; raises as `open_link`."""
        self.leases.touch(peer_id)
        if self._access[peer_id] is Access.STREAM:
            raise UnsupportedError("access: expected a peer that maps the pool, got one for streams")

    async def allocate(
        self, peer_id: str, num_blocks: int, ttl_s: float, block_keys: Sequence[bytes] = ()
    ) -> tuple[str, list[int]]:
        """Take blocks to write to, behind those that are held under some keys; the others' bytes are all 0.

        Raises as `LeaseTable.allocate`, and PeerUnavailableError on drain.
        """
        self._refuse_if_draining()
        check_keys(block_keys)
        lease_id, block_ids = self.leases.allocate(peer_id, num_blocks, ttl_s, block_keys)
        new_ids = [block_id for block_id in block_ids if not self.leases.is_sealed(block_id)]
        self.memory.is_corrupt[new_ids] = False
        try:
            with self.leases.hold(peer_id, lease_id):
                await self.wiper.taken(new_ids)
                await in_thread(partial(self.memory.wipe, new_ids))
            # The lease may have ended meanwhile; then nobody must write to its blocks.
            self.leases.writable(peer_id, lease_id)
        except BaseException:
            # The caller will never know the id, so nobody else could give it back.
            self.leases.discard(lease_id)
            raise
        return lease_id, block_ids

    async def seal(self, peer_id: str, lease_id: str, blocks: Sequence[SealRequest]) -> list[int]:
        """Declare blocks final, after hashing what is in memory; returns their ids as `LeaseTable.seal`.

        Raises:
            CorruptBlockError: The bytes of a part differ from its checksum; nothing is sealed.
            InvalidRequestError: A field is wrong, or as `LeaseTable.seal`; nothing is sealed.
            LeaseExpiredError: The peer or the lease is unknown or has ended; nothing is sealed.
        """
        table = self.leases.writable(peer_id, lease_id)
        num_parts = self.config.fingerprint.num_parts
        for block in blocks:
            if not block.block_index < len(table):
                raise InvalidRequestError(f"block_index: expected less than {len(table)}, got {block.block_index}")
            check_key(block.block_key)
            if len(block.checksums) != num_parts:
                raise InvalidRequestError(f"checksums: expected {num_parts}, got {len(block.checksums)}")
        keys = {block.block_index: block.block_key for block in blocks}
        if len(keys) < len(blocks):
            raise InvalidRequestError("block_index: expected each at most once, got one twice")
        with self.leases.hold(peer_id, lease_id) as held:
            block_ids = [held[block.block_index] for block in blocks]
            given = np.array([block.checksums for block in blocks], np.uint64).reshape(-1, num_parts)
            open_ids = [block_id for block_id in block_ids if not self.leases.is_sealed(block_id)]
            sums_now = await in_thread(partial(block_checksums, self.memory.parts, open_ids))
            found = dict(zip(open_ids, sums_now, strict=True))
            for block, block_id, sums in zip(blocks, block_ids, given, strict=True):
                if block_id in found and not np.array_equal(found[block_id], sums):
                    part = int(np.flatnonzero(found[block_id] != sums)[0])
                    raise CorruptBlockError(
                        f"checksums: part {part} of block {block.block_index} differs from its bytes"
                    )
            # Before anyone can find the blocks. A block that a second call sealed meanwhile keeps that call's.
            for block_id, sums in found.items():
                if not self.leases.is_sealed(block_id):
                    self.memory.checksums[block_id] = sums
            sealed_ids = self.leases.seal(peer_id, lease_id, keys)
            self.memory.is_corrupt[sealed_ids] = False
            return sealed_ids

    def locate(self, peer_id: str, block_keys: Sequence[bytes]) -> list[Tier | None]:
        """Return the highest tier that holds each key now, None where none does.

        Raises:
            InvalidRequestError: Too many keys.
            LeaseExpiredError: The peer is unknown or forgotten.
        """
        self.leases.touch(peer_id)
        check_keys(block_keys)
        return [self.tiers.tier_of(block_key) for block_key in block_keys]

    async def lease(
        self, peer_id: str, block_keys: Sequence[bytes], min_blocks: int, ttl_s: float, wait_blocks: int = 0
    ) -> tuple[str, list[int], list[BlockStatus]]:
        """Take a read lease on the longest prefix that is held, after bringing it into memory.

        Args:
            peer_id: Who takes it.
            block_keys: By block index.
            min_blocks: Fewest blocks that make the lease worth having.
            ttl_s: Seconds until it ends.
            wait_blocks: Number of first blocks that are waited for, 0 for all; those behind are read ahead afterwards.

        Returns:
            The lease id, its block ids, and for every key what became of it.

        Raises:
            BlockNotFoundError: As `LeaseTable.lease`; also for blocks that were on disk and not intact there.
            InvalidRequestError: As `LeaseTable.lease`.
            LeaseExpiredError: As `LeaseTable.lease`.
            PeerUnavailableError: The service drains.
            PoolExhaustedError: As `LeaseTable.lease`; also if memory has no room for what is on disk, or that is busy.
        """
        self._refuse_if_draining()
        check_keys(block_keys)
        waited = block_keys[: max(wait_blocks, min_blocks)] if wait_blocks else block_keys
        on_disk = self.tiers.missing(waited)[1] if self.disk_tier else {}
        if self.disk_tier is None or not on_disk:
            statuses = self.tiers.statuses(block_keys)
            taken = self._lease(peer_id, block_keys, min_blocks, ttl_s, statuses, 0)
        else:
            async with self.disk_tier.loaded(peer_id, waited, min_blocks) as load:
                statuses = self.tiers.statuses(block_keys)
                if load:
                    statuses[: len(waited)] = [load.statuses[block_key] for block_key in waited]
                is_read = dict(zip(block_keys, statuses, strict=True))
                num_read = sum(is_read[block_key] is BlockStatus.INTACT for block_key in on_disk)
                taken = self._lease(peer_id, block_keys, min_blocks, ttl_s, statuses, num_read)
        if self.disk_tier is not None and wait_blocks:
            self.disk_tier.read_ahead(peer_id, block_keys[len(taken[1]) :])
        return *taken, statuses

    def _lease(
        self,
        peer_id: str,
        block_keys: Sequence[bytes],
        min_blocks: int,
        ttl_s: float,
        statuses: Sequence[BlockStatus],
        num_read: int,
    ) -> tuple[str, list[int]]:
        """Take a lease on what is in memory now, and count what it got and where it ended."""
        num_found = next((i for i, status in enumerate(statuses) if status is not BlockStatus.INTACT), len(statuses))
        if num_found < len(statuses):
            self.num_missed[statuses[num_found].value] += 1
            if num_found < min_blocks and statuses[num_found] is BlockStatus.NOT_READ:
                raise PoolExhaustedError(
                    f"min_blocks: expected {min_blocks} blocks in memory, got {num_found}, "
                    f"since it has no room for those on disk, or the disk is busy"
                )
        lease_id, block_ids = self.leases.lease(peer_id, block_keys, min_blocks, ttl_s)
        num_read = min(num_read, len(block_ids))
        self.num_leased[Tier.DISK.value] += num_read
        self.num_leased[Tier.HOST.value] += len(block_ids) - num_read
        return lease_id, block_ids

    def describe(self, peer_id: str, lease_id: str, block_indices: Sequence[int]) -> Descriptors:
        """Return where blocks of a lease are; all of them if none is named.

        Raises:
            CorruptBlockError: A block was found to be corrupt since it was leased.
            InvalidRequestError: A block is not in the lease, or not sealed.
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        table = self.leases.readable(peer_id, lease_id)
        wanted = list(block_indices) or range(len(table))
        block_ids = np.array([self._sealed_block(table, block_index) for block_index in wanted], np.uint64)
        return Descriptors(
            block_indices=wanted,
            block_ids=block_ids,
            generations=self.memory.generations[block_ids],
            checksums=self.memory.checksums[block_ids],
        )

    def put(self, peer_id: str, lease_id: str, part: Part) -> None:
        """Write one part of a block that is not sealed.

        Raises:
            CorruptBlockError: The data differ from the checksum; nothing is written.
            InvalidRequestError: A field is wrong; nothing is written.
            LeaseExpiredError: The peer or the lease is unknown or has ended; nothing is written.
        """
        table = self.leases.writable(peer_id, lease_id)
        fingerprint = self.config.fingerprint
        if not part.block_index < len(table):
            raise InvalidRequestError(f"block_index: expected less than {len(table)}, got {part.block_index}")
        if self.leases.is_sealed(table[part.block_index]):
            raise InvalidRequestError(f"block_index: expected a block that is not sealed, got {part.block_index}")
        if not part.part < fingerprint.num_parts:
            raise InvalidRequestError(f"part: expected less than {fingerprint.num_parts}, got {part.part}")
        if len(part.data) != fingerprint.part_bytes:
            raise InvalidRequestError(f"data: expected {fingerprint.part_bytes} bytes, got {len(part.data)}")
        if checksum(part.data) != part.checksum:
            raise CorruptBlockError(f"checksum: part {part.part} of block {part.block_index} arrived with other bytes")
        self.memory.parts[table[part.block_index], part.part] = np.frombuffer(part.data, np.uint8)

    async def get(self, peer_id: str, lease_id: str, ranges: Sequence[PartRange]) -> AsyncIterator[Part]:
        """Read parts of sealed blocks, each checked before it is given out.

        Raises:
            CorruptBlockError: A part differs from its checksum; its block cannot be found any more.
            InvalidRequestError: A range is wrong, and nothing is sent; or a block is not sealed: those before it are.
            LeaseExpiredError: The peer or the lease is unknown or has ended.
        """
        num_parts = self.config.fingerprint.num_parts
        with self.leases.hold(peer_id, lease_id) as table:
            for wanted in ranges:
                if not 1 <= wanted.num_parts <= num_parts - wanted.first_part:
                    raise InvalidRequestError(f"num_parts: expected parts among {num_parts}, got {wanted.num_parts}")
                if not wanted.block_index < len(table):
                    raise InvalidRequestError(f"block_index: expected less than {len(table)}, got {wanted.block_index}")
            for wanted in ranges:
                for number in range(wanted.first_part, wanted.first_part + wanted.num_parts):
                    # Again for each part: it may have been found to be corrupt since.
                    block_id = self._sealed_block(table, wanted.block_index)
                    data = self.memory.parts[block_id, number].tobytes()
                    expected = int(self.memory.checksums[block_id, number])
                    if checksum(data) != expected:
                        self.num_corrupt_blocks += 1
                        self.memory.is_corrupt[block_id] = True
                        self.leases.drop(block_id)
                        logger.error("host block %d: part %d differs from its checksum; dropped", block_id, number)
                        raise CorruptBlockError(f"checksum: part {number} of block {wanted.block_index} is not intact")
                    yield Part(block_index=wanted.block_index, part=number, data=data, checksum=expected)

    def drain(self) -> int:
        """Refuse new peers, blocks and leases by key from now on; return how many leases are left."""
        self.is_draining = True
        self.leases.expire()
        return self.leases.counts().num_leases

    def _load(self) -> ServiceLoad:
        return ServiceLoad(
            num_blocks=self.config.leases.num_blocks,
            num_free_blocks=self.leases.num_free,
            num_leases=self.leases.num_leases,
            is_draining=self.is_draining,
        )

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            raise PeerUnavailableError("the service drains; nothing was taken, another one may help")

    def _sealed_block(self, table: Sequence[int], block_index: int) -> int:
        if not block_index < len(table):
            raise InvalidRequestError(f"block_index: expected less than {len(table)}, got {block_index}")
        if self.memory.is_corrupt[table[block_index]]:
            raise CorruptBlockError(f"block_index: block {block_index} was found to be corrupt and dropped")
        if not self.leases.is_sealed(table[block_index]):
            raise InvalidRequestError(f"block_index: expected a sealed block, got {block_index}")
        return table[block_index]
