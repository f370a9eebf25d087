"""Moves parts of blocks between a process and a staging service, and verifies them; `session` is the way to it."""

import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import (
    CorruptBlockError,
    InvalidRequestError,
    LeaseExpiredError,
    OasisError,
    PeerUnavailableError,
    TransferTimeoutError,
    UnsupportedError,
)
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.checksums import checksums
from oasiskv.services.clients.one_sided import OneSidedPool
from oasiskv.services.clients.staging import MappedPool, StagingClient

logger = logging.getLogger(__name__)
Pool = MappedPool | OneSidedPool
# Descriptors of this many parts fit into a message of the default size with room to spare.
PARTS_PER_MESSAGE = 2**18
CACHED_BYTES = 2**18
RANGES_PER_MESSAGE = 2**16


class FetchStatus(IntEnum):
    """What became of one block of a fetch."""

    OK = 0
    CORRUPT = 1
    """It does not match its checksum, and nobody gets it any more: recompute."""
    LOST = 2
    """The lease ended, or the service knows the block no more."""
    UNAVAILABLE = 3
    """The service did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where blocks are, and what they must hash to."""

    block_ids: NDArray[np.uint64]
    """`[n]`."""
    generations: NDArray[np.uint64]
    """`[n]`."""
    checksums: NDArray[np.uint64]
    """`[n, num_parts]`."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The right to blocks, counted from 0; ends by `StagingSession.release`."""

    lease_id: str
    num_blocks: int
    peer_id: str = field(repr=False)
    """Whose it is: another one, once the session had to register anew."""

    block_ids: NDArray[np.uint64] | None = None
    """`[num_blocks]`, of a write lease."""

    num_held: int = 0
    """Of a write lease: blocks at its beginning that were held before, and are sealed."""

    sums: NDArray[np.uint64] | None = None
    """`[num_blocks, num_parts]`, of a write lease: checksums of what this process put."""

    columns: Columns | None = field(default=None, repr=False)
    """Of all its blocks, once they were asked for."""

    @property
    def token(self) -> str:
        """The lease as text, for `StagingSession.join` in another process of the peer; who has it may write."""
        ids = b"" if self.block_ids is None else self.block_ids.astype("<u8").tobytes()
        return f"{self.lease_id}.{self.num_blocks}.{ids.hex()}"


