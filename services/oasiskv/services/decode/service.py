"""Decides which requests are taken, and ends them when they are over time or unwanted."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oasiskv.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    PeerUnavailableError,
    PoolExhaustedError,
    RequestAbortedError,
)
from oasiskv.core.generation import Generated, Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.services import rdma
from oasiskv.services.decode.router import Router
from oasiskv.services.generation import Prompt, check_request_id

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What the service uses of `engine.vllm.served.ServedEngine`, which says what each means."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""

    @property
    def num_requests(self) -> int:
        """Requests under way, those of other fronts included."""

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return token ids."""

    def generate(self, request_id: str, ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Generated]:
        """Generate until the request ends."""

    async def abort(self, request_id: str) -> None:
        """End a request."""

    async def traffic(self) -> dict[str, int]:
        """Return the bytes that came from staging."""


@dataclass(slots=True)
class Counts:
    """Of decode.v1, since the start."""

    num_requests: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


@dataclass(slots=True)
class Answer:
    """A request that was taken.

    Attributes:
        ids: The prompt's tokens.
        generated: What comes of it; leaving the iteration early ends the request.
    """

    ids: list[int]
    generated: AsyncIterator[Generated]


class DecodeService:
    """Owner of the requests of decode.v1; those of HTTP are vLLM's own.

    Args:
        config: The service's settings.
        engine: Generates.
        router: Has long prompts computed elsewhere.
    """

    def __init__(self, config: DecodeConfig, engine: Engine, router: Router) -> None:
        self._config = config
        self._engine = engine
        self._router = router
        self._requests: dict[str, bool] = {}
        """By id: whether it was aborted."""
        self.is_draining = False
        self.counts = Counts()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs."""
        return self._engine.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken, and long prompts would be computed elsewhere as configured."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Why it is not ready."""
        reasons = [] if self._engine.is_alive else ["engine: expected its process to run, got one that ended"]
        reasons += self._router.reasons
        return [*reasons, "service: it drains"] if self.is_draining else reasons

    @property
    def facts(self) -> dict[str, Any]:
        """What `/readyz` tells."""
        peers = self._router.peers.all
        return {
            "role": "decode",
            "revision": self._config.revision,
            "is_draining": self.is_draining,
            "num_requests": self.num_requests,
            "reasons": self.reasons,
            "kv_path": {
                "is_verified": any(peer.is_usable for peer in peers),
                "peers": [
                    {
                        "address": peer.client.address,
                        "is_ready": peer.is_ready,
                        "is_verified": peer.is_verified,
                        "revision": peer.revision,
                        "reason": peer.reason,
                    }
                    for peer in peers
                ],
            },
            "rdma": rdma.facts(rdma.look(), *self._router.way),
        }

    @property
    def num_requests(self) -> int:
        """Requests under way, of all fronts."""
        return max(len(self._requests), self._engine.num_requests)

    def check_room(self) -> None:
        """Refuse a request, of whatever front, where none is taken now.

        Raises:
            PeerUnavailableError: The service drains.
            PoolExhaustedError: Too many are under way.
        """
        if self.is_draining:
            raise PeerUnavailableError("service: expected one that takes requests, got one that drains")
        if self.num_requests >= self._config.max_requests:
            raise PoolExhaustedError(f"max_requests: expected fewer than {self._config.max_requests} under way")

    async def begin(self, request_id: str, prompt: Prompt, sampling: Sampling) -> Answer:
        """Take a request.

        Raises:
            OasisError: As the contract says; nothing is held.
        """
        request_id = request_id or secrets.token_hex(16)
        check_request_id(request_id)
        self.check_room()
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id: expected one that is not under way, got {request_id!r}")
        self._requests[request_id] = False
        try:
            ids = await asyncio.to_thread(self._engine.tokenize, prompt)
        except BaseException:
            del self._requests[request_id]
            raise
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += len(ids)
        return Answer(ids, self._generate(request_id, ids, sampling))

    async def abort(self, request_ids: Sequence[str]) -> int:
        """End requests and return how many there were."""
        found = [request_id for request_id in set(request_ids) if request_id in self._requests]
        for request_id in found:
            self._requests[request_id] = True
            await self._engine.abort(request_id)
        return len(found)

    async def traffic(self) -> dict[str, int]:
        """Return the bytes that came from staging since the start, summed over ranks."""
        return await self._engine.traffic()

    def drain(self) -> int:
        """Take no more requests; return how many are under way."""
        self.is_draining = True
        return self.num_requests

    async def _generate(self, request_id: str, ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Generated]:
        is_whole = False
        try:
            async for generated in self._engine.generate(request_id, ids, sampling):
                self.counts.num_completion_tokens += len(generated.token_ids)
                if generated.finish_reason not in (None, "stop", "length"):
                    if self._requests[request_id]:
                        raise RequestAbortedError("request_id: ended by Abort")
                    raise EngineFailedError(f"engine: it ended the request with {generated.finish_reason!r}")
                is_whole = generated.finish_reason is not None
                yield generated
        finally:
            del self._requests[request_id]
            self.counts.num_failed += not is_whole
