"""Has prompts computed by prefill services: picks one by load, takes its handle over, gives the lease up at the end."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from oasiskv.core.errors import OasisError, UnsupportedError
from oasiskv.core.generation import Begun, Handover, Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.moves import Lease
from oasiskv.services.clients.prefill import PrefillClient
from oasiskv.services.clients.session import StagingSession
from oasiskv.services.clients.waiting import wait_or_undo

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at a prefill service."""


@dataclass(slots=True)
class _Peer:
    client: PrefillClient
    is_ready: bool = False
    num_waiting_tokens: int = 0
    """As of the last look."""
    num_sent_tokens: int = 0
    """Of this service's own requests under way there."""

    @property
    def load(self) -> int:
        """Prompt tokens that a new request would wait for, as far as is known here."""
        return max(self.num_waiting_tokens, self.num_sent_tokens)


class Router:
    """The decode side of handovers; `run` keeps an eye on the prefill services until cancelled.

    Args:
        config: The service's settings.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._peers = [_Peer(PrefillClient(address, tls=config.tls)) for address in config.prefills]
        self._leases: dict[str, tuple[StagingSession, Lease]] = {}
        self.link: StagingLink | None = None
        """The way to staging, once the engine has one."""
        self.num_handovers = 0
        self.num_recomputed = 0

    @property
    def is_ready(self) -> bool:
        """Whether some prompt could be computed elsewhere; true where none shall be."""
        if not self._peers:
            return True
        return self.link is not None and self.link.is_up and any(peer.is_ready for peer in self._peers)

    @property
    def num_leases(self) -> int:
        """Requests that read KV in staging."""
        return len(self._leases)

    async def run(self) -> None:
        """Look at every prefill service for as long as the caller lets it."""
        async with contextlib.AsyncExitStack() as resources:
            for peer in self._peers:
                await resources.enter_async_context(peer.client)
            while True:
                await asyncio.gather(*(self._look(peer) for peer in self._peers))
                await asyncio.sleep(LOOK_S)

    async def begin(self, ids: Sequence[int], sampling: Sampling) -> Begun | None:
        """Have a prompt computed by the least loaded service, or the next one; None if none can."""
        link = self.link
        if link is None or not link.is_up:
            self.num_recomputed += 1
            return None
        for peer in sorted((peer for peer in self._peers if peer.is_ready), key=lambda peer: peer.load):
            peer.num_sent_tokens += len(ids)
            try:
                return await self._begin_at(peer, link, ids, sampling)
            except (OasisError, grpc.aio.AioRpcError) as error:  # the latter is a bug of the other side
                logger.warning("prefill at %s: %s: %s", peer.client.address, type(error).__name__, error)
            finally:
                peer.num_sent_tokens -= len(ids)
        self.num_recomputed += 1
        return None

    def end(self, lease: str) -> None:
        """Give a request's KV up."""
        if (held := self._leases.pop(lease, None)) is not None:
            session, taken = held
            with contextlib.suppress(RuntimeError):  # the session was closed, and its leases with it
                session.release(taken)

    def recompute(self) -> None:
        """Note that a request whose KV was lost is computed here."""
        self.num_recomputed += 1

    async def _begin_at(self, peer: _Peer, link: StagingLink, ids: Sequence[int], sampling: Sampling) -> Begun:
        request_id = f"{sampling.max_tokens}-{secrets.token_hex(8)}"
        first = await peer.client.prefill(request_id, ids, sampling, self._config.max_call_s)
        if first.finish_reason is not None:
            return Begun(first=first)
        session = link.session
        taken = await wait_or_undo(session.accept(first.handle), session.release)
        try:
            self._check(first, taken, ids)
        except OasisError:
            session.release(taken)
            raise
        self._leases[taken.token] = session, taken
        self.num_handovers += 1
        return Begun(first=first, lease=taken.token)

    def _check(self, first: Handover, taken: Lease, ids: Sequence[int]) -> None:
        ours = self._config.engine.lookahead
        for name, expected, got in (
            ("budget_blocks", ours.budget_blocks, first.budget_blocks),
            ("summary", ours.summary, first.summary),
            ("num_tokens", len(ids), first.num_tokens),
            ("num_blocks", first.num_blocks, taken.num_blocks),
        ):
            if expected != got:
                raise UnsupportedError(f"{name}: expected {expected} in a handover, got {got}")

    async def _look(self, peer: _Peer) -> None:
        try:
            stats = await peer.client.stats(timeout_s=5.0)
            is_ready, peer.num_waiting_tokens = stats.is_ready, stats.num_waiting_tokens
        except (OasisError, grpc.aio.AioRpcError):
            is_ready = False
        if is_ready != peer.is_ready:
            logger.info("prefill at %s is %s", peer.client.address, "ready" if is_ready else "not ready")
        peer.is_ready = is_ready