def _cached_rows(pieces: NDArray[np.uint8]) -> list[slice]:
    """Return rows of so few bytes that what was copied is still in the cache when it is hashed."""
    step = max(1, CACHED_BYTES // math.prod(pieces.shape[1:]))
    return [slice(start, start + step) for start in range(0, len(pieces), step)]


class Mover:
    """Carries out what a session's data thread is given, by the pool if it has one, else by streams."""

    def __init__(
        self,
        client: StagingClient,
        registered: pb.RegisterPeerResponse,
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
        pool: Pool | None,
        reason: str,
        timeout_s: float,
    ) -> None:
        """Start.

        Args:
            client: For calls and streams.
            registered: The peer.
            wait: Runs a call on the client's loop and returns its result.
            pool: How to get past the service's process; None for streams.
            reason: Why that.
            timeout_s: Of each chunk of a transfer.
        """
        self._client = client
        self._registered = registered
        self._wait = wait
        self._pool = pool
        self._timeout_s = timeout_s
        self._buffers: list[NDArray[np.uint8]] = []
        self.reason = reason
        self.num_retried_blocks = 0

    @property
    def path(self) -> str:
        """mapped, one-sided or stream."""
        match self._pool:
            case MappedPool():
                return "mapped"
            case OneSidedPool():
                return "one-sided"
            case _:
                return "stream"

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Make a buffer known, and keep it alive; where that fails, bytes go by stream from now on."""
        self._buffers.append(buffer)
        self._register(buffer)

    def reopen(self, registered: pb.RegisterPeerResponse, pool: Pool | None, reason: str) -> None:
        """Go on as another peer, of a service that was started again."""
        self.close()
        self._registered, self._pool, self.reason = registered, pool, reason
        for buffer in self._buffers:
            self._register(buffer)

    def _register(self, buffer: NDArray[np.uint8]) -> None:
        if isinstance(self._pool, OneSidedPool):
            try:
                self._pool.register(buffer)
            except UnsupportedError as error:
                self._leave_pool(error)

    def put(self, lease: Lease, block_indices: NDArray[np.intp], first_part: int, data: NDArray[np.uint8]) -> None:
        """Write parts; see `StagingSession.put`."""
        self._check(lease, block_indices, first_part, data)
        self._check_peer(lease)
        if lease.block_ids is None or lease.sums is None:
            raise InvalidRequestError("lease: expected a write lease, got a read lease")
        if not len(data):
            return
        sums = lease.sums
        block_ids = lease.block_ids[block_indices]
        columns = slice(first_part, first_part + data.shape[1])

        def note(rows: slice) -> None:
            # Of what was meant, not of what arrived: that is held against it when the block is sealed.
            sums[block_indices[rows], columns] = checksums(data[rows])

        try:
            if isinstance(self._pool, MappedPool) and self._pool.parts.flags.writeable:
                parts = self._pool.parts.reshape(-1, data.shape[2])
                places = self._rows(block_ids, first_part, data)
                for rows in _cached_rows(data):
                    note(rows)
                    parts[places[rows]] = data[rows]
                return
            if isinstance(self._pool, OneSidedPool) and self._pool.may_write:
                self._pool.write(block_ids, first_part, data, self._timeout_s, note)
                return
        except (PeerUnavailableError, TransferTimeoutError) as error:
            self._leave_pool(error)
        note(slice(None))
        parts_to_send = (
            (int(block_index), first_part + part, data[row, part].tobytes())
            for row, block_index in enumerate(block_indices)
            for part in range(data.shape[1])
        )
        self._wait(self._client.put(self._registered.peer_id, lease.lease_id, parts_to_send))

    def seal(
        self,
        lease: Lease,
        block_indices: NDArray[np.intp],
        block_keys: list[bytes],
        sums: NDArray[np.uint64] | None,
    ) -> None:
        """Declare blocks final; see `StagingSession.seal`."""
        if lease.sums is None:
            raise InvalidRequestError("lease: expected a write lease, got a read lease")
        self._check_indices(lease, block_indices)
        self._check_peer(lease)
        given = lease.sums[block_indices] if sums is None else sums
        step = max(1, PARTS_PER_MESSAGE // self._registered.num_parts)
        for start in range(0, len(block_indices), step):
            rows = slice(start, start + step)
            columns = pb.SealedColumns(
                block_indices=block_indices[rows].tolist(),
                block_keys=block_keys[rows],
                checksums=given[rows].astype("<u8").tobytes(),
            )
            request = pb.SealRequest(peer_id=self._registered.peer_id, lease_id=lease.lease_id, columns=columns)
            self._wait(self._client.call(self._client.stub.Seal, request))
        lease.columns = None

    def fetch(
        self, lease: Lease, block_indices: NDArray[np.intp], first_part: int, out: NDArray[np.uint8]
    ) -> NDArray[np.int8]:
        """Read parts and verify them; see `StagingSession.fetch`."""
        self._check(lease, block_indices, first_part, out)
        if not len(out):
            return np.zeros(0, np.int8)
        if lease.peer_id != self._registered.peer_id:
            return np.full(len(out), FetchStatus.LOST, np.int8)
        is_right = np.zeros(len(out), np.bool_)
        had_pool = self._pool is not None
        if had_pool:
            try:
                is_right = self._read(lease, block_indices, first_part, out)
            except (PeerUnavailableError, TransferTimeoutError) as error:
                self._leave_pool(error)
            except (CorruptBlockError, LeaseExpiredError) as error:
                logger.info("the stream has to tell which blocks are right: %s", error)
        statuses = np.where(is_right, FetchStatus.OK, FetchStatus.UNAVAILABLE).astype(np.int8)
        again = np.flatnonzero(~is_right)
        if len(again):
            self.num_retried_blocks += len(again) if had_pool else 0
            self._wait(self._stream(lease, block_indices, first_part, out, again.tolist(), statuses))
        return statuses

    def close(self) -> None:
        """Give the pool back."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _read(
        self, lease: Lease, block_indices: NDArray[np.intp], first_part: int, out: NDArray[np.uint8]
    ) -> NDArray[np.bool_]:
        """Copy past the service's process, and return which blocks are what their writer wrote, `[n]`."""
        if lease.columns is None:
            lease.columns = self._describe(lease, range(lease.num_blocks))
        columns = lease.columns
        block_ids, generations = columns.block_ids[block_indices], columns.generations[block_indices]
        expected = columns.checksums[block_indices, first_part : first_part + out.shape[1]]
        is_right = np.zeros(len(out), np.bool_)

        def verify(rows: slice) -> None:
            is_right[rows] = (checksums(out[rows]) == expected[rows]).all(axis=1)

        # `generations` are from before the copy. They only grow, so the same values after it held all the while.
        if isinstance(self._pool, MappedPool):
            parts = self._pool.parts.reshape(-1, out.shape[2])
            places = self._rows(block_ids, first_part, out)
            for rows in _cached_rows(out):
                # The ids are the service's, so none is out of range; another mode than "clip" would copy twice.
                parts.take(places[rows], axis=0, out=out[rows], mode="clip")
                verify(rows)
            now = self._pool.generations[block_ids]
        else:
            assert self._pool is not None
            read = self._pool.read(block_ids, first_part, out, self._timeout_s, verify)
            now = self._describe(lease, block_indices.tolist()).generations if read is None else read
        is_right &= now == generations
        return is_right

    def _describe(self, lease: Lease, block_indices: "range | list[int]") -> Columns:
        """Ask where blocks are; a sealed block stays where it is for as long as the lease."""
        num_parts = self._registered.num_parts
        step = max(1, PARTS_PER_MESSAGE // num_parts)
        found: list[pb.BlockColumns] = []
        for start in range(0, len(block_indices), step):
            request = pb.FetchDescriptorsRequest(
                peer_id=self._registered.peer_id,
                lease_id=lease.lease_id,
                block_indices=block_indices[start : start + step],
                in_columns=True,
            )
            found.append(self._wait(self._client.call(self._client.stub.FetchDescriptors, request)).columns)
        block_ids, generations, sums = (
            np.frombuffer(b"".join(getattr(one, name) for one in found), "<u8").astype(np.uint64)
            for name in ("block_ids", "generations", "checksums")
        )
        return Columns(block_ids=block_ids, generations=generations, checksums=sums.reshape(-1, num_parts))

    async def _stream(
        self,
        lease: Lease,
        block_indices: NDArray[np.intp],
        first_part: int,
        out: NDArray[np.uint8],
        rows: list[int],
        statuses: NDArray[np.int8],
    ) -> None:
        """Read blocks through the service, which verifies them too, and note what became of each."""
        num_parts = out.shape[1]
        while rows:
            ranges = [
                pb.PartRange(block_index=int(block_indices[row]), first_part=first_part, num_parts=num_parts)
                for row in rows[:RANGES_PER_MESSAGE]
            ]
            num_arrived = 0
            failure: OasisError | None = None
            try:
                async for part in self._client.get(self._registered.peer_id, lease.lease_id, ranges):
                    row, place = rows[num_arrived // num_parts], num_arrived % num_parts
                    out[row, place] = np.frombuffer(part.data, np.uint8)
                    num_arrived += 1
            except OasisError as error:
                failure = error
            num_done = num_arrived // num_parts
            statuses[rows[:num_done]] = FetchStatus.OK
            rows = rows[num_done:]
            match failure:
                case None if num_done == len(ranges):
                    pass
                case None:
                    return
                case CorruptBlockError():  # the first of the rest; the others may be right
                    statuses[rows[:1]] = FetchStatus.CORRUPT
                    rows = rows[1:]
                case PeerUnavailableError() | TransferTimeoutError():
                    statuses[rows] = FetchStatus.UNAVAILABLE
                    return
                case _:
                    statuses[rows] = FetchStatus.LOST
                    return

    def lose(self, pool: Pool, error: OasisError) -> None:
        """Go on by stream, if that pool is still used."""
        if self._pool is pool:
            self._leave_pool(error)

    def _leave_pool(self, error: OasisError) -> None:
        """Go on by stream; a way that failed in the middle is not trusted again until `reopen`."""
        logger.warning("bytes move by stream from now on, no longer %s: %s", self.path, error)
        self.reason = f"{self.path} failed: {error}"
        self.close()

    def _rows(self, block_ids: NDArray[np.uint64], first_part: int, pieces: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Return the places of parts in the pool, counted in parts, `[n, k]`."""
        parts = np.arange(first_part, first_part + pieces.shape[1])
        return block_ids.astype(np.intp)[:, None] * self._registered.num_parts + parts

    def _check(self, lease: Lease, block_indices: NDArray[np.intp], first_part: int, pieces: NDArray[np.uint8]) -> None:
        part_bytes, num_parts = self._registered.part_bytes, self._registered.num_parts
        if (
            pieces.ndim != 3
            or pieces.shape[2] != part_bytes
            or pieces.dtype != np.uint8
            or not pieces.flags.c_contiguous
        ):
            expected = f"contiguous bytes of the shape [n, k, {part_bytes}]"
            raise InvalidRequestError(f"data: expected {expected}, got {pieces.dtype} of the shape {pieces.shape}")
        if len(block_indices) != len(pieces):
            raise InvalidRequestError(f"block_indices: expected {len(pieces)}, got {len(block_indices)}")
        if not (first_part >= 0 and 1 <= pieces.shape[1] <= num_parts - first_part):
            raise InvalidRequestError(f"first_part: expected parts among {num_parts}, got {first_part}")
        self._check_indices(lease, block_indices)

    def _check_peer(self, lease: Lease) -> None:
        # Its block ids are places in the pool of a service that is gone; in the new one they are others' blocks.
        if lease.peer_id != self._registered.peer_id:
            raise LeaseExpiredError("lease: expected one from after the service was started again; this one is lost")

    def _check_indices(self, lease: Lease, block_indices: NDArray[np.intp]) -> None:
        if len(block_indices) and not (block_indices.min() >= 0 and block_indices.max() < lease.num_blocks):
            raise InvalidRequestError(f"block_indices: expected less than {lease.num_blocks}")
