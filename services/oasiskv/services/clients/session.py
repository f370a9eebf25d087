"""What an engine uses of a staging service: plain calls that return futures, for many blocks at a time."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import (
    ConfigError,
    InvalidRequestError,
    LeaseExpiredError,
    OasisError,
    PeerUnavailableError,
    UnsupportedError,
)
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.service_config import TlsConfig
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients import background
from oasiskv.services.clients.moves import FetchStatus, Lease, Mover, Pool
from oasiskv.services.clients.one_sided import OneSidedPool
from oasiskv.services.clients.staging import AttachedLink, MappedPool, StagingClient
from oasiskv.services.nixl import net_devices
from oasiskv.services.threads import ContextThreads

__all__ = ["FetchStatus", "Lease", "SessionConfig", "StagingSession"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AWAY_S = 0.5
"""Between two looks at a service that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Where a session goes, and as whom."""

    address: str
    """`host:port` of the service."""

    fingerprint: Fingerprint
    """What this process's KV is; the service refuses another than its own."""

    name: str
    """For logs and metrics."""

    may_write: bool
    """Whether blocks will be written past the service's process; without it `put` goes by stream."""

    locality: str = "auto"
    """`remote` never to map the memory, though it be on this host."""

    is_strict: bool = False
    """Whether all bytes go by stream, whatever the service offers."""

    tls: TlsConfig | None = None
    """This process's certificate; None to speak in the clear."""

    timeout_s: float = 10.0
    """Of each call, and of each chunk of a transfer."""

    ttl_s: float = 30.0
    """How long leases outlive this process, in seconds; while it lives they are renewed."""

    reconnects: bool = True
    """Whether to register anew by itself when the service was started again; False where other processes share the
    peer and have to be told."""


