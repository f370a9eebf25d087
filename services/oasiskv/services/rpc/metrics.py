"""Prometheus metrics of a process: what is counted of every call, and what its collectors show."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from oasiskv.services.rpc.status_port import Status, StatusPort

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0)
READ_TIMEOUT_S = 5.0


class LoopCollector(Collector):
    """Reads a service when it is asked, in the event loop that made it: a stuck one shows as a failed scrape."""

    def __init__(self) -> None:
        """Be made in the event loop of the service."""
        self._loop = asyncio.get_running_loop()

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry would otherwise collect at once, from the loop itself."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as they are now."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(READ_TIMEOUT_S)

    @abstractmethod
    async def _read(self) -> list[Metric]:
        """Return all metrics; in the event loop."""


class ServerMetrics:
    """The registry of one process; `listen` shows it over HTTP, `close` ends that."""

    def __init__(self, collectors: Iterable[Collector] = ()) -> None:
        """Count calls, and show what the collectors give; they are asked from a thread of their own."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._calls = Counter(
            "oasiskv_rpc_calls", "Calls that ended, by error class", ["method", "result"], registry=self._registry
        )
        self._seconds = Histogram(
            "oasiskv_rpc_seconds", "Time of a call", ["method"], registry=self._registry, buckets=SECONDS
        )
        self._by_result: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._port: StatusPort | None = None
        for collector in collectors:
            self.show(collector)

    def show(self, collector: Collector) -> None:
        """Show what a collector gives, too."""
        self._registry.register(collector)

    def count(self, method: str, result: str, seconds: float) -> None:
        """Count a call of `/package.Service/Method`; the result is `ok`, `cancelled` or the name of an error class."""
        found = self._by_result.get((method, result))
        if found is None:  # looking them up by their labels takes longer than counting
            name = method.rpartition("/")[2]
            found = (self._calls.labels(name, result), self._seconds.labels(name))
            self._by_result[method, result] = found
        found[0].inc()
        found[1].observe(seconds)

    def listen(self, address: str, status: Callable[[], Status]) -> None:
        """Answer HTTP at `host:port`; see `StatusPort`.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        self._port = StatusPort(address, self._registry, status)

    @property
    def port(self) -> int | None:
        """The port of `/metrics`; None if there is none."""
        return self._port.port if self._port else None

    def close(self) -> None:
        """Close the HTTP port."""
        if self._port is not None:
            self._port.close()
            self._port = None
