"""The service's memory read and written one-sidedly through NIXL; `session` decides when."""

import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.nixl import NixlAgent, Transfer

CHUNK_BYTES = 64 * 2**20
"""Most bytes of one transfer."""
MIN_CHUNK_BYTES = 2 * 2**20
NUM_CHUNKS = 8
"""Into which a copy is cut, so that two cores share it and little is left to hash when all has arrived."""
MIN_GENERATIONS = 1024
SPAN_PER_BLOCK = 512
"""Generations that are read at most for one that is wanted: 4 KiB, about what a piece costs beside its bytes."""


class OneSidedPool:
    """The pool of a service, reached through its agent. One thread uses it, and one of its own helps."""

    def __init__(
        self,
        offer: pb.AttachResponse,
        registered: pb.RegisterPeerResponse,
        *,
        may_write: bool = False,
        devices: str = "",
    ) -> None:
        """Connect; the Attach stream that brought the offer must stay open until `close`.

        Args:
            offer: The first message of that stream.
            registered: The peer.
            may_write: Whether the peer registered to write.
            devices: Network device for UCX; empty for all.

        Raises:
            PeerUnavailableError: There is no way to the service's agent.
            UnsupportedError: NIXL does not start in this process.
        """
        self.may_write = may_write
        """Whether `write` is allowed."""
        self._agent = NixlAgent(f"oasiskv-peer-{secrets.token_hex(8)}", devices, num_lanes=2)
        self._metadata = offer.agent_metadata
        self._remote = self._agent.connect(self._metadata)
        self._blocks_address = np.uint64(offer.blocks_address)
        self._generations_address = np.uint64(offer.generations_address)
        self._shape = (registered.num_blocks, registered.num_parts, registered.part_bytes)
        self._generations = np.zeros(0, np.uint64)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oasiskv-staging-lane")

    @property
    def reads_generations(self) -> bool:
        """Whether `generations` works; otherwise the service is asked for them."""
        return bool(self._generations_address)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let bytes go to and come from contiguous memory; raises UnsupportedError."""
        self._agent.register(memory)

    def read(
        self,
        block_ids: NDArray[np.uint64],
        first_part: int,
        out: NDArray[np.uint8],
        timeout_s: float,
        on_chunk: Callable[[slice], None],
    ) -> NDArray[np.uint64] | None:
        """Copy parts of blocks from the service; whether they are right is for the caller to find out.

        Args:
            block_ids: `[n]`.
            first_part: Of the k parts of each block.
            out: `[n, k, part_bytes]`, within registered memory.
            timeout_s: For each chunk.
            on_chunk: Called with the places of blocks that have arrived, while others are under way; in two threads,
                so for two chunks at a time.

        Returns:
            The generations of the blocks after the copy, `[n]`; None where they have to be asked for.

        Raises:
            InvalidRequestError: `out` is not registered; nothing is copied.
            PeerUnavailableError: The service's agent is away; `out` may hold a part.
            TransferTimeoutError: The service did not answer in time; `out` may be written to until `close`.
        """

        def begin(chunk: slice) -> Transfer:
            return self._start(block_ids[chunk], first_part, out[chunk], is_read=True)

        def finish(chunk: slice, transfer: Transfer) -> None:
            transfer.wait(timeout_s)
            on_chunk(chunk)

        in_lanes(self._chunks(out), begin, finish, self._thread)
        return self.generations(block_ids, timeout_s) if self.reads_generations else None

    def write(
        self,
        block_ids: NDArray[np.uint64],
        first_part: int,
        data: NDArray[np.uint8],
        timeout_s: float,
        on_chunk: Callable[[slice], None],
    ) -> None:
        """Copy parts of blocks to the service, `data` as `out` of `read`, with `on_chunk` meanwhile; raises as it."""
        self._agent.require(data)  # before anything is noted of bytes that will not go

        def begin(chunk: slice) -> Transfer:
            return self._start(block_ids[chunk], first_part, data[chunk], is_read=False)

        def finish(chunk: slice, transfer: Transfer) -> None:
            on_chunk(chunk)
            transfer.wait(timeout_s)

        in_lanes(self._chunks(data), begin, finish, self._thread)

    def generations(self, block_ids: NDArray[np.uint64], timeout_s: float) -> NDArray[np.uint64]:
        """Return the generations of blocks, `[n]`, as they are now; raises as `read`."""
        first, last = int(block_ids.min()), int(block_ids.max())
        num_bytes = 8 * (last - first + 1)
        # One piece that has some too many is faster than many small ones.
        if num_bytes <= 8 * SPAN_PER_BLOCK * len(block_ids):
            found = self._read_generations(np.array([first], np.uint64), num_bytes, timeout_s)
            chosen: NDArray[np.uint64] = found[(block_ids - np.uint64(first)).astype(np.intp)]
            return chosen
        return self._read_generations(block_ids, 8, timeout_s).copy()

    def _read_generations(self, block_ids: NDArray[np.uint64], num_bytes: int, timeout_s: float) -> NDArray[np.uint64]:
        """Return the generations from each block on, so many bytes of each; valid until the next call."""
        num_found = len(block_ids) * num_bytes // 8
        if len(self._generations) < num_found:
            self._generations = np.zeros(max(MIN_GENERATIONS, 2 * num_found), np.uint64)
            self._agent.register(self._generations.view(np.uint8))
        found = self._generations[:num_found]
        offsets = np.arange(len(block_ids), dtype=np.uint64) * np.uint64(num_bytes)
        self._agent.start(
            self._remote,
            is_read=True,
            local=np.uint64(found.ctypes.data) + offsets,
            remote_addresses=self._generations_address + block_ids * np.uint64(8),
            num_bytes=num_bytes,
        ).wait(timeout_s)
        return found

    def close(self) -> None:
        """End the connection; memory that was registered is written no more."""
        self._agent.disconnect(self._remote)
        self._thread.shutdown()

    def _chunks(self, pieces: NDArray[np.uint8]) -> list[slice]:
        num_bytes = min(max(MIN_CHUNK_BYTES, pieces.nbytes // NUM_CHUNKS), CHUNK_BYTES)
        step = max(1, num_bytes // math.prod(pieces.shape[1:]))
        return [slice(start, start + step) for start in range(0, len(pieces), step)]

    def _start(
        self, block_ids: NDArray[np.uint64], first_part: int, pieces: NDArray[np.uint8], *, is_read: bool
    ) -> Transfer:
        _, num_parts, part_bytes = self._shape
        piece_bytes = pieces[0].nbytes
        places = np.arange(len(pieces), dtype=np.uint64) * np.uint64(piece_bytes)
        offsets = (block_ids * np.uint64(num_parts) + np.uint64(first_part)) * np.uint64(part_bytes)
        return self._agent.start(
            self._remote,
            is_read=is_read,
            local=np.uint64(pieces.ctypes.data) + places,
            remote_addresses=self._blocks_address + offsets,
            num_bytes=piece_bytes,
        )


def in_lanes(
    chunks: list[slice],
    begin: Callable[[slice], Transfer],
    finish: Callable[[slice, Transfer], None],
    thread: ThreadPoolExecutor,
) -> None:
    """Carry chunks out in two threads, this one and another; both have ended on return, whatever happened.

    So one chunk is hashed while others move; and where UCX copies within the call that starts a transfer, two
    cores copy. A thread begins its next chunk before it finishes one, so that the network never waits for it.

    Args:
        chunks: What is to be copied.
        begin: Starts the transfer of a chunk.
        finish: Does what is to be done with a chunk beside its transfer, and waits for that.
        thread: Has one thread, the other one.
    """
    waiting = iter(chunks)

    def lane() -> None:
        under_way: list[tuple[slice, Transfer]] = []
        try:
            for chunk in waiting:
                under_way.append((chunk, begin(chunk)))
                if len(under_way) > 1:
                    finish(*under_way[0])
                    del under_way[0]
            for one in under_way:
                finish(*one)
        except BaseException:
            for _ in waiting:  # the other lane begins nothing more
                pass
            raise
        finally:
            for _, transfer in under_way:
                transfer.cancel()

    other = thread.submit(lane) if len(chunks) > 1 else None
    try:
        lane()
    finally:
        if other is not None:
            wait([other])
    if other is not None:
        other.result()
