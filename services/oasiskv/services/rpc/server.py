"""A gRPC server with health, reflection and the edge around every call; each service adds its servicer to one."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from oasiskv.core.errors import ConfigError
from oasiskv.core.service_config import TlsConfig
from oasiskv.services.rpc.interceptor import EdgeInterceptor
from oasiskv.services.rpc.metrics import ServerMetrics
from oasiskv.services.rpc.status_port import Status
from oasiskv.services.rpc.tls import server_credentials

logger = logging.getLogger(__name__)

# Room for the fields of a message beside its largest bytes field.
MESSAGE_OVERHEAD_BYTES = 64 * 2**10
DEFAULT_MESSAGE_BYTES = 4 * 2**20
KEEPALIVE_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a server listens, and what it grants a call."""

    address: str
    """`host:port`, port 0 for a free one."""

    tls: TlsConfig | None = None
    """Mutual TLS; None to speak in the clear, for one host or a network that encrypts."""

    max_call_s: float = 30.0
    """Longest call in seconds, whatever its caller's deadline; what a stalled peer can hold."""

    max_calls: int = 4096
    """Calls and streams that are answered at a time, of all callers; each takes some 15 KiB. Further ones fail."""

    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    """Largest message in either direction."""

    metrics_address: str = ""
    """`host:port` of probes and Prometheus metrics over plain HTTP, port 0 for a free one; empty for none."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        if ":" not in self.address:
            raise ConfigError(f"address: expected host:port, got {self.address!r}")
        if not self.max_call_s > 0:
            raise ConfigError(f"max_call_s: expected a positive number, got {self.max_call_s}")
        if isinstance(self.max_calls, bool) or not isinstance(self.max_calls, int) or self.max_calls <= 0:
            raise ConfigError(f"max_calls: expected a positive number, got {self.max_calls!r}")
        if self.max_message_bytes < DEFAULT_MESSAGE_BYTES:
            raise ConfigError(
                f"max_message_bytes: expected at least {DEFAULT_MESSAGE_BYTES}, got {self.max_message_bytes}"
            )


class _Symbols:
    """What reflection knows: protobuf's pool, in which methods are found too, as `grpcurl describe` and `ghz` ask."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Return the file of a message, a service or a method; raises KeyError if there is none."""
        service_name, _, method = symbol.rpartition(".")
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service = self._pool.FindServiceByName(service_name)
            if method not in service.methods_by_name:
                raise
            return service.file


class RpcServer:
    """A running server; made by `start`, ended by `stop`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        checks: health.HealthServicer,
        names: tuple[str, ...],
        metrics: ServerMetrics,
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.port = port
        """The TCP port that it listens on."""
        self.metrics = metrics
        """What is counted, and the port that shows it."""
        self._server = server
        self._health = checks
        self._names = names
        self._facts = facts
        self._is_serving = True

    @classmethod
    async def start(
        cls,
        config: ServerConfig,
        add_services: Callable[[grpc.aio.Server], None],
        service_names: tuple[str, ...],
        unlimited: frozenset[str] = frozenset(),
        metrics: ServerMetrics | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> "RpcServer":
        """Listen and answer; the health of all services is SERVING from here on.

        Args:
            config: Where and how.
            add_services: Registers the servicers.
            service_names: Full names of the services, for health and reflection.
            unlimited: Methods without a time limit, `/package.Service/Method`.
            metrics: Where calls are counted; the server closes it at its end. One that listens already keeps its port.
            facts: What `/readyz` tells beside whether the server serves.

        Raises:
            ConfigError: An address cannot be listened on, or the certificates are not usable.
        """
        metrics = metrics or ServerMetrics()
        server = grpc.aio.server(
            maximum_concurrent_rpcs=config.max_calls,
            interceptors=(EdgeInterceptor(config.max_call_s, unlimited, metrics),),
            options=(
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                # Two processes on one port would each get a part of the calls.
                ("grpc.so_reuseport", 0),
                # A peer whose host or network is gone says no farewell, and a stream of it would stay open.
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
            ),
        )
        add_services(server)
        checks = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = ("", health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, *service_names)
        reflection.enable_server_reflection((*names[1:], reflection.SERVICE_NAME), server, _Symbols())
        try:
            if config.tls is None:
                port = server.add_insecure_port(config.address)
            else:
                port = server.add_secure_port(config.address, server_credentials(config.tls))
        except RuntimeError as cause:
            raise ConfigError(f"address: expected one that is free, got {config.address!r}") from cause
        started = cls(server, port, checks, names, metrics, facts)
        if config.metrics_address and metrics.port is None:
            metrics.listen(config.metrics_address, started._status)
            logger.info("metrics are at port %d", metrics.port)
        await server.start()
        await started.set_serving(True)
        return started

    async def set_serving(self, is_serving: bool) -> None:
        """Say to health checks whether new work is welcome; calls are answered either way."""
        self._is_serving = is_serving
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let those under way end for `grace_s` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        # In a thread: a scrape under way waits for this loop.
        await asyncio.to_thread(self.metrics.close)

    def _status(self) -> Status:
        return Status(is_alive=True, is_ready=self._is_serving, facts=self._facts())

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()
