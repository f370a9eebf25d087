"""Has prompts computed by prefill services: picks one, takes its handle over, gives the lease up at the end."""

import asyncio
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
from oasiskv.services.clients.link import StagingLinks
from oasiskv.services.clients.moves import Lease
from oasiskv.services.clients.session import StagingSession
from oasiskv.services.clients.waiting import wait_or_undo
from oasiskv.services.decode.choice import Candidate, Reason, ranked, reason
from oasiskv.services.decode.peers import Peer, Peers, Resolve, resolve
from oasiskv.services.prompt_keys import block_keys

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 30.0
"""Longest time of a probe."""

FIND_TIMEOUT_S = 0.3
"""Longest time in which it is looked up which staging service holds how much of a prompt."""

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
        self.peers = Peers(config.prefills, config.tls, self._verify, self._session, find)
        """The prefill services."""
        self.links: StagingLinks | None = None
        """The ways to staging, once there is an engine; its workers know each under its address."""
        self.read_probe: Callable[[str], Awaitable[bytes]] | None = None
        """`ServedEngine.read_probe`, once there is an engine."""
        self.outcomes: Counter[str] = Counter()
        """Long prompts: `handed_over`, `finished` by their first token, `recomputed` here, or `lost` later."""
        self.choices: Counter[Reason] = Counter()
        """Why a prefill service was the first that was asked."""
        self.errors: Counter[str] = Counter()
        """Attempts at a prefill service that failed, by class."""

    @property
    def is_ready(self) -> bool:
        """Whether some prompt could be computed elsewhere; true where none shall be."""
        return not self.reasons

    @property
    def way(self) -> tuple[str, str]:
        """How bytes come from the staging service of its own, and why that; empty while they cannot."""
        return ("", "") if self.links is None or not self._config.staging else self.links.at(self._config.staging).way

    @property
    def reasons(self) -> list[str]:
        """Why no prompt can be computed elsewhere; empty if one can, or none shall be."""
        if not self._config.prefills:
            return []
        if self._usable():
            return []
        ready = [peer for peer in self.peers.all if peer.is_ready]
        away = list(dict.fromkeys(self._staging_of(peer) for peer in ready if self._session(peer) is None))
        if self._config.staging and (self.links is None or not self.links.at(self._config.staging).is_up):
            away = [self._config.staging]
        if away:
            return [f"staging: expected an answer at {address or 'an address'}, got none" for address in away]
        if not ready:
            return [f"prefills: expected one of {len(self.peers.all)} services to be ready, got none"]
        return [f"kv_path: expected a probe block from {peer.client.address}, got {peer.reason}" for peer in ready]

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
        try:
            if self._config.staging and self.links is not None:
                self.links.at(self._config.staging)
            await self.peers.run()
        finally:
            if self.links is not None:
                await self.links.close()

    async def begin(self, ids: Sequence[int], sampling: Sampling) -> Begun | None:
        """Have a prompt computed by the best service, or the next one; None if none can."""
        for peer, num_held in await self._ranked(ids):
            if (session := self._session(peer)) is None:
                continue
            try:
                with peer.under_way(len(ids) - num_held):
                    begun = await self._begin_at(peer, session, ids, sampling)
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

    def _staging_of(self, peer: Peer) -> str:
        """Return where a peer's KV is: as the settings say, else as it says itself."""
        return self._config.staging or peer.staging

    def _session(self, peer: Peer) -> StagingSession | None:
        """Return the session with a peer's staging, None while there is none."""
        address = self._staging_of(peer)
        if self.links is None or not address:
            return None
        link = self.links.at(address)
        return link.session if link.is_up else None

    def _usable(self) -> list[Peer]:
        return [peer for peer in self.peers.usable() if self._session(peer) is not None]

    async def _ranked(self, ids: Sequence[int]) -> list[tuple[Peer, int]]:
        """Return the services that a prompt may go to, the best first, and how much of it each need not compute."""
        peers = self._usable()
        if not peers:
            return []
        held = await self._held(ids, sorted({self._staging_of(peer) for peer in peers}))
        candidates = [
            Candidate(num_waiting_tokens=peer.load, num_held_tokens=held.get(self._staging_of(peer), 0))
            for peer in peers
        ]
        self.choices[reason(candidates)] += 1
        return [(peers[place], candidates[place].num_held_tokens) for place in ranked(candidates)]

    async def _held(self, ids: Sequence[int], addresses: Sequence[str]) -> dict[str, int]:
        """Return by staging service how many tokens at a prompt's beginning it holds; nobody is asked about only one.

        One that answers by the directory knows of all; else each is asked. What does not answer in time holds nothing.
        """
        held: dict[str, int] = {}
        if len(addresses) < 2:
            return held
        block_size = self._config.fingerprint.block_size
        keys = block_keys(ids, block_size)

        async def ask(address: str) -> bool:
            assert self.links is not None
            try:
                found = await self.links.at(address).find(keys)
            except OasisError:
                return False
            for holder in found.holders:
                held[holder.address or address] = holder.num_prefix_blocks * block_size
            return found.is_complete and any(holder.address for holder in found.holders)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIND_TIMEOUT_S):
                if not await ask(addresses[0]):
                    await asyncio.gather(*map(ask, addresses[1:]))
        return held

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
        lease = self._name(peer, taken)
        self._leases[lease] = session, taken
        return Begun(first=first, lease=lease)

    def _name(self, peer: Peer, taken: Lease) -> str:
        """Return what the workers call a lease: the way that it is read by, and its own text."""
        return f"{self._staging_of(peer)}/{taken.token}"

    async def _verify(self, peer: Peer) -> StagingSession:
        """Have a block of random bytes come from a prefill service's workers to those here.

        Raises:
            OasisError: It did not, or handovers from there would not fit.
        """
        session, read_probe = self._session(peer), self.read_probe
        if session is None or read_probe is None:
            raise PeerUnavailableError(f"staging: expected an answer at {self._staging_of(peer)}, got none")
        probe, digest = await peer.client.probe(CHECK_TIMEOUT_S)
        self._check(probe)
        taken = await wait_or_undo(session.accept(probe.handle), session.release)
        try:
            got = await read_probe(self._name(peer, taken))
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
