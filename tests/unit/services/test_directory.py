"""The directory of a service whose Redis is not there, or is something else; with Redis: e2e/test_staging_directory."""

import asyncio
import logging
import socket

import pytest

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.services.staging.changes import ChangeLog
from oasiskv.services.staging.directory import Directory, DirectoryConfig, ServiceLoad

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LOAD = ServiceLoad(num_blocks=8, num_free_blocks=7, num_leases=1, is_draining=False)


def make(port: int | None) -> Directory:
    config = None
    if port is not None:
        url = f"redis://:secret@127.0.0.1:{port}/0"
        config = DirectoryConfig(url=url, address="here:1", heartbeat_s=0.02, timeout_s=0.1)
    return Directory(config, SHAPE, "me", ChangeLog(), lambda block_key: block_key != b"absent", lambda: LOAD)


async def until_it_failed(directory: Directory, times: int) -> None:
    async with asyncio.timeout(20):
        while directory.num_failures < times:
            await asyncio.sleep(0.01)


async def check_own_knowledge(directory: Directory, is_complete: bool) -> None:
    holders, found_complete = await directory.find([b"a", b"b", b"absent", b"c"])
    (holder,) = holders
    assert (holder.service_id, holder.num_prefix_blocks, holder.load) == ("me", 2, LOAD)
    assert found_complete is is_complete
    assert (await directory.find([b"absent"]))[0] == []


def test_a_service_without_a_directory_knows_of_itself() -> None:
    async def scenario() -> None:
        directory = make(None)
        await directory.start()
        await check_own_knowledge(directory, is_complete=True)
        await directory.stop()

    asyncio.run(scenario())


def test_a_redis_that_was_never_there_is_told_once_and_needed_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        directory = make(port)
        await directory.start()
        await until_it_failed(directory, 3)
        await check_own_knowledge(directory, is_complete=False)
        await directory.stop()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert caplog.text.count("the directory is away") == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\xff" * 50, b"*-1\r\n$-1\r\n"])
def test_whatever_else_answers_at_the_port_is_as_good_as_none(answer: bytes) -> None:
    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            directory = make(server.sockets[0].getsockname()[1])
            await directory.start()
            await until_it_failed(directory, 2)
            await check_own_knowledge(directory, is_complete=False)
            await directory.stop()

    asyncio.run(scenario())


def test_a_redis_that_accepts_and_never_answers_costs_no_more_than_the_time_limit() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            directory = make(silent.getsockname()[1])
            await directory.start()
            directory.is_connected = True  # as after a good moment
            async with asyncio.timeout(10):
                await check_own_knowledge(directory, is_complete=False)
            await directory.stop()

    asyncio.run(scenario())
