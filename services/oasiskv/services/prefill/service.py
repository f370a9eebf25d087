"""Decides what happens to a prompt: a lease in staging, the engine's run, and the handle that it ends in."""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import (
    BlockNotFoundError,
    EngineFailedError,
    InvalidRequestError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
    RequestAbortedError,
    UnsupportedError,
)
from oasiskv.core.generation import Generated, Handover, Sampling
from oasiskv.core.handover import HandoverLayout
from oasiskv.core.layout import SparseLayout
from oasiskv.core.service_config import PrefillConfig
from oasiskv.services import rdma
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.moves import Lease
from oasiskv.services.clients.session import StagingSession
from oasiskv.services.clients.waiting import wait_or_undo
from oasiskv.services.generation import Prompt, check_request_id
from oasiskv.services.prompt_keys import block_keys

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What the service uses of `engine.vllm.served.ServedEngine`, which says what each means."""

    layout: SparseLayout

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request."""

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return token ids."""

    def generate(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stage: str | None = None,
        prefix: tuple[str, int] | None = None,
    ) -> AsyncIterator[Generated]:
        """Generate until the request ends."""

    async def take_handover(self, lease: str) -> list[bytes]:
        """Return the receipts of staged KV."""

    async def write_probe(self, lease: str) -> tuple[bytes, list[bytes]]:
        """Return the digest and the receipts of a block of random bytes."""


class _PrefixLostError(Exception):
    """Blocks that were to be loaded did not come."""


@dataclass(slots=True)
class Counts:
    """Since the start."""

    num_requests: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_loaded_tokens: int = 0
    """Prompt tokens whose KV was in staging and was not computed."""
    staged_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Prompts: `handed_over`, `finished` by their first token, `cancelled`, or the class of the error."""


@dataclass(slots=True)
class _Request:
    num_waiting_tokens: int = 0
    is_aborted: bool = False
    task: "asyncio.Task[object] | None" = field(default=None, repr=False)


