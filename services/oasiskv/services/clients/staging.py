"""Calls a staging service, and maps its memory where it is on the same host."""

import asyncio
import contextlib
import fcntl
import math
import mmap
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import (
    CorruptBlockError,
    LeaseExpiredError,
    PeerUnavailableError,
    TransferTimeoutError,
)
from oasiskv.core.service_config import TlsConfig
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services.checksums import checksum, checksums
from oasiskv.services.rpc.status import CLASSES, error_of
from oasiskv.services.rpc.tls import channel_credentials, signature
from oasiskv.services.tracing import context_metadata

Response = TypeVar("Response")
RETRY_WAIT_S = 0.1


class StagingClient:
    """A channel to one service; every call has a deadline and raises the errors that the contract names."""

    def __init__(
        self, address: str, *, tls: TlsConfig | None = None, timeout_s: float = 10.0, max_message_bytes: int = 4 * 2**20
    ) -> None:
        """Prepare; the first call connects.

        Args:
            address: `host:port`.
            tls: This process's certificate; None to speak in the clear.
            timeout_s: Deadline of every call.
            max_message_bytes: At least the service's `part_bytes` and 64 KiB.
        """
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # gRPC would let up to two minutes pass before it looks again for a service that was away for long.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._address, self._tls, self._options = address, tls, options
        self._timeout_s = timeout_s
        self._connect()

    def _connect(self) -> None:
        if self._tls is None:
            self.channel = grpc.aio.insecure_channel(self._address, self._options)
        else:
            self._files = signature(self._tls)
            self.channel = grpc.aio.secure_channel(self._address, channel_credentials(self._tls), self._options)
        self.stub = staging_pb2_grpc.StagingStub(self.channel)
        """For calls that have no method here; through `call`."""

    def refresh(self) -> None:
        """Connect anew if this process's certificate was replaced: a connection that broke would come with the old one.

        Raises:
            ConfigError: The new files are absent or do not fit together; the old ones go on.
        """
        if self._tls is not None and signature(self._tls) != self._files:
            before = self.channel
            self._connect()
            # What is under way may end; closing would cancel whoever waits for it.
            self._closing = asyncio.create_task(before.close(self._timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def call(
        self, method: Callable[..., Awaitable[Response]], request: Any, *, may_repeat: bool = False
    ) -> Response:
        """Make a call with the deadline, and raise what the service named.

        Args:
            method: A method of `stub` that answers with one message.
            request: Its message, or an iterator of them.
            may_repeat: Whether the call does no harm if it was carried out before; it is then tried once more where the
                service was away.
        """
        try:
            return await method(request, timeout=self._timeout_s, metadata=context_metadata())
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            if not (may_repeat and isinstance(error, PeerUnavailableError)):
                raise error from failure
        await asyncio.sleep(RETRY_WAIT_S)
        return await self.call(method, request)

    def attach(self, peer_id: str) -> "AttachedLink":
        """Ask for one-sided reads and writes of the service's memory."""
        return AttachedLink(self.stub.Attach(pb.AttachRequest(peer_id=peer_id)))

    async def put(self, peer_id: str, lease_id: str, parts: Iterable[tuple[int, int, bytes]]) -> int:
        """Write parts, each given as block index, part and data, and return how many were."""

        def requests() -> Iterable[pb.PutRequest]:
            for block_index, part, data in parts:
                yield pb.PutRequest(
                    peer_id=peer_id,
                    lease_id=lease_id,
                    block_index=block_index,
                    part=part,
                    data=data,
                    checksum=checksum(data),
                )

        response: pb.PutResponse = await self.call(self.stub.Put, requests())
        return response.num_parts

    async def get(self, peer_id: str, lease_id: str, ranges: Sequence[pb.PartRange]) -> AsyncIterator[pb.GetResponse]:
        """Read parts, each verified on arrival.

        Raises:
            CorruptBlockError: A part is not what its writer wrote; those before it were.
        """
        request = pb.GetRequest(peer_id=peer_id, lease_id=lease_id, ranges=ranges)
        stream = self.stub.Get(request, timeout=self._timeout_s, metadata=context_metadata())
        try:
            async for part in stream:
                if checksum(part.data) != part.checksum:
                    raise CorruptBlockError(f"checksum: part {part.part} of block {part.block_index} came broken")
                yield part
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        finally:
            stream.cancel()


class AttachedLink:
    """An Attach stream: open for as long as this process uses the service's memory one-sidedly."""

    def __init__(self, stream: "grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.AttachResponse]") -> None:
        self._stream = stream

    async def offer(self, timeout_s: float = 60.0) -> pb.AttachResponse:
        """Return how to reach the memory; the service may have to start a process first.

        Raises:
            TransferTimeoutError: No answer within `timeout_s`.
            UnsupportedError: The service offers no such way; the message says why.
        """
        try:
            async with asyncio.timeout(timeout_s):
                offer = await self._stream.read()
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        except TimeoutError as cause:
            raise TransferTimeoutError(f"Attach: expected an answer within {timeout_s} s, got none") from cause
        if not isinstance(offer, pb.AttachResponse):
            raise PeerUnavailableError("Attach: expected an offer, got the end of the stream")
        return offer

    async def ended(self) -> None:
        """Return when the stream has ended: for the service, this process uses the memory no more from then on."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await self._stream.read() is not grpc.aio.EOF:
                pass

    def close(self) -> None:
        """Say that this process uses the memory no more."""
        self._stream.cancel()


class MappedPool:
    """The service's memory in this process; the connection that brought it stays open as a sign of life.

    torch or numpy views of it are valid until `close`. A read is right only through `read`.
    """

    def __init__(self, peer_id: str, registered: pb.RegisterPeerResponse) -> None:
        """Map the pool of a registered peer; to write as well if it registered so.

        Raises:
            LeaseExpiredError: The service does not know the peer.
            UnsupportedError: The peer registered for streams.
            PeerUnavailableError: Nothing answers at the memory socket; nothing is mapped.
        """
        with contextlib.ExitStack() as resources:
            self._link = resources.enter_context(socket.socket(socket.AF_UNIX))
            blocks_fd, generations_fd = _receive(self._link, registered.memory_socket, peer_id)
            resources.callback(os.close, blocks_fd)
            resources.callback(os.close, generations_fd)
            can_write = fcntl.fcntl(blocks_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            self.blocks_fd = blocks_fd
            """For `HostPool.attach`, open until `close`."""
            # Huge pages may make the file longer than the pool.
            shape = (registered.num_blocks, registered.num_parts, registered.part_bytes)
            self.parts: NDArray[np.uint8] = _map(blocks_fd, can_write)[: math.prod(shape)].reshape(shape)
            """`[num_blocks, num_parts, part_bytes]`; written only at blocks of a write lease that are not sealed."""
            self.generations: NDArray[np.uint64] = _map(generations_fd, can_write=False).view(np.uint64)
            """`[num_blocks]`, as they are now."""
            self._resources = resources.pop_all()

    def read(self, block: pb.BlockDescriptor) -> NDArray[np.uint8]:
        """Return a copy of a block, `[num_parts, part_bytes]`, that is what its writer wrote.

        Raises:
            CorruptBlockError: A part differs from its checksum.
            LeaseExpiredError: The block has got other content since it was described.
        """
        self._check_generation(block)  # only spares a copy that could not be right
        copy: NDArray[np.uint8] = self.parts[block.block_id].copy()
        self._check_generation(block)
        if checksums(copy).tolist() != list(block.checksums):
            raise CorruptBlockError(f"checksums: block {block.block_index} differs from what its writer wrote")
        return copy

    def close(self) -> None:
        """Tell the service that this process uses the memory no more; whoever still has a view keeps the mapping."""
        self._resources.close()

    def _check_generation(self, block: pb.BlockDescriptor) -> None:
        found = int(self.generations[block.block_id])
        if found != block.generation:
            raise LeaseExpiredError(
                f"generation: expected {block.generation} of block {block.block_index}, got {found}; its lease ended"
            )


def _receive(link: socket.socket, path: str, peer_id: str) -> tuple[int, int]:
    try:
        link.settimeout(5.0)
        link.connect(str(Path(path)))
        link.sendall(f"{peer_id}\n".encode())
        answer, fds, _, _ = socket.recv_fds(link, 4096, 2)
    except OSError as cause:
        raise PeerUnavailableError(
            f"memory_socket: expected an answer at {path}, got {cause}; nothing is mapped"
        ) from cause
    if answer != b"ok\n" or len(fds) != 2:
        _, _, refusal = answer.decode(errors="replace").strip().partition(" ")
        name, _, message = refusal.partition(" ")
        raise CLASSES.get(name, PeerUnavailableError)(message or f"memory_socket: expected memory, got {answer!r}")
    return fds[0], fds[1]


def _map(fd: int, can_write: bool) -> NDArray[np.uint8]:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if can_write else 0)
    mapped: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=protection), np.uint8)
    return mapped
