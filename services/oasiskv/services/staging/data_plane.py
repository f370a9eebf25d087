"""Starts the process that serves one-sided transfers, and starts it again when it has died and a peer asks for it."""

import asyncio
import contextlib
import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from oasiskv.core.errors import PeerUnavailableError, UnsupportedError
from oasiskv.services.staging.fabric import Transport
from oasiskv.services.staging.memory import StagingMemory

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 30.0
RETRY_S = 60.0
"""For so long no agent is started after one that was too slow or died; what one says of this host is final."""
# Of the environment: over TCP whoever reaches the agent's port can read all of it, and others may hold passwords.
AGENT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "TMPDIR", "VIRTUAL_ENV")
AGENT_PREFIXES = ("PYTHON", "UCX_", "NIXL_", "CUDA_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """How a peer's agent reaches the pool."""

    metadata: bytes
    blocks_address: int
    generations_address: int
    """0 where generations cannot be read one-sidedly."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process that stands behind the offer has ended."""


class DataPlane:
    """At most one agent process; where it cannot be had, peers are told why and use streams."""

    def __init__(
        self, transport: Transport, memory: StagingMemory, *, is_remote: bool = False, devices: str = ""
    ) -> None:
        """Prepare.

        Args:
            transport: What to use.
            memory: What to offer.
            is_remote: Whether peers on this host shall be reached as those on others are.
            devices: Network device for UCX; empty for all.
        """
        self.transport = transport
        """What is used, and why; `none` while the agent cannot be started."""
        self._chosen = transport
        self._retry_at_s = math.inf
        self._devices = "lo" if transport.name == "shm" else devices
        # A peer on this host that cannot map the memory, from another container say, still shares it through UCX.
        self._tls = transport.ucx_tls if is_remote else f"{transport.ucx_tls},shm,self"
        self._memory = memory
        self._offer: Offer | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the agent if a transport is chosen; without one the service goes on, by streams."""
        if self.transport.name != "none":
            with contextlib.suppress(UnsupportedError):
                await self.offer()
        logger.info("one-sided transfers: %s, since %s", self.transport.name, self.transport.reason)

    async def offer(self) -> Offer:
        """Return how to reach the agent, which is started if there is none.

        Raises:
            UnsupportedError: There is no way for one-sided transfers; the message says why.
        """
        async with self._starting:
            if self.transport.name == "none" and time.monotonic() < self._retry_at_s:
                raise UnsupportedError(f"transport: expected one for one-sided transfers: {self.transport.reason}")
            if self._offer is None:
                try:
                    self._offer = await self._launch()
                except (PeerUnavailableError, UnsupportedError) as error:
                    is_final = isinstance(error, UnsupportedError)
                    self._retry_at_s = math.inf if is_final else time.monotonic() + RETRY_S
                    self.transport = Transport(name="none", reason=f"{self._chosen.name} cannot be used: {error}")
                    logger.warning("one-sided transfers: none from now on, since %s", self.transport.reason)
                    raise UnsupportedError(str(error)) from error
                self.transport = self._chosen
            return self._offer

    async def stop(self) -> None:
        """End the agent."""
        if self._watch is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._watch

    async def _launch(self) -> Offer:
        fds = (self._memory.blocks_fd, self._memory.generations_fd)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "oasiskv.services.staging.agent",
            f"--blocks-fd={fds[0]}",
            f"--generations-fd={fds[1]}",
            f"--devices={self._devices}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
            env=_agent_environment() | {"UCX_TLS": self._tls},
            limit=2**20,
        )
        assert process.stdout is not None
        answer: dict[str, Any] = {}
        reason = "the agent ended without a word; its log says more"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            answer = json.loads(line) if line else {}
        except TimeoutError:
            reason = f"the agent did not start within {START_TIMEOUT_S:.0f} s"
        except BaseException:
            process.kill()
            raise
        if "metadata" not in answer:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if "error" in answer:
                raise UnsupportedError(str(answer["error"]))
            raise PeerUnavailableError(f"{reason}; another try is made after {RETRY_S:.0f} s")
        offer = Offer(
            metadata=bytes.fromhex(answer["metadata"]),
            blocks_address=answer["blocks_address"],
            generations_address=answer["generations_address"],
        )
        self._process = process
        self._watch = asyncio.create_task(self._wait(process, offer))
        return offer

    async def _wait(self, process: asyncio.subprocess.Process, offer: Offer) -> None:
        code = await process.wait()
        logger.info("the agent of one-sided transfers ended with %d", code)
        self._offer = None
        offer.ended.set()


def _agent_environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name in AGENT_VARIABLES or name.startswith(AGENT_PREFIXES)
    }


async def until_ended(offer: Offer) -> None:
    """Return never; raise when the agent ends.

    Raises:
        PeerUnavailableError: It has ended.
    """
    await offer.ended.wait()
    raise PeerUnavailableError("the agent of one-sided transfers ended; transfers may have been carried out in part")