class StagingSession:
    """One peer of a staging service. Calls come from one thread; threads of the session do what takes time.

    Transfers and seals are carried out one after another in the order of the calls.

    When the service was started again, its blocks in memory are gone: blocks of leases from before are LOST, and what
    else is done with such a lease raises LeaseExpiredError. The session registers anew by itself, and its buffers too.
    """

    def __init__(self, config: SessionConfig, *, token: str = "") -> None:
        """Connect, register, and choose how bytes move.

        Args:
            config: Where, and as whom.
            token: `token` of a session of another process, to be the same peer; empty for a new one.

        Raises:
            OasisError: As RegisterPeer of the contract.
        """
        self._config = config
        self._is_closed = False
        self._data_thread = ContextThreads(1, thread_name_prefix="oasiskv-staging-data")
        self._link: AttachedLink | None = None
        self._link_is_lost = False
        self._reviving = asyncio.Lock()
        self._look = asyncio.Event()
        self.num_reconnects = 0
        """Times that the service was found to have been started again, and this session registered anew."""
        # Of this process alone: a session that joined releases nothing of the others.
        self._leases: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._mover: Mover | None = None
        try:
            pool, reason = background.wait(self._open(token))
            self._mover = Mover(self._client, self._registered, background.wait, pool, reason, config.timeout_s)
            logger.info("staging at %s: bytes move %s, since %s", config.address, self.path, self.path_reason)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def token(self) -> str:
        """This peer as text, for sessions of other processes; whoever has it may act as this peer."""
        return self._registered.SerializeToString().hex()

    @property
    def fingerprint(self) -> Fingerprint:
        """What the KV in staging is."""
        return self._config.fingerprint

    @property
    def path(self) -> str:
        """mapped, one-sided or stream: how bytes move now."""
        return self._moves.path

    @property
    def path_reason(self) -> str:
        """Why that."""
        return self._moves.reason

    @property
    def num_retried_blocks(self) -> int:
        """Blocks that were read again through the stream, since the first read was not right."""
        return self._moves.num_retried_blocks

    def register(self, buffer: NDArray[np.uint8]) -> None:
        """Let bytes come from and go to host memory: contiguous, and alive until `close`.

        Raises:
            InvalidRequestError: It is not contiguous.
        """
        if not buffer.flags.c_contiguous:
            raise InvalidRequestError("buffer: expected contiguous memory")
        self._data_thread.submit(self._moves.register, buffer).result()

    def allocate(self, num_blocks: int, block_keys: Sequence[bytes] = ()) -> "Future[Lease]":
        """Take blocks to write to; all bytes are 0. Fails as Allocate of the contract.

        Args:
            num_blocks: How many.
            block_keys: Of the first blocks; as many as are held are part of the lease as they are.
        """
        return background.submit(self._allocate(num_blocks, block_keys))

    def join(self, token: str) -> Lease:
        """Return a lease that another process of this peer took; that one releases it."""
        lease_id, num_blocks, ids = token.split(".")
        block_ids = np.frombuffer(bytes.fromhex(ids), "<u8").astype(np.uint64)
        return self._new_lease(lease_id, int(num_blocks), block_ids if len(block_ids) else None, self._peer_id)

    def put(
        self, lease: Lease, block_indices: Sequence[int] | NDArray[Any], first_part: int, data: NDArray[np.uint8]
    ) -> "Future[None]":
        """Write k parts of n blocks of a write lease; their checksums are kept with the lease.

        Args:
            lease: From `allocate` or `join`.
            block_indices: `[n]`.
            first_part: Part that `data[:, 0]` is.
            data: `[n, k, part_bytes]`, contiguous, within a registered buffer, left alone until the future is done.

        Raises:
            InvalidRequestError: By the future; a shape or index is wrong, nothing is written.
        """
        return self._data_thread.submit(self._moves.put, lease, np.asarray(block_indices, np.intp), first_part, data)

    def seal(
        self,
        lease: Lease,
        block_indices: Sequence[int] | NDArray[Any],
        block_keys: Sequence[bytes],
        sums: NDArray[np.uint64] | None = None,
    ) -> "Future[None]":
        """Declare blocks final, after the puts before it. Fails as Seal of the contract.

        Args:
            lease: From `allocate` or `join`.
            block_indices: `[n]`.
            block_keys: `[n]`.
            sums: `[n, num_parts]`; None where this process put all parts of them.
        """
        return self._data_thread.submit(
            self._moves.seal, lease, np.asarray(block_indices, np.intp), list(block_keys), sums
        )

    def lease(self, block_keys: Sequence[bytes], min_blocks: int = 1, wait_blocks: int = 0) -> "Future[Lease]":
        """Take a read lease on the longest prefix of keys that is held. Fails as Lease of the contract.

        Args:
            block_keys: By block index.
            min_blocks: Fewest blocks that make the lease worth having.
            wait_blocks: Of the blocks that are only on disk, those among so many first ones are waited for, 0 for all;
                the service reads the others ahead, for another lease on the same keys while these are fetched.
        """
        keys = pb.BlockKeys(block_keys=block_keys)
        request = pb.LeaseRequest(keys=keys, min_blocks=min_blocks, ttl_ms=self._ttl_ms, wait_blocks=wait_blocks)
        return background.submit(self._take(request))

    def accept(self, handle: str, min_blocks: int = 1) -> "Future[Lease]":
        """Take over a handle as a read lease. Fails as Lease of the contract."""
        request = pb.LeaseRequest(handle=handle, min_blocks=min_blocks, ttl_ms=self._ttl_ms)
        return background.submit(self._take(request))

    def hand_off(self, lease: Lease) -> "Future[str]":
        """Turn a lease, all of whose blocks are sealed, into a handle. Fails as Handoff of the contract."""
        return background.submit(self._hand_off(lease))

    def fetch(
        self, lease: Lease, block_indices: Sequence[int] | NDArray[Any], first_part: int, out: NDArray[np.uint8]
    ) -> "Future[NDArray[np.int8]]":
        """Read k parts of n blocks, verified; the result is a `FetchStatus` for each block, `[n]`.

        What was not right at the first read is read once more through the stream.

        Args:
            lease: A lease whose blocks are sealed.
            block_indices: `[n]`.
            first_part: Part that goes to `out[:, 0]`.
            out: `[n, k, part_bytes]`, contiguous, within a registered buffer, left alone until the future is done.

        Raises:
            InvalidRequestError: By the future; a shape or index is wrong, nothing is written.
        """
        return self._data_thread.submit(self._moves.fetch, lease, np.asarray(block_indices, np.intp), first_part, out)

    def release(self, *leases: Lease) -> "Future[None]":
        """Give leases back, after the transfers before it. Never fails: what is not released ends by time.

        Their room is there for a call of `allocate` once the future is done.
        """
        lease_ids = [lease.lease_id for lease in leases]
        return self._data_thread.submit(lambda: background.wait(self._release_now(lease_ids)))

    def close(self) -> None:
        """End the session after what is under way; its leases end with it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._data_thread.shutdown()
        if self._mover is not None:
            self._mover.close()
        background.wait(self._close())

    @property
    def _moves(self) -> Mover:
        assert self._mover is not None, "a session without one was never given out"
        return self._mover

    # On the thread of the event loop.

    async def _open(self, token: str) -> "tuple[Pool | None, str]":
        config = self._config
        message_bytes = max(4 * 2**20, config.fingerprint.part_bytes + 64 * 2**10)
        self._client = StagingClient(
            config.address, tls=config.tls, timeout_s=config.timeout_s, max_message_bytes=message_bytes
        )
        # One that joined cannot tell the others of another peer.
        self._may_register = config.reconnects and not token
        if token:
            self._note(pb.RegisterPeerResponse.FromString(bytes.fromhex(token)))
            return await self._choose_path()
        found = await self._register()
        # Of no request, though it may be opened within one: it outlasts that.
        self._tasks.append(asyncio.create_task(self._renew_forever(), context=contextvars.Context()))
        return found

    async def _register(self) -> "tuple[Pool | None, str]":
        """Become a peer, and choose how bytes move."""
        fingerprint = pb.Fingerprint(**asdict(self._config.fingerprint))
        request = pb.RegisterPeerRequest(fingerprint=fingerprint, name=self._config.name, access=self._access())
        reason = ""
        try:
            registered = await self._client.call(self._client.stub.RegisterPeer, request)
        except UnsupportedError as error:
            if not str(error).startswith("access"):
                raise
            request.access = pb.ACCESS_STREAM
            registered = await self._client.call(self._client.stub.RegisterPeer, request)
            reason = str(error)
        self._note(registered)
        return (None, reason) if reason else await self._choose_path()

    def _note(self, registered: pb.RegisterPeerResponse) -> None:
        self._registered, self._peer_id = registered, registered.peer_id
        self._ttl_ms = min(round(self._config.ttl_s * 1000), registered.max_lease_ttl_ms)

    def _access(self) -> pb.Access:
        if self._config.is_strict:
            return pb.ACCESS_STREAM
        return pb.ACCESS_MAP_WRITE if self._config.may_write else pb.ACCESS_MAP_READ

    async def _choose_path(self) -> "tuple[Pool | None, str]":
        registered = self._registered
        if self._config.is_strict:
            return None, "this session is strict"
        if self._config.locality == "remote":
            unmapped = "this session is forced to be remote"
        elif not registered.memory_socket:
            unmapped = "the service hands no memory over"
        else:
            try:
                pool = await asyncio.to_thread(MappedPool, registered.peer_id, registered)
                return pool, f"{registered.memory_socket} is on this host"
            except OasisError as error:
                unmapped = f"the memory cannot be mapped ({error})"
        self._link = self._client.attach(registered.peer_id)
        try:
            offer = await self._link.offer()
            devices = net_devices(self._config.address)
            may_write = self._config.may_write
            open_pool = partial(OneSidedPool, offer, registered, may_write=may_write, devices=devices)
            one_sided = await asyncio.to_thread(open_pool)
            self._link_is_lost = False
            self._watching = asyncio.create_task(self._watch(self._link, one_sided))
            return one_sided, f"{unmapped}; over {offer.transport}"
        except OasisError as error:
            self._link.close()
            return None, f"{unmapped}, and one-sided transfers cannot be had ({error})"

    async def _watch(self, link: AttachedLink, pool: OneSidedPool) -> None:
        """Touch the memory no more once the service thinks so: it would give blocks away that are written to."""
        await link.ended()
        if link is self._link:
            self._link_is_lost = True
            error = PeerUnavailableError("the stream that keeps the way open has ended")
            with contextlib.suppress(RuntimeError):  # this session is being closed
                self._data_thread.submit(self._moves.lose, pool, error)
            self._look.set()

    async def _renew_forever(self) -> None:
        """Keep the peer and all its leases; become another peer when the service was started again."""
        wait_s, is_away = self._ttl_ms / 3000, False
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._look.wait()
            self._look.clear()
            wait_s = self._ttl_ms / 3000
            try:
                if not await self._is_known():
                    return
                is_away = False
                if self._link_is_lost:
                    self._link_is_lost = False  # tried once; where it cannot be had, bytes go by stream from now on
                    await self._reopen(*await self._choose_path())
            except PeerUnavailableError as error:
                level = logging.DEBUG if is_away else logging.WARNING  # once for each time that it goes away
                logger.log(level, "staging at %s: leases are not renewed: %s", self._config.address, error)
                is_away = True
                wait_s = min(wait_s, AWAY_S)
                with contextlib.suppress(ConfigError):
                    self._client.refresh()
            except OasisError as error:
                logger.warning("staging at %s: leases are not renewed: %s", self._config.address, error)
                wait_s = min(wait_s, AWAY_S)
            except Exception:  # whatever it is, the leases of a living process must not lapse by it
                logger.exception("staging at %s: leases are not renewed by a bug", self._config.address)

    async def _is_known(self) -> bool:
        """Renew all leases, and return whether there is a peer, this one or a new one in its place."""
        peer_id = self._peer_id
        try:
            request = pb.RenewRequest(peer_id=peer_id, ttl_ms=self._ttl_ms)
            await self._client.call(self._client.stub.Renew, request)
        except LeaseExpiredError as error:  # the service was started again, or was out of reach for too long
            logger.warning("staging at %s: all leases are lost: %s", self._config.address, error)
            return await self._revive(peer_id)
        return True

    async def _revive(self, lost_peer_id: str) -> bool:
        """Register anew in place of a peer that the service knows no more; return whether that may be done."""
        if not self._may_register:
            return False
        async with self._reviving:
            if self._peer_id == lost_peer_id:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                self._leases.clear()
                self._link_is_lost = False
                await self._reopen(*await self._register())
                self.num_reconnects += 1
        return True

    async def _reopen(self, pool: "Pool | None", reason: str) -> None:
        """Let bytes move another way, after what is under way."""
        try:
            change = self._data_thread.submit(self._moves.reopen, self._registered, pool, reason)
        except RuntimeError:  # this session is being closed
            if pool is not None:
                pool.close()
            return
        await asyncio.wrap_future(change)
        logger.info("staging at %s: bytes move %s now, since %s", self._config.address, self.path, self.path_reason)

    async def _as_peer(self, call: Callable[[str], Awaitable[Result]]) -> Result:
        """Make a call that changes nothing where the peer is unknown; then make it once more as a new peer."""
        peer_id = self._peer_id
        try:
            return await call(peer_id)
        except PeerUnavailableError:
            self._look.set()
            raise
        except LeaseExpiredError:
            if not await self._is_known() or self._peer_id == peer_id:
                raise
        return await call(self._peer_id)

    async def _allocate(self, num_blocks: int, block_keys: Sequence[bytes]) -> Lease:
        async def call(peer_id: str) -> Lease:
            request = pb.AllocateRequest(
                peer_id=peer_id, num_blocks=num_blocks, ttl_ms=self._ttl_ms, block_keys=block_keys
            )
            response: pb.AllocateResponse = await self._client.call(self._client.stub.Allocate, request)
            self._leases.add(response.lease_id)
            block_ids = np.array(response.block_ids, np.uint64)
            lease = self._new_lease(response.lease_id, num_blocks, block_ids, peer_id)
            lease.num_held = response.num_held_blocks
            return lease

        return await self._as_peer(call)

    async def _take(self, request: pb.LeaseRequest) -> Lease:
        async def call(peer_id: str) -> Lease:
            request.peer_id = peer_id
            response: pb.LeaseResponse = await self._client.call(self._client.stub.Lease, request)
            self._leases.add(response.lease_id)
            return self._new_lease(response.lease_id, response.num_blocks, None, peer_id)

        return await self._as_peer(call)

    async def _hand_off(self, lease: Lease) -> str:
        request = pb.HandoffRequest(peer_id=self._peer_id, lease_id=lease.lease_id, ttl_ms=self._ttl_ms)
        response: pb.HandoffResponse = await self._client.call(self._client.stub.Handoff, request)
        self._leases.discard(lease.lease_id)
        return response.handle

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._leases:
            await self._release_now(list(self._leases))
        if self._link is not None:
            self._link.close()
        if hasattr(self, "_client"):
            await self._client.channel.close()

    async def _release_now(self, lease_ids: list[str]) -> None:
        self._leases.difference_update(lease_ids)
        request = pb.ReleaseRequest(peer_id=self._peer_id, lease_ids=lease_ids)
        try:
            await self._client.call(self._client.stub.Release, request, may_repeat=True)
        except OasisError as error:
            logger.warning("staging at %s: leases end by time: %s", self._config.address, error)

    def _new_lease(self, lease_id: str, num_blocks: int, block_ids: NDArray[np.uint64] | None, peer_id: str) -> Lease:
        sums = None if block_ids is None else np.zeros((num_blocks, self._registered.num_parts), np.uint64)
        return Lease(lease_id=lease_id, num_blocks=num_blocks, peer_id=peer_id, block_ids=block_ids, sums=sums)