class PrefillService:
    """Owner of the requests under way.

    Args:
        config: The service's settings.
        engine: Computes.
        link: The way to staging.
    """

    def __init__(self, config: PrefillConfig, engine: Engine, link: StagingLink) -> None:
        self._config = config
        self._engine = engine
        self._link = link
        self._requests: dict[str, _Request] = {}
        self.is_draining = False
        self.counts = Counts()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken and its KV has a way out."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why no request would be taken."""
        reasons = [] if self._engine.is_alive else ["engine: expected its process to run, got one that ended"]
        if not self._link.is_up:
            reasons.append(f"staging: expected an answer at {self._config.staging}, got none")
        return [*reasons, "service: it drains"] if self.is_draining else reasons

    @property
    def facts(self) -> dict[str, Any]:
        """What `/readyz` tells."""
        return {
            "role": "prefill",
            "revision": self._config.revision,
            "is_draining": self.is_draining,
            "num_requests": self.num_requests,
            "reasons": self.reasons,
            "rdma": rdma.facts(rdma.look(), *self._link.way),
        }

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(request.num_waiting_tokens for request in self._requests.values())

    @property
    def lookahead(self) -> LookaheadConfig:
        """Settings of the engine's backend."""
        return self._config.engine.lookahead

    async def prefill(self, request_id: str, prompt: Prompt, sampling: Sampling) -> tuple[Handover, list[int]]:
        """Compute a prompt and its first token; the KV is in staging when this returns.

        Returns:
            What was handed over, and the prompt's token ids.

        Raises:
            OasisError: As the contract says; nothing is held.
        """
        with self._admitted(request_id) as request:
            try:
                first, ids = await self._prefill(request_id, request, prompt, sampling)
            except asyncio.CancelledError:
                self.counts.num_failed += 1
                self.counts.outcomes["cancelled"] += 1
                if request.is_aborted:
                    raise RequestAbortedError("request_id: ended by Abort") from None
                raise
            except OasisError as error:
                self.counts.num_failed += 1
                self.counts.outcomes[type(error).__name__] += 1
                raise
            self.counts.outcomes["handed_over" if first.finish_reason is None else "finished"] += 1
            return first, ids

    async def probe(self) -> tuple[Handover, bytes]:
        """Stage a block of random bytes on the way of a request's KV.

        Returns:
            How to take it over, and the digest of its bytes.

        Raises:
            OasisError: As the contract says; nothing is held.
        """
        if self.is_draining:
            raise PeerUnavailableError("service: expected one that takes requests, got one that drains")
        session = self._link.session
        lease = await wait_or_undo(session.allocate(1), session.release)
        is_handed_over = False
        try:
            digest, receipts = await self._engine.write_probe(lease.token)
            handle = await self._seal(session, lease, [secrets.token_bytes(24)], receipts)
            is_handed_over = True
        finally:
            if not is_handed_over:
                session.release(lease)
        return self._handover(first_token_id=0, handle=handle, num_blocks=1), digest

    def abort(self, request_ids: Sequence[str]) -> int:
        """End requests and return how many there were."""
        found = [request for request_id in set(request_ids) if (request := self._requests.get(request_id)) is not None]
        for request in found:
            request.is_aborted = True
            assert request.task is not None
            request.task.cancel()
        return len(found)

    def drain(self) -> int:
        """Take no more requests; return how many are under way."""
        self.is_draining = True
        return len(self._requests)

    @contextlib.contextmanager
    def _admitted(self, request_id: str) -> Iterator[_Request]:
        check_request_id(request_id)
        if self.is_draining:
            raise PeerUnavailableError("service: expected one that takes requests, got one that drains")
        if len(self._requests) >= self._config.max_requests:
            raise PoolExhaustedError(f"max_requests: expected fewer than {self._config.max_requests} under way")
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id: expected one that is not under way, got {request_id!r}")
        request = self._requests[request_id] = _Request(task=asyncio.current_task())
        self.counts.num_requests += 1
        try:
            yield request
        finally:
            del self._requests[request_id]

    async def _prefill(
        self, request_id: str, request: _Request, prompt: Prompt, sampling: Sampling
    ) -> tuple[Handover, list[int]]:
        ids = await asyncio.to_thread(self._engine.tokenize, prompt)
        request.num_waiting_tokens = len(ids)
        self._check(ids, sampling)
        self.counts.num_prompt_tokens += len(ids)
        if sampling.max_tokens == 1:
            return await self._run(request_id, request, ids, sampling, None), ids
        keys = block_keys(ids, self._config.fingerprint.block_size)
        session = self._link.session
        prefix = await self._find(session, keys)
        try:
            try:
                return await self._stage(session, request_id, request, ids, keys, sampling, prefix), ids
            except _PrefixLostError:
                logger.warning("the first blocks of a prompt did not come from staging; it is computed")
                return await self._stage(session, request_id, request, ids, keys, sampling, None), ids
        finally:
            if prefix is not None:
                session.release(prefix)

    async def _find(self, session: StagingSession, keys: Sequence[bytes]) -> Lease | None:
        """Take a lease on the blocks of the prompt that are in staging."""
        try:
            return await wait_or_undo(session.lease(keys), session.release)
        except (BlockNotFoundError, PoolExhaustedError):
            return None

    async def _stage(
        self,
        session: StagingSession,
        request_id: str,
        request: _Request,
        ids: Sequence[int],
        keys: Sequence[bytes],
        sampling: Sampling,
        prefix: Lease | None,
    ) -> Handover:
        """Compute a prompt, but for the blocks of a read lease, and stage its KV, of which those blocks are part."""
        layout = HandoverLayout.of(len(ids), self._config.fingerprint.block_size, self._engine.layout)
        num_loaded = 0 if prefix is None else prefix.num_blocks
        lease = await wait_or_undo(session.allocate(layout.num_blocks, keys[:num_loaded]), session.release)
        if lease.num_held < num_loaded:  # the service has lost them since, though they were leased
            session.release(lease)
            raise _PrefixLostError
        given = None if prefix is None else (prefix.token, num_loaded)
        is_handed_over = False
        try:
            first = await self._run(request_id, request, ids, sampling, lease.token, given)
            if first.finish_reason is not None:
                return first
            receipts = await self._engine.take_handover(lease.token)
            # The first token follows the prompt's last block where that is complete.
            all_keys = block_keys([*ids, first.first_token_id], self._config.fingerprint.block_size)
            handle = await self._hand_off(session, lease, layout, all_keys, receipts)
            is_handed_over = True
        finally:
            if not is_handed_over:
                # Shielded: whoever cancelled does not wait for it, and the blocks must not be given up before.
                await asyncio.shield(self._give_up(session, lease))
        self.counts.num_loaded_tokens += num_loaded * self._config.fingerprint.block_size
        self.counts.staged_bytes += (layout.num_blocks - lease.num_held) * self._config.fingerprint.block_bytes
        return self._handover(
            first_token_id=first.first_token_id,
            first_logprobs=first.first_logprobs,
            handle=handle,
            num_tokens=len(ids),
            num_blocks=layout.num_blocks,
        )

    def _handover(self, **fields: Any) -> Handover:
        ours = self.lookahead
        return Handover(
            budget_blocks=ours.budget_blocks, summary=ours.summary, summary_dtype=ours.summary_dtype, **fields
        )

    def _check(self, ids: Sequence[int], sampling: Sampling) -> None:
        if names := sampling.looking_back():
            raise UnsupportedError(f"{names[0]}: expected it unset, since it depends on tokens before the first")
        num_complete = len(ids) // self._config.fingerprint.block_size
        if not self._engine.layout.may_switch(num_complete):
            least = self._engine.layout.least_complete * self._config.fingerprint.block_size
            raise UnsupportedError(f"prompt: expected at least {least} tokens, which can be sparse, got {len(ids)}")
        if len(ids) + 2 > self._engine.max_tokens:
            raise InvalidRequestError(f"prompt: expected at most {self._engine.max_tokens - 2} tokens, got {len(ids)}")

    async def _run(
        self,
        request_id: str,
        request: _Request,
        ids: Sequence[int],
        sampling: Sampling,
        stage: str | None,
        prefix: tuple[str, int] | None = None,
    ) -> Handover:
        """Compute the prompt, and one step more where KV is handed over: in it the request becomes sparse."""
        values = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
        once = Sampling(**values | {"max_tokens": 1 if stage is None else 2})
        first: Generated | None = None
        num_tokens, reason = 0, None
        async for generated in self._engine.generate(request_id, ids, once, stage=stage, prefix=prefix):
            request.num_waiting_tokens = 0
            if first is None and generated.token_ids:
                first = generated
            num_tokens += len(generated.token_ids)
            reason = generated.finish_reason
        if first is None and reason == "error" and prefix is not None:
            raise _PrefixLostError
        if first is None or reason not in ("stop", "length"):
            raise EngineFailedError(f"engine: expected a token, got none; it ended the request with {reason!r}")
        return Handover(
            first_token_id=first.token_ids[0],
            first_logprobs=first.logprobs[0] if first.logprobs else (),
            finish_reason=reason if num_tokens == 1 else None,
        )

    async def _hand_off(
        self,
        session: StagingSession,
        lease: Lease,
        layout: HandoverLayout,
        keys: Sequence[bytes],
        receipts: Sequence[bytes],
    ) -> str:
        mark = secrets.token_bytes(16)
        rest = range(layout.num_complete, layout.num_blocks)
        all_keys = [*keys, *(mark + index.to_bytes(4, "little") for index in rest)]
        return await self._seal(session, lease, all_keys, receipts)

    async def _seal(
        self, session: StagingSession, lease: Lease, keys: Sequence[bytes], receipts: Sequence[bytes]
    ) -> str:
        """Declare the blocks of a lease final and return the handle of them."""
        num_parts = self._config.fingerprint.num_parts
        sums = np.zeros((len(keys), num_parts), np.uint64)
        for receipt in receipts:  # each rank wrote the sums of its own parts, and 0 for the others
            sums |= np.frombuffer(receipt, np.uint64).reshape(len(keys), num_parts)
        new = slice(lease.num_held, len(keys))  # those before are sealed
        await asyncio.wrap_future(session.seal(lease, range(len(keys))[new], keys[new], sums[new]))
        return await asyncio.wrap_future(session.hand_off(lease))

    async def _give_up(self, session: StagingSession, lease: Lease) -> None:
        """Release a lease once nothing writes to its blocks any more."""
        with contextlib.suppress(OasisError):
            await self._engine.take_handover(lease.token)
        session.release(lease)
