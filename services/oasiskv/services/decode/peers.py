"""The prefill services that decode knows: found by name, looked at, and verified by a block that crosses staging."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from oasiskv.core.errors import OasisError
from oasiskv.core.service_config import TlsConfig
from oasiskv.services.clients.prefill import PrefillClient
from oasiskv.services.clients.session import StagingSession

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at a prefill service."""

RESOLVE_S = 5.0
"""Between two looks at what a name stands for."""

STATS_TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses, each `host:port`, that a host's name and a port stand for."""

Verify = Callable[["Peer"], Awaitable[StagingSession]]
"""Has a block come from a peer and returns the session it came through; raises what is wrong."""


@dataclass(slots=True, eq=False)
class Peer:
    """One prefill service."""

    client: PrefillClient
    name: str
    """What the settings call it."""
    is_ready: bool = False
    revision: str = ""
    staging: str = ""
    """`host:port` of the staging service that takes its KV, as it calls it."""
    num_waiting_tokens: int = 0
    """As of the last look."""
    num_sent_tokens: int = 0
    """Of this service's own requests under way there."""
    num_calls: int = 0
    """Requests of this service under way there."""
    verified_in: StagingSession | None = None
    """The session through which a block came from there; None if the path is not verified."""
    reason: str = "no probe block came yet"
    """Why it is not verified."""
    is_gone: bool = False
    """Whether its name no longer stands for it."""

    @property
    def load(self) -> int:
        """Prompt tokens that a new request would wait for, as far as is known here."""
        return max(self.num_waiting_tokens, self.num_sent_tokens)

    @contextlib.contextmanager
    def under_way(self, num_tokens: int) -> Iterator[None]:
        """Count a request there for the length of a `with` block."""
        self.num_sent_tokens += num_tokens
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_sent_tokens -= num_tokens
            self.num_calls -= 1

    @property
    def is_verified(self) -> bool:
        """Whether the last probe block came as it was written."""
        return self.verified_in is not None

    @property
    def is_usable(self) -> bool:
        """Whether prompts may go there."""
        return self.is_ready and self.is_verified and not self.is_gone


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name, of the family that the system prefers.

    Raises:
        OSError: There are none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    preferred = found[0][0]
    hosts = [
        f"[{to[0]}]" if family == socket.AF_INET6 else str(to[0]) for family, *_, to in found if family == preferred
    ]
    return [f"{one}:{port}" for one in dict.fromkeys(hosts)]


class Peers:
    """Keeps an eye on the prefill services; `run` does it until cancelled.

    Args:
        names: `host:port` each.
        tls: This process's certificate; None to speak in the clear.
        verify: Shows that KV comes through.
        session: Returns the session with a peer's staging, None while there is none.
        find: Looks a name up.
    """

    def __init__(
        self,
        names: Sequence[str],
        tls: TlsConfig | None,
        verify: Verify,
        session: Callable[[Peer], StagingSession | None],
        find: Resolve = resolve,
    ) -> None:
        """Know nobody."""
        self._names = names
        self._tls = tls
        self._verify = verify
        self._session = session
        self._find = find
        self._peers: dict[str, Peer] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self.checks: Counter[str] = Counter()
        """Probes by what came of them: `ok`, or the class of the error."""

    @property
    def all(self) -> list[Peer]:
        """Those that some name stands for."""
        return [peer for peer in self._peers.values() if not peer.is_gone]

    def usable(self) -> list[Peer]:
        """Return those that prompts may go to."""
        return [peer for peer in self._peers.values() if peer.is_usable]

    async def run(self) -> None:
        """Look names and services up for as long as the caller lets it."""
        try:
            while True:
                for name in self._names:
                    await self._look_up(name)
                await asyncio.sleep(RESOLVE_S)
        finally:
            for watch in self._watches:
                watch.cancel()
            await asyncio.gather(*self._watches, return_exceptions=True)

    async def _look_up(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        known = {address for address, peer in self._peers.items() if peer.name == name}
        try:
            found = await self._find(host.strip("[]"), int(port))
        except OSError as error:  # a name server that is away takes nobody away
            if not known:
                logger.warning("prefills: %s cannot be looked up: %s", name, error)
            return
        for address in found:
            if (peer := self._peers.get(address)) is not None:
                peer.is_gone = False
                continue
            # Certificates are of the name, not of what it stands for.
            client = PrefillClient(address, tls=self._tls, tls_name=host if address != name else "")
            peer = self._peers[address] = Peer(client, name)
            watch = asyncio.create_task(self._watch(address, peer))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        for address in known.difference(found):
            self._peers[address].is_gone = True

    async def _watch(self, address: str, peer: Peer) -> None:
        """Look at a service until it is gone and nothing of ours is under way there."""
        async with peer.client:
            while not peer.is_gone or peer.num_calls:
                await self._look(peer)
                session = self._session(peer)
                if peer.is_ready and session is not None and peer.verified_in is not session:
                    await self._check(peer)
                await asyncio.sleep(LOOK_S)
            logger.info("prefill at %s is gone from %s", address, peer.name)
            del self._peers[address]

    async def _look(self, peer: Peer) -> None:
        try:
            stats = await peer.client.stats(STATS_TIMEOUT_S)
            is_ready, peer.num_waiting_tokens, peer.revision = stats.is_ready, stats.num_waiting_tokens, stats.revision
            peer.staging = stats.staging
        except (OasisError, grpc.aio.AioRpcError):
            is_ready = False
        if is_ready != peer.is_ready:
            logger.info("prefill at %s is %s", peer.client.address, "ready" if is_ready else "not ready")
        if not is_ready:  # it may be another process that answers next
            peer.verified_in = None
        peer.is_ready = is_ready

    async def _check(self, peer: Peer) -> None:
        peer.verified_in = None
        try:
            peer.verified_in = await self._verify(peer)
            peer.reason = ""
            self.checks["ok"] += 1
            logger.info("KV comes through from prefill at %s", peer.client.address)
        except (OasisError, grpc.aio.AioRpcError) as error:
            reason = f"{type(error).__name__}: {error}"
            if reason != peer.reason:
                logger.warning("KV does not come through from prefill at %s: %s", peer.client.address, reason)
            peer.reason = reason
            self.checks[type(error).__name__] += 1
