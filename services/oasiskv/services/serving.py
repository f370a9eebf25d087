"""The life of a service's process: ready while it can serve, drained at the first signal, ended at the second."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from oasiskv.core.errors import EngineFailedError
from oasiskv.services.rpc.server import RpcServer

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at whether the service is ready."""


class Service(Protocol):
    """What a process looks at."""

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken and can be served."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs; the process ends with it."""

    def drain(self) -> int:
        """Take no more requests; return how many are under way."""


def signals() -> "asyncio.Queue[int]":
    """Return a queue that gets SIGTERM and SIGINT from now on."""
    received: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received.put_nowait, number)
    return received


@contextlib.asynccontextmanager
async def cancelled(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Carry work out beside a `with` block, and cancel it at the end of that."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def serve(service: Service, server: RpcServer, received: "asyncio.Queue[int]", drain_s: float) -> None:
    """Serve until a signal, then until requests have ended, `drain_s` is over, or another signal comes.

    Raises:
        EngineFailedError: The engine ended by itself.
    """
    was_ready = False
    while received.empty():
        if not service.is_alive:
            await server.set_serving(False)
            raise EngineFailedError("engine: its process ended; the log says why")
        if service.is_ready != was_ready:
            was_ready = not was_ready
            logger.info("ready" if was_ready else "not ready")
            await server.set_serving(was_ready)
        await asyncio.sleep(LOOK_S)
    received.get_nowait()
    await server.set_serving(False)
    logger.info("draining: %d requests are left", service.drain())
    try:
        async with asyncio.timeout(drain_s):
            while service.drain() and received.empty() and service.is_alive:
                await asyncio.sleep(0.1)
    except TimeoutError:
        logger.warning("stopping with %d requests that have not ended", service.drain())
