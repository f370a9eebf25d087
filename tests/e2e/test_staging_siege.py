"""A staging service among callers that are many, slow, greedy or gone: it answers the others and keeps nothing."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from oasiskv.core.errors import InvalidRequestError, PoolExhaustedError, TransferTimeoutError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.testing import NUM_PARTS, Peer, Server, peer, random_blocks, running, until

MEBIBYTE = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path, f'memory_socket = "{tmp_path}/memory.sock"\ntransport = "none"') as server:
        yield server


def resident_bytes(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def num_open_files(server: Server) -> int:
    return int(psutil.Process(server.process.pid).num_fds())


def connect(server: Server) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_thousand_peers_that_vanish_keep_nobody_out(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as living:
            content = random_blocks(1, b"a", b"b")
            await living.stage(content)
            for _ in range(10):
                async with StagingClient(server.address) as client:
                    for _ in range(100):
                        await Peer.register(client)
            assert (await living.stats()).num_peers <= 256
            assert await living.check([b"a", b"b"], content) == [b"a", b"b"]
            async with peer(server) as another:
                assert await another.check([b"a"], content) == [b"a"]

    asyncio.run(scenario())


def test_connections_that_say_nothing_cost_a_descriptor_until_they_end(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as living:
            before = num_open_files(server)
            with contextlib.ExitStack() as idle:
                for _ in range(300):
                    idle.enter_context(connect(server))
                for _ in range(100):
                    link = idle.enter_context(socket.socket(socket.AF_UNIX))
                    link.settimeout(20)
                    link.connect(f"{server.folder}/memory.sock")
                assert await living.check([b"a"], {}) == []

            async def has_none() -> bool:
                return num_open_files(server) <= before + 1

            await until(has_none)

    asyncio.run(scenario())


def test_at_the_limit_of_open_files_who_is_connected_is_served_and_others_when_there_is_room(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as living:
            content = random_blocks(2, b"a")
            await living.stage(content)
            limit = num_open_files(server) + 8
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
            with contextlib.ExitStack() as idle:
                for _ in range(40):  # the kernel accepts what the service cannot yet
                    idle.enter_context(connect(server))
                assert await living.check([b"a"], content) == [b"a"]
                async with StagingClient(server.address, timeout_s=2.0, max_message_bytes=2**23) as late:
                    with pytest.raises(TransferTimeoutError):
                        await Peer.register(late)

            async def may_come() -> bool:
                try:
                    async with peer(server) as another:
                        return await another.check([b"a"], content) == [b"a"]
                except TransferTimeoutError:
                    return False

            await until(may_come)

    asyncio.run(scenario())


def test_a_message_that_is_too_large_or_grows_when_it_is_unpacked_is_refused_by_its_class(server: Server) -> None:
    async def scenario() -> None:
        async with StagingClient(server.address, max_message_bytes=2**30) as client:
            user = await Peer.register(client)
            before = resident_bytes(server)
            for num_bytes in (8 * MEBIBYTE, 40 * MEBIBYTE):
                request = pb.FindRequest(block_keys=[bytes(num_bytes)])
                for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
                    with pytest.raises(InvalidRequestError, match=r"^message: .*larger than max"):
                        await client.call(
                            lambda *given, _how=compression, **rest: client.stub.Find(*given, compression=_how, **rest),
                            request,
                        )
            assert resident_bytes(server) < before + 32 * MEBIBYTE
            assert (await user.stats()).num_peers == 1

    asyncio.run(scenario())


def test_a_list_longer_than_any_that_makes_sense_is_refused_before_anything_is_made_of_it(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            lease_id = await user.stage(random_blocks(2, b"a", b"b"))
            peer_id = user.peer_id
            stub, call = user.client.stub, user.client.call
            # Empty ones, so that their contents would be refused by another name.
            rows = pb.SealRequest(peer_id=peer_id, lease_id=lease_id, blocks=[pb.SealedBlock()] * 100_000)
            columns = pb.SealRequest(
                peer_id=peer_id, lease_id=lease_id, columns=pb.SealedColumns(block_indices=[0] * 100_000)
            )
            for request in (rows, columns):
                with pytest.raises(InvalidRequestError, match=r"^blocks: expected at most 2, got 100000"):
                    await call(stub.Seal, request)
            many = pb.FetchDescriptorsRequest(peer_id=peer_id, lease_id=lease_id, block_indices=[9] * 100_000)
            with pytest.raises(InvalidRequestError, match=r"^block_indices: expected at most 2, got 100000"):
                await call(stub.FetchDescriptors, many)
            ranges = [pb.PartRange()] * 100_000
            with pytest.raises(InvalidRequestError, match=r"^ranges: expected at most 65536, got 100000"):
                await anext(user.client.get(peer_id, lease_id, ranges))

    asyncio.run(scenario())


def test_streams_without_end_are_bounded_in_number_and_others_are_answered_after_them(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with StagingClient(server.address) as greedy, peer(server) as living:
            streams = [greedy.stub.Watch(pb.WatchRequest()) for _ in range(20)]
            for stream in streams:
                await stream.read()
            with pytest.raises(PoolExhaustedError, match="as many calls as it may"):
                await living.stats()
            streams.pop().cancel()

            async def is_answered() -> bool:
                with contextlib.suppress(PoolExhaustedError):
                    return (await living.stats()).num_peers == 1
                return False

            await until(is_answered)
            for stream in streams:
                stream.cancel()

    with running(tmp_path, "is_strict = true", "max_calls = 20") as server:
        asyncio.run(scenario(server))


def test_a_reader_that_takes_nothing_holds_its_blocks_for_the_longest_call_and_no_longer(tmp_path: Path) -> None:
    # One message of the transport's window goes out; the next waits for the reader.
    with running(tmp_path, "is_strict = true", "max_call_s = 5.0") as server:

        async def scenario() -> None:
            async with peer(server) as writer, StagingClient(server.address) as client:
                lease_id = await writer.stage(random_blocks(4, *(b"%d" % number for number in range(16))))
                slow = await Peer.register(client)
                lease = await slow.lease(*(b"%d" % number for number in range(16)), ttl_ms=1000)
                ranges = [pb.PartRange(block_index=index, num_parts=NUM_PARTS) for index in range(16)] * 2000
                request = pb.GetRequest(peer_id=slow.peer_id, lease_id=lease.lease_id, ranges=ranges)
                stream = client.stub.Get(request)
                await stream.read()
                await writer.release(lease_id)
                await asyncio.sleep(1.1)
                with pytest.raises(PoolExhaustedError):
                    await writer.allocate(1)  # the lease is over, the call is not

                async def is_free() -> bool:
                    with contextlib.suppress(PoolExhaustedError):
                        await writer.release((await writer.allocate(16)).lease_id)
                        return True
                    return False

                await until(is_free)
                stream.cancel()

        asyncio.run(scenario())


def test_a_service_that_stood_still_for_longer_than_a_lease_gives_no_wrong_byte(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            content = random_blocks(5, b"a", b"b")
            await user.stage(content)
            lease = await user.lease(b"a", b"b", ttl_ms=500)
            os.kill(server.process.pid, 19)
            await asyncio.sleep(0.7)
            os.kill(server.process.pid, 18)
            found = await user.lease(b"a", b"b")
            np.testing.assert_array_equal(await user.read(found.lease_id, 2), np.stack(list(content.values())))
            assert await user.release(lease.lease_id) == 0, "time went on while it stood still"

    asyncio.run(scenario())
