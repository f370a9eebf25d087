"""Keeps an engine's ways to staging open: opens a session, attaches the workers, and does it again after a restart."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from oasiskv.core.errors import OasisError, PeerUnavailableError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.blocks import MAKER, arguments
from oasiskv.services.clients.session import SessionConfig, StagingSession
from oasiskv.services.clients.staging import StagingClient

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the service."""

Attach = Callable[[str, dict[str, Any]], Awaitable[None]]


class StagingLink:
    """The link of one engine; `run` holds it until cancelled.

    Args:
        config: Where, and as whom.
        attach: `attach_staging` of the engine.
    """

    def __init__(self, config: SessionConfig, attach: Attach) -> None:
        # Workers share the peer, so it is replaced here, with the workers told.
        self._config = replace(config, reconnects=False)
        self._attach = attach
        self._session: StagingSession | None = None
        self._epoch = ""
        self._answers = False
        self._client: StagingClient | None = None

    @property
    def is_up(self) -> bool:
        """Whether the service answered at the last look, and the workers are attached to it."""
        return self._session is not None and self._answers

    @property
    def session(self) -> StagingSession:
        """The session.

        Raises:
            PeerUnavailableError: The service does not answer.
        """
        if self._session is None:
            raise PeerUnavailableError(f"staging: expected an answer at {self._config.address}, got none")
        return self._session

    @property
    def way(self) -> tuple[str, str]:
        """How bytes move, as `StagingSession.path`, and why that; empty while there is no session."""
        return ("", "") if self._session is None else (self._session.path, self._session.path_reason)

    async def run(self) -> None:
        """Look after the link for as long as the caller lets it."""
        async with StagingClient(self._config.address, tls=self._config.tls, timeout_s=5.0) as client:
            self._client = client
            try:
                while True:
                    with contextlib.suppress(OasisError):
                        await self._look(client)
                    await asyncio.sleep(LOOK_S)
            finally:
                self._client = None
                await self._close()

    async def find(self, block_keys: Sequence[bytes]) -> pb.FindResponse:
        """Ask which staging services hold the first of some blocks.

        Raises:
            OasisError: The service does not answer.
        """
        if self._client is None:
            raise PeerUnavailableError(f"staging: expected an answer at {self._config.address}, got none")
        found: pb.FindResponse = await self._client.call(self._client.stub.Find, pb.FindRequest(block_keys=block_keys))
        return found

    async def _look(self, client: StagingClient) -> None:
        try:
            stats: pb.StatsResponse = await client.call(client.stub.Stats, pb.StatsRequest())
            self._answers = True
            if self._session is not None and stats.epoch == self._epoch:
                return
            # A service that started again knows neither the peer nor its leases.
            await self._close()
            session = await asyncio.to_thread(StagingSession, self._config)
            try:
                await self._attach(MAKER, arguments(session, self._config))
            except BaseException:
                await asyncio.to_thread(session.close)
                raise
            self._session, self._epoch = session, stats.epoch
        except OasisError as error:
            if self._answers or self._session is None:
                logger.warning("staging at %s: %s", self._config.address, error)
            self._answers = False
            # While it is away for a moment, leases and sessions outlive it; a new epoch ends them.
            if not isinstance(error, PeerUnavailableError):
                await self._close()
            raise

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await asyncio.to_thread(session.close)


class StagingLinks:
    """The links of one engine to as many staging services as are asked for, each from then on until `close`.

    Args:
        open_link: Makes the link to an address.
    """

    def __init__(self, open_link: Callable[[str], StagingLink]) -> None:
        self._open_link = open_link
        self._links: dict[str, StagingLink] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def at(self, address: str) -> StagingLink:
        """Return the link to an address, made if there is none yet."""
        if (link := self._links.get(address)) is None:
            link = self._links[address] = self._open_link(address)
            self._tasks.append(asyncio.create_task(link.run()))
        return link

    async def close(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
