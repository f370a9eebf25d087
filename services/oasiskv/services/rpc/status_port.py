"""The plain HTTP port of a process: probes for whoever shows no certificate, and Prometheus metrics."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from oasiskv.core.errors import ConfigError

ANSWER_TIMEOUT_S = 5.0
"""An event loop that says nothing for so long is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a process is."""

    is_alive: bool
    """Whether there is a point in keeping it."""
    is_ready: bool
    """Whether new work is welcome."""
    facts: Mapping[str, Any]
    """What else `/readyz` tells, as JSON has it."""


class StatusPort:
    """A thread that answers `/livez`, `/readyz` and `/metrics`; `close` ends it.

    Args:
        address: `host:port`, port 0 for a free one.
        registry: What `/metrics` shows.
        status: Called in the event loop that this was made in.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, address: str, registry: CollectorRegistry, status: Callable[[], Status]) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        self._status = status
        self._metrics = make_wsgi_app(registry)
        host, _, port = address.rpartition(":")
        try:
            family = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", int(port), type=socket.SOCK_STREAM)[0][0]
            kind = _Server6 if family == socket.AF_INET6 else _Server
            self._server = make_server(host.strip("[]"), int(port), self._answer, kind, _Handler)
        except (OSError, ValueError, OverflowError) as cause:
            raise ConfigError(f"metrics_address: expected host:port that is free, got {address!r}: {cause}") from cause
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="oasiskv-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environment: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == "/metrics":
            shown: Iterable[bytes] = self._metrics(environment, respond)
            return shown
        if path not in ("/livez", "/readyz"):
            respond("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected /livez, /readyz or /metrics\n"]
        is_right, body = self._probe(path)
        respond("200 OK" if is_right else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [json.dumps(body).encode() + b"\n"]

    def _probe(self, path: str) -> tuple[bool, dict[str, Any]]:
        try:
            status = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(ANSWER_TIMEOUT_S)
        except (RuntimeError, TimeoutError):  # the loop is closed, or stuck
            return False, {"is_ready": False, "reasons": [f"process: it did not answer within {ANSWER_TIMEOUT_S} s"]}
        is_right = status.is_alive if path == "/livez" else status.is_alive and status.is_ready
        return is_right, {"is_alive": status.is_alive, "is_ready": status.is_ready, **status.facts}

    async def _read(self) -> Status:
        return self._status()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 30
    """Of a client that says nothing, in seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of every probe."""
