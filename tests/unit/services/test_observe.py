"""What a server shows of its calls: metrics over HTTP, and spans below those of the caller."""

import asyncio
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from oasiskv.core.errors import ConfigError, PoolExhaustedError, UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.fabric import Transport
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.metrics import StagingCollector
from oasiskv.services.staging.service import StagingService
from oasiskv.services.tracing import TRACER, context_metadata, start_tracing

CALL, STREAM = "/toy.Toy/Call", "/toy.Toy/Stream"


class ToyServicer(grpc.GenericRpcHandler):
    """Answers in bytes; the request says what shall happen."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == CALL:
            return grpc.unary_unary_rpc_method_handler(self.call)
        return grpc.unary_stream_rpc_method_handler(self.stream) if details.method == STREAM else None

    async def call(self, request: bytes, context: Any) -> bytes:
        with TRACER.start_as_current_span("inner"):
            if request == b"refuse":
                raise PoolExhaustedError("num_blocks: expected at most 3, got 4")
            if request == b"bug":
                raise KeyError(request)
            if request == b"sleep":
                await asyncio.sleep(60)
            return request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await self.call(request, context)
        await self.call(b"refuse", context)


async def start(metrics_address: str = "127.0.0.1:0") -> RpcServer:
    config = ServerConfig(address="127.0.0.1:0", max_call_s=0.3, metrics_address=metrics_address)
    return await RpcServer.start(config, lambda server: server.add_generic_rpc_handlers((ToyServicer(),)), ("toy.Toy",))


async def ask(server: RpcServer, kind: str, method: str, request: bytes) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer: Any = getattr(channel, kind)(method)(request, timeout=20, metadata=context_metadata())
        try:
            if kind == "unary_stream":
                async for _ in answer:
                    pass
            else:
                await answer
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise


def read(port: int | None) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_calls_are_counted_by_the_error_that_the_caller_was_told() -> None:
    async def scenario() -> dict[str, float]:
        server = await start()
        for request in (b"echo", b"echo", b"refuse", b"bug", b"sleep"):
            await ask(server, "unary_unary", CALL, request)
        await ask(server, "unary_stream", STREAM, b"echo")
        found = await asyncio.to_thread(read, server.metrics.port)
        await server.stop(0)
        return found

    found = asyncio.run(scenario())
    calls = {name: value for name, value in found.items() if name.startswith("oasiskv_rpc_calls_total")}
    assert calls == {
        "oasiskv_rpc_calls_total/Call/ok": 2,
        "oasiskv_rpc_calls_total/Call/PoolExhaustedError": 1,
        "oasiskv_rpc_calls_total/Call/INTERNAL": 1,
        "oasiskv_rpc_calls_total/Call/TransferTimeoutError": 1,
        "oasiskv_rpc_calls_total/Stream/PoolExhaustedError": 1,
    }
    assert found["oasiskv_rpc_seconds_count/Call"] == 5
    assert found["process_resident_memory_bytes"] > 0


def test_a_metrics_port_that_is_taken_is_refused_at_the_start_and_free_after_the_end() -> None:
    async def scenario() -> None:
        server = await start()
        address = f"127.0.0.1:{server.metrics.port}"
        with pytest.raises(ConfigError, match="metrics_address"):
            await start(address)
        await server.stop(0)
        again = await start(address)
        await again.stop(0)

    asyncio.run(scenario())


def test_what_bytes_move_over_is_shown_with_the_reason_also_after_it_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
    memory = StagingMemory(shape, 4)

    async def fail(self: DataPlane) -> None:
        raise UnsupportedError("no device to speak of")

    async def shown(collector: StagingCollector) -> dict[str, str]:
        families = await asyncio.to_thread(lambda: list(collector.collect()))
        (info,) = [sample for family in families for sample in family.samples if sample.name == "oasiskv_staging_info"]
        return {name: value for name, value in info.labels.items() if name != "epoch"}

    async def scenario() -> None:
        limits = LeaseConfig(num_blocks=4, max_blocks_per_peer=4)
        service = StagingService(StagingConfig(fingerprint=shape, leases=limits, memory_socket="/run/s"), memory)
        data_plane = DataPlane(Transport(name="tcp", reason="no RDMA port is active"), memory)
        collector = StagingCollector(service, data_plane)
        assert await shown(collector) == {"transport": "tcp", "transport_reason": "no RDMA port is active"}
        monkeypatch.setattr(DataPlane, "_launch", fail)
        await data_plane.start()
        reason = "tcp cannot be used: no device to speak of"
        assert await shown(collector) == {"transport": "none", "transport_reason": reason}
        assert reason in caplog.text

    try:
        asyncio.run(scenario())
    finally:
        memory.close()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # which can be done once in a process
    yield exporter
    provider.shutdown()


def test_a_call_is_a_span_below_that_of_its_caller(spans: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        server = await start("")
        assert server.metrics.port is None
        with TRACER.start_as_current_span("request"):
            await ask(server, "unary_unary", CALL, b"echo")
            await ask(server, "unary_unary", CALL, b"refuse")
            await ask(server, "unary_stream", STREAM, b"echo")
        await ask(server, "unary_unary", CALL, b"echo")
        await server.stop(0)

    asyncio.run(scenario())
    found = spans.get_finished_spans()
    (caller,) = [span for span in found if span.name == "request"]
    calls = [span for span in found if span.kind is trace.SpanKind.SERVER]
    assert [span.name for span in calls] == ["toy.Toy/Call", "toy.Toy/Call", "toy.Toy/Stream", "toy.Toy/Call"]
    assert caller.context is not None
    for span in calls[:3]:
        assert span.parent is not None
        assert span.parent.span_id == caller.context.span_id
    assert calls[3].parent is None
    assert [(span.attributes or {}).get("error.type") for span in calls] == [
        None,
        "PoolExhaustedError",
        "PoolExhaustedError",
        None,
    ]
    parents = {span.parent.span_id for span in found if span.name == "inner" and span.parent is not None}
    assert {span.context.span_id for span in calls if span.context and span.name == "toy.Toy/Call"} <= parents


def test_without_a_span_nothing_is_sent_along() -> None:
    assert context_metadata() == ()


def test_an_endpoint_without_an_exporter_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-grpc"):
        start_tracing("test")
