"""Prometheus metrics of a server: what is counted of every call, and the HTTP port that shows it all."""

import threading
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from oasiskv.core.errors import ConfigError

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0)


class ServerMetrics:
    """The registry of one server; `listen` shows it at `/metrics`, `close` ends that."""

    def __init__(self, collectors: Iterable[Collector] = ()) -> None:
        """Count calls, and show what the collectors give; they are asked from a thread of their own."""
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._calls = Counter(
            "oasiskv_rpc_calls", "Calls that ended, by error class", ["method", "result"], registry=self._registry
        )
        self._seconds = Histogram(
            "oasiskv_rpc_seconds", "Time of a call", ["method"], registry=self._registry, buckets=SECONDS
        )
        self._by_result: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._http: tuple[WSGIServer, threading.Thread] | None = None

    def count(self, method: str, result: str, seconds: float) -> None:
        """Count a call of `/package.Service/Method`; the result is `ok`, `cancelled` or the name of an error class."""
        found = self._by_result.get((method, result))
        if found is None:  # looking them up by their labels takes longer than counting
            name = method.rpartition("/")[2]
            found = (self._calls.labels(name, result), self._seconds.labels(name))
            self._by_result[method, result] = found
        found[0].inc()
        found[1].observe(seconds)

    def listen(self, address: str) -> None:
        """Answer HTTP at `host:port`.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        try:
            self._http = start_http_server(int(port), host or "0.0.0.0", self._registry)
        except (OSError, ValueError, OverflowError) as cause:
            raise ConfigError(f"metrics_address: expected host:port that is free, got {address!r}: {cause}") from cause

    @property
    def port(self) -> int | None:
        """The port of `/metrics`; None if there is none."""
        return self._http[0].server_port if self._http else None

    def close(self) -> None:
        """Close the HTTP port."""
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            server.server_close()
            thread.join()
            self._http = None
