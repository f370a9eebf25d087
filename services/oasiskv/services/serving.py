"""The life of a service's process: ready while it can serve, drained at the first signal, ended at the second."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.registry import Collector

from oasiskv.core.errors import EngineFailedError
from oasiskv.services.engine_metrics import EngineCollector
from oasiskv.services.rpc.metrics import ServerMetrics
from oasiskv.services.rpc.server import RpcServer
from oasiskv.services.rpc.status_port import Status

logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
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

    @property
    def facts(self) -> Mapping[str, Any]:
        """What `/readyz` tells."""

    def drain(self) -> int:
        """Take no more requests; return how many are under way."""


class Front:
    """The metrics and probes of a process with an engine, from before that starts until the end.

    Args:
        role: `prefill` or `decode`.
        metrics_address: Where; empty for nowhere.
    """

    def __init__(self, role: str, metrics_address: str) -> None:
        """Listen."""
        self._role = role
        self._service: Service | None = None
        self.metrics = ServerMetrics((EngineCollector(),))
        """Goes to the gRPC server, which closes it."""
        if metrics_address:
            self.metrics.listen(metrics_address, self.status)
            logger.info("probes and metrics are at port %d", self.metrics.port)

    @property
    def where(self) -> str:
        """The end of the line that a process prints once it listens."""
        return "" if self.metrics.port is None else f", metrics on port {self.metrics.port}"

    def serve(self, service: Service, collector: Collector) -> None:
        """Tell of a service from now on."""
        self._service = service
        self.metrics.show(collector)

    async def close(self) -> None:
        """Close the port, if that was not done."""
        await asyncio.to_thread(self.metrics.close)  # a scrape under way waits for this loop

    def status(self) -> Status:
        """Return how the process is; while its engine loads it is alive."""
        service = self._service
        if service is None:
            facts = {"role": self._role, "reasons": ["engine: expected one that runs, got one that starts"]}
            return Status(is_alive=True, is_ready=False, facts=facts)
        return Status(is_alive=service.is_alive, is_ready=service.is_ready, facts=service.facts)


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


async def serve(service: Service, servers: Sequence[RpcServer], received: "asyncio.Queue[int]", drain_s: float) -> None:
    """Serve until a signal, then until requests have ended, `drain_s` is over, or another signal comes.

    Raises:
        EngineFailedError: The engine ended by itself.
    """
    was_ready = False
    while received.empty():
        if not service.is_alive:
            await _set_serving(servers, False)
            raise EngineFailedError("engine: its process ended; the log says why")
        if service.is_ready != was_ready:
            was_ready = not was_ready
            logger.info("ready" if was_ready else "not ready")
            await _set_serving(servers, was_ready)
        await asyncio.sleep(LOOK_S)
    received.get_nowait()
    await _set_serving(servers, False)
    logger.info("draining: %d requests are left", service.drain())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while service.drain() and received.empty() and service.is_alive:
                await asyncio.sleep(0.1)
    if num_left := service.drain():
        _say_at_the_end(f"{num_left} requests had not ended when the process did")


def _say_at_the_end(what: str) -> None:
    """Say something in the log and, in a pod, where Kubernetes takes a container's last words from."""
    logger.warning("%s", what)
    if TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(what)


async def _set_serving(servers: Sequence[RpcServer], is_serving: bool) -> None:
    for server in servers:
        await server.set_serving(is_serving)
