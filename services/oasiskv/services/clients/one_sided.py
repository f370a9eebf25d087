"""The service's memory read and written one-sidedly through NIXL; `session` decides when."""

import math
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.nixl import NixlAgent, Transfer

CHUNK_BYTES = 64 * 2**20
"""Most bytes of one transfer."""
MIN_CHUNK_BYTES = 8 * 2**20
READ_CHUNKS = 6
"""Into which a read is cut, so that little is left to verify when all has arrived."""
MIN_GENERATIONS = 1024
SPAN_PER_BLOCK = 512
"""Generations that are read at most for one that is wanted: 4 KiB, about what a piece costs beside its bytes."""


class OneSidedPool:
    """The pool of a service, reached through its agent. One thread uses it."""

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
        self._agent = NixlAgent(f"oasiskv-peer-{secrets.token_hex(8)}", devices)
        self._remote = self._agent.connect(offer.agent_metadata)
        self._blocks_address = np.uint64(offer.blocks_address)
        self._generations_address = np.uint64(offer.generations_address)
        self._shape = (registered.num_blocks, registered.num_parts, registered.part_bytes)
        self._generations = np.zeros(0, np.uint64)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oasiskv-staging-sums")

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
            on_chunk: Called in a thread of the pool with the places of blocks that have arrived, while others are
                under way.

        Returns:
            The generations of the blocks after the copy, `[n]`; None where they have to be asked for.

        Raises:
            InvalidRequestError: `out` is not registered; nothing is copied.
            PeerUnavailableError: The service's agent is away; `out` may hold a part.
            TransferTimeoutError: The service did not answer in time; `out` may be written to until `close`.
        """
        chunks = self._chunks(out, max(MIN_CHUNK_BYTES, out.nbytes // READ_CHUNKS))
        transfers: list[Transfer] = []
        with self._beside(on_chunk) as check:

            def arrived(transfer: Transfer, chunk: slice) -> None:
                transfer.wait(timeout_s)
                check(chunk)

            try:
                for i, chunk in enumerate(chunks):
                    # Shared memory copies within `start`, and what is there can be looked at during the next.
                    is_there = i > 0 and transfers[-1].has_ended
                    if is_there:
                        arrived(transfers[-1], chunks[i - 1])
                    transfers.append(self._start(block_ids[chunk], first_part, out[chunk], is_read=True))
                    if i and not is_there:
                        arrived(transfers[-2], chunks[i - 1])
                arrived(transfers[-1], chunks[-1])
            finally:
                for transfer in transfers:
                    transfer.cancel()
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
        transfers: list[Transfer] = []
        with self._beside(on_chunk) as note:
            try:
                for chunk in self._chunks(data, CHUNK_BYTES):
                    note(chunk)
                    transfers.append(self._start(block_ids[chunk], first_part, data[chunk], is_read=False))
                    if len(transfers) > 1:
                        transfers[-2].wait(timeout_s)
                transfers[-1].wait(timeout_s)
            finally:
                for transfer in transfers:
                    transfer.cancel()

    @contextmanager
    def _beside(self, work: Callable[[slice], None]) -> Iterator[Callable[[slice], None]]:
        """Yield a way to have chunks worked on in the pool's thread; at the end all of them are, whatever happened."""
        started: list[Future[None]] = []
        try:
            yield lambda chunk: started.append(self._thread.submit(work, chunk))
        finally:
            wait(started)
        for one in started:
            one.result()

    def generations(self, block_ids: NDArray[np.uint64], timeout_s: float) -> NDArray[np.uint64]:
        """Return the generations of blocks, `[n]`, as they are now; raises as `read`."""
        first, last = block_ids.min(), block_ids.max()
        span = int(last - first) + 1
        # One piece that has some too many is faster than many small ones.
        if span <= SPAN_PER_BLOCK * len(block_ids):
            found = self._read_generations(np.arange(first, last + np.uint64(1)), timeout_s)
            chosen: NDArray[np.uint64] = found[block_ids - first]
            return chosen
        return self._read_generations(block_ids, timeout_s)

    def _read_generations(self, block_ids: NDArray[np.uint64], timeout_s: float) -> NDArray[np.uint64]:
        if len(self._generations) < len(block_ids):
            self._generations = np.zeros(max(MIN_GENERATIONS, 2 * len(block_ids)), np.uint64)
            self._agent.register(self._generations.view(np.uint8))
        found = self._generations[: len(block_ids)]
        offsets = np.arange(len(block_ids), dtype=np.uint64) * np.uint64(8)
        self._agent.start(
            self._remote,
            is_read=True,
            local=np.uint64(found.ctypes.data) + offsets,
            remote_addresses=self._generations_address + block_ids * np.uint64(8),
            num_bytes=8,
        ).wait(timeout_s)
        return found

    def close(self) -> None:
        """End the connection; memory that was registered is written no more."""
        self._agent.disconnect(self._remote)
        self._thread.shutdown()

    def _chunks(self, pieces: NDArray[np.uint8], num_bytes: int) -> list[slice]:
        step = max(1, min(num_bytes, CHUNK_BYTES) // math.prod(pieces.shape[1:]))
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
