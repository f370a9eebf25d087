import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from oasiskv.core.errors import ConfigError, PeerUnavailableError, PoolExhaustedError, TransferTimeoutError
from oasiskv.core.service_config import TlsConfig
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.rpc.status import error_of
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.rpc.tls import channel_credentials

CALL = "/toy.Toy/Call"
STREAM = "/toy.Toy/Stream"
left: list[str] = []
"""What the stream's handler left behind in its `finally`."""


class ToyServicer(grpc.GenericRpcHandler):
    """Answers in bytes; the request says what shall happen."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == CALL:
            return grpc.unary_unary_rpc_method_handler(self.call)
        return grpc.unary_stream_rpc_method_handler(self.stream) if details.method == STREAM else None

    async def call(self, request: bytes, context: Any) -> bytes:
        match request:
            case b"refuse":
                raise PoolExhaustedError("num_blocks: expected at most 3, got 4")
            case b"long":
                raise PoolExhaustedError("x" * 100_000)
            case b"bug":
                raise KeyError("a secret of the service")
            case b"sleep":
                await asyncio.sleep(60)
        return request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            while request == b"stall":
                yield bytes(2**20)
            await self.call(request, context)
            yield b"second"
        finally:
            left.append(request.decode())


async def start(tls: TlsConfig | None = None, max_call_s: float = 20.0) -> RpcServer:
    config = ServerConfig(address="127.0.0.1:0", tls=tls, max_call_s=max_call_s)
    return await RpcServer.start(config, lambda server: server.add_generic_rpc_handlers((ToyServicer(),)), ("toy.Toy",))


async def ask(server: RpcServer, request: bytes, tls: "grpc.ChannelCredentials | None" = None) -> bytes:
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.secure_channel(address, tls) if tls else grpc.aio.insecure_channel(address) as channel:
        try:
            method: Any = channel.unary_unary(CALL)
            answer: bytes = await method(request, timeout=20)
            return answer
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure


def test_an_error_arrives_with_its_class_and_message() -> None:
    async def scenario() -> None:
        server = await start()
        assert await ask(server, b"echo") == b"echo"
        with pytest.raises(PoolExhaustedError, match="num_blocks: expected at most 3, got 4"):
            await ask(server, b"refuse")
        with pytest.raises(PoolExhaustedError, match=r"^x{1024}$"):
            await ask(server, b"long")
        await server.stop(0)

    asyncio.run(scenario())


def test_a_bug_is_logged_here_and_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = await start()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(server, b"bug")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.details())
        await server.stop(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "a secret of the service" in caplog.text


def test_a_call_ends_within_the_limit_of_the_service() -> None:
    async def scenario() -> None:
        server = await start(max_call_s=0.2)
        with pytest.raises(TransferTimeoutError, match="limit of the service"):
            await ask(server, b"sleep")
        await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("request_", [b"sleep", b"refuse", b"bug", b"cancel", b"stall"])
def test_a_stream_that_ends_early_leaves_nothing_held(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = await start(max_call_s=0.3)
        left.clear()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.unary_stream(STREAM)
            stream = method(request_)
            assert await stream.read() == b"first"
            if request_ == b"cancel":
                stream.cancel()
            elif request_ != b"stall":  # whose client reads no further
                with pytest.raises(grpc.aio.AioRpcError):
                    await stream.read()
            async with asyncio.timeout(10):
                while left != [request_.decode()]:
                    await asyncio.sleep(0.01)
        await server.stop(0)

    asyncio.run(scenario())


def test_health_says_when_new_work_is_not_welcome() -> None:
    async def scenario() -> list[int]:
        server = await start()
        found = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for is_serving in (True, False):
                await server.set_serving(is_serving)
                found.append((await health.Check(health_pb2.HealthCheckRequest(service="toy.Toy"))).status)
        await server.stop(0)
        return found

    found = asyncio.run(scenario())
    assert found == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_two_servers_do_not_share_a_port() -> None:
    async def scenario() -> None:
        server = await start()
        with pytest.raises(ConfigError, match="address"):
            await RpcServer.start(ServerConfig(address=f"127.0.0.1:{server.port}"), lambda server: None, ())
        await server.stop(0)

    asyncio.run(scenario())


def test_only_who_has_a_valid_certificate_of_the_authority_is_answered(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "server", authority)
    make_certificate(tmp_path, "peer", authority)
    make_certificate(tmp_path, "expired", authority, days=-1)
    make_certificate(tmp_path, "stranger", make_certificate(tmp_path, "other"))

    async def scenario() -> None:
        server = await start(tls_files(tmp_path, "server"))
        assert await ask(server, b"echo", channel_credentials(tls_files(tmp_path, "peer"))) == b"echo"
        for name in ("expired", "stranger"):
            with pytest.raises(PeerUnavailableError):
                await ask(server, b"echo", channel_credentials(tls_files(tmp_path, name)))
        with pytest.raises(PeerUnavailableError):
            await ask(server, b"echo", grpc.ssl_channel_credentials((tmp_path / "authority.pem").read_bytes()))
        with pytest.raises(PeerUnavailableError):
            await ask(server, b"echo")
        await server.stop(0)

    asyncio.run(scenario())


def test_new_certificates_are_used_without_a_restart_and_broken_ones_are_not(tmp_path: Path) -> None:
    make_certificate(tmp_path, "server", make_certificate(tmp_path, "authority"))
    later = tmp_path / "later"
    later.mkdir()
    authority = make_certificate(later, "authority")
    make_certificate(later, "server", authority)
    make_certificate(later, "peer", authority)

    async def scenario() -> None:
        server = await start(tls_files(tmp_path, "server"))
        credentials = channel_credentials(tls_files(later, "peer"))
        with pytest.raises(PeerUnavailableError):
            await ask(server, b"echo", credentials)
        for name in ("authority.pem", "server.pem", "server.key"):
            (tmp_path / name).write_bytes((later / name).read_bytes())
        assert await ask(server, b"echo", credentials) == b"echo"
        (tmp_path / "server.key").write_text("half written")
        assert await ask(server, b"echo", channel_credentials(tls_files(later, "peer"))) == b"echo"
        await server.stop(0)

    asyncio.run(scenario())


def test_certificates_that_do_not_fit_together_are_refused_at_the_start(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "server", authority)
    make_certificate(tmp_path, "peer", authority)
    mixed = TlsConfig(
        certificate=tmp_path / "server.pem", key=tmp_path / "peer.key", authority=tmp_path / "authority.pem"
    )
    with pytest.raises(ConfigError, match=r"^tls"):
        asyncio.run(start(mixed))
    with pytest.raises(ConfigError, match=r"^tls"):
        asyncio.run(start(tls_files(tmp_path, "absent")))
