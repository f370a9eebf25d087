"""Has prompts computed by prefill services: picks one by load, takes its handle over, gives the lease up at the end."""

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import grpc

from oasiskv.core.errors import (
    CorruptBlockError,
    InvalidRequestError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)
from oasiskv.core.generation import Begun, Handover, Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.moves import Lease
from oasiskv.services.clients.session import StagingSession
from oasiskv.services.clients.waiting import wait_or_undo
from oasiskv.services.decode.peers import Peer, Peers, Resolve, resolve

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 30.0
"""Longest time of a probe."""

REFUSALS = (InvalidRequestError, PoolExhaustedError, UnsupportedError)
"""What a prefill service answers whose path is as good as before."""


class Router:
    """The decode side of handovers; `run` keeps an eye on the prefill services until cancelled.

    Args:
        config: The service's settings.
        find: Looks names of prefill services up.
    """

    def __init__(self, config: DecodeConfig, find: Resolve = resolve) -> None:
        self._config = config
        self._leases: dict[str, tuple[StagingSession, Lease]] = {}
        self.peers = Peers(config.prefills, config.tls, self._verify, lambda: self._session, find)
        """The prefill services."""
        self.link: StagingLink | None = None
        """The way to staging, once the engine has one."""
        self.read_probe: Callable[[str], Awaitable[bytes]] | None = None
        """`ServedEngine.read_probe`, once there is an engine."""
        self.outcomes: Counter[str] = Counter()
        """Long prompts: `handed_over`, `finished` by their first token, `recomputed` here, or `lost` later."""
        self.errors: Counter[str] = Counter()
        """Attempts at a prefill service that failed, by class."""

    @property
    def is_ready(self) -> bool:
        """Whether some prompt could be computed elsewhere; true where none shall be."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why no prompt can be computed elsewhere; empty if one can, or none shall be."""
        if not self._config.prefills:
            return []
        if self._session is None:
            return [f"staging: expected an answer at {self._config.staging}, got none"]
        if self.peers.usable():
            return []
        waits = [peer for peer in self.peers.all if peer.is_ready]
        if not waits:
            return [f"prefills: expected one of {len(self.peers.all)} services to be ready, got none"]
        return [f"kv_path: expected a probe block from {peer.client.address}, got {peer.reason}" for peer in waits]

    @property
    def num_leases(self) -> int:
        """Requests that read KV in staging."""
        return len(self._leases)

    @property
    def num_handovers(self) -> int:
        """Requests that began with a handover."""
        return self.outcomes["handed_over"]

    @property
    def num_recomputed(self) -> int:
        """Requests that were computed here although they were long enough."""
        return self.outcomes["recomputed"] + self.outcomes["lost"]

    async def run(self) -> None:
        """Look after the prefill services for as long as the caller lets it."""
        await self.peers.run()

    async def begin(self, ids: Sequence[int], sampling: Sampling) -> Begun | None:
        """Have a prompt computed by the least loaded service, or the next one; None if none can."""
        link = self.link
        for peer in self.peers.usable() if link is not None and link.is_up else ():
            assert link is not None
            try:
                with peer.under_way(len(ids)):
                    begun = await self._begin_at(peer, link.session, ids, sampling)
                self.outcomes["handed_over" if begun.lease else "finished"] += 1
                return begun
            except (OasisError, grpc.aio.AioRpcError) as error:  # the latter is a bug of the other side
                logger.warning("prefill at %s: %s: %s", peer.client.address, type(error).__name__, error)
                self.errors[type(error).__name__] += 1
                if not isinstance(error, REFUSALS):
                    peer.verified_in, peer.reason = None, f"a handover failed: {type(error).__name__}: {error}"
        self.outcomes["recomputed"] += 1
        return None

    def end(self, lease: str) -> None:
        """Give a request's KV up."""
        if (held := self._leases.pop(lease, None)) is not None:
            session, taken = held
            with contextlib.suppress(RuntimeError):  # the session was closed, and its leases with it
                session.release(taken)

    def recompute(self) -> None:
        """Note that a request whose KV was lost is computed here."""
        self.outcomes["lost"] += 1

    @property
    def _session(self) -> StagingSession | None:
        return self.link.session if self.link is not None and self.link.is_up else None

    async def _begin_at(self, peer: Peer, session: StagingSession, ids: Sequence[int], sampling: Sampling) -> Begun:
        request_id = f"{sampling.max_tokens}-{secrets.token_hex(8)}"
        first = await peer.client.prefill(request_id, ids, sampling, self._config.max_call_s)
        if first.finish_reason is not None:
            return Begun(first=first)
        taken = await wait_or_undo(session.accept(first.handle), session.release)
        try:
            self._check(first, num_tokens=(len(ids), first.num_tokens), num_blocks=(first.num_blocks, taken.num_blocks))
        except OasisError:
            session.release(taken)
            raise
        self._leases[taken.token] = session, taken
        return Begun(first=first, lease=taken.token)

    async def _verify(self, peer: Peer) -> StagingSession:
        """Have a block of random bytes come from a prefill service's workers to those here.

        Raises:
            OasisError: It did not, or handovers from there would not fit.
        """
        session, read_probe = self._session, self.read_probe
        if session is None or read_probe is None:
            raise PeerUnavailableError(f"staging: expected an answer at {self._config.staging}, got none")
        probe, digest = await peer.client.probe(CHECK_TIMEOUT_S)
        self._check(probe)
        taken = await wait_or_undo(session.accept(probe.handle), session.release)
        try:
            got = await read_probe(taken.token)
        finally:
            session.release(taken)
        if got != digest:
            raise CorruptBlockError(f"digest: expected {digest.hex()} of the probe block, got {got.hex()}")
        return session

    def _check(self, first: Handover, **pairs: tuple[int, int]) -> None:
        ours = self._config.engine.lookahead
        fits = {
            "budget_blocks": (ours.budget_blocks, first.budget_blocks),
            "summary": (ours.summary, first.summary),
            "summary_dtype": (ours.summary_dtype, first.summary_dtype),
            **pairs,
        }
        for name, (expected, got) in fits.items():
            if expected != got:
                raise UnsupportedError(f"{name}: expected {expected} in a handover, got {got}")
