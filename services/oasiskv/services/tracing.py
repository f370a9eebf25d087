"""Traces across services: W3C trace context in gRPC metadata, spans where an OpenTelemetry SDK is set up.

Without one, spans are no-ops, and the context of a caller is still passed on.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace

from oasiskv.core.errors import ConfigError

TRACER = trace.get_tracer("oasiskv.services")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def context_metadata() -> tuple[tuple[str, str], ...]:
    """Return the current trace context as gRPC metadata; empty without one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


@functools.cache
def _named(method: str) -> tuple[str, Mapping[str, str]]:
    service, _, name = method.removeprefix("/").rpartition("/")
    return f"{service}/{name}", {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}


@contextmanager
def server_span(
    method: str, metadata: Iterable[tuple[str, str | bytes]] | None, is_stream: bool
) -> Iterator[trace.Span]:
    """Be in a span of a call that is being answered, below that of its caller if the metadata name one.

    Args:
        method: `/package.Service/Method`.
        metadata: What the caller sent.
        is_stream: Whether the answer is a stream. Its generator may be ended from elsewhere, where a span that was made
            current could not be left, so what it does has no spans below this one.
    """
    context = propagate.extract({key: value for key, value in metadata or () if isinstance(value, str)})
    name, attributes = _named(method)
    span = TRACER.start_span(name, context, trace.SpanKind.SERVER, attributes)
    try:
        if is_stream:
            yield span
        else:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
    finally:
        span.end()


def start_tracing(service_name: str) -> None:
    """Export spans over OTLP if the environment names an endpoint, as OpenTelemetry's specification has it.

    Raises:
        ConfigError: It does, but the SDK or the exporter is not installed.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as cause:
        raise ConfigError(
            f"{ENDPOINTS[0]}: expected opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc, got {cause}"
        ) from cause
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
