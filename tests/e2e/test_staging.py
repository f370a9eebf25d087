"""The staging service and its clients, each a process of its own."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from oasiskv.core.errors import (
    BlockNotFoundError,
    CorruptBlockError,
    InvalidRequestError,
    LeaseExpiredError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import MappedPool, StagingClient
from oasiskv.services.testing import (
    FINGERPRINT,
    NUM_BLOCKS,
    NUM_PARTS,
    PART_BYTES,
    Server,
    peer,
    random_blocks,
    running,
    until,
)

DYING_WRITER = """
import asyncio, sys, time
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import MappedPool, StagingClient

async def main(address):
    async with StagingClient(address) as client:
        fingerprint = pb.Fingerprint.FromString(bytes.fromhex(sys.argv[2]))
        request = pb.RegisterPeerRequest(fingerprint=fingerprint, name="dying", access=pb.ACCESS_MAP_WRITE)
        registered = await client.call(client.stub.RegisterPeer, request)
        pool = MappedPool(registered.peer_id, registered)
        request = pb.AllocateRequest(peer_id=registered.peer_id, num_blocks=5, ttl_ms=int(sys.argv[3]))
        lease = await client.call(client.stub.Allocate, request)
        pool.parts[list(lease.block_ids)] = 7
        print("written", flush=True)
        time.sleep(600)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("staging")
    with running(folder, f'memory_socket = "{folder}/memory.sock"') as server:
        yield server
        assert server.end(signal.SIGTERM) == 0, "it drained, and every lease had ended"
        assert not (folder / "memory.sock").exists()


def test_what_one_process_streams_in_another_reads_bit_for_bit(server: Server) -> None:
    async def scenario() -> None:
        content = random_blocks(1, b"s0", b"s1", b"s2")
        async with peer(server) as writer:
            await writer.release(await writer.stage(content))
            async with peer(server) as reader:
                lease = await reader.lease(b"s0", b"s1", b"s2", b"absent")
                assert lease.num_blocks == 3
                np.testing.assert_array_equal(await reader.read(lease.lease_id, 3), np.stack([*content.values()]))

    asyncio.run(scenario())


def test_what_one_process_writes_to_memory_another_reads_from_memory(server: Server) -> None:
    async def scenario() -> None:
        content = random_blocks(2, b"m0", b"m1")
        async with peer(server, pb.ACCESS_MAP_WRITE) as writer, peer(server, pb.ACCESS_MAP_READ) as reader:
            pools = [MappedPool(one.peer_id, one.registered) for one in (writer, reader)]
            lease = await writer.allocate(2)
            assert not pools[0].parts[list(lease.block_ids)].any(), "blocks are given out wiped"
            pools[0].parts[list(lease.block_ids)] = np.stack([*content.values()])
            await writer.seal(lease.lease_id, content)
            found = await reader.describe((await reader.lease(b"m0", b"m1")).lease_id)
            for block, data in zip(found, content.values(), strict=True):
                np.testing.assert_array_equal(pools[1].read(block), data)
            assert not pools[1].parts.flags.writeable
            for pool in pools:
                pool.close()

    asyncio.run(scenario())


def test_a_block_that_got_other_content_is_not_read_as_the_old_one(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server, pb.ACCESS_MAP_READ) as reader, peer(server) as writer:
            pool = MappedPool(reader.peer_id, reader.registered)
            first = await writer.stage(random_blocks(3, b"old"))
            (block,) = await writer.describe(first)
            await writer.release(first)
            await writer.allocate(NUM_BLOCKS)  # evicts everything
            with pytest.raises(LeaseExpiredError, match="generation"):
                pool.read(block)
            assert not pool.parts.any(), "what was evicted is wiped before another gets it"
            with pytest.raises(BlockNotFoundError):
                await reader.lease(b"old")
            pool.close()

    asyncio.run(scenario())


def test_bytes_that_changed_after_sealing_are_found_and_dropped(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server, pb.ACCESS_MAP_WRITE) as broken:
            pool = MappedPool(broken.peer_id, broken.registered)
            lease_id = await broken.stage(random_blocks(4, b"c0", b"c1"))
            good, bad = await broken.describe(lease_id)
            pool.parts[bad.block_id, 1, 5] ^= 1
            pool.read(good)
            with pytest.raises(CorruptBlockError):
                pool.read(bad)
            before = (await broken.stats()).num_corrupt_blocks_total
            with pytest.raises(CorruptBlockError, match="part 1 of block 1"):
                await broken.read(lease_id, 2)
            assert (await broken.stats()).num_corrupt_blocks_total == before + 1
            assert (await broken.lease(b"c0", b"c1")).num_blocks == 1, "nobody is sent to the broken block again"
            with pytest.raises(CorruptBlockError, match="block 1 was found"):
                await broken.describe(lease_id)
            pool.close()

    asyncio.run(scenario())


def test_bytes_that_differ_from_their_checksum_are_not_sealed(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as writer:
            content = random_blocks(5, b"t0", b"t1")
            lease = await writer.allocate(2)
            parts = [(0, part, content[b"t0"][part].tobytes()) for part in range(NUM_PARTS)]
            await writer.client.put(writer.peer_id, lease.lease_id, parts)
            with pytest.raises(CorruptBlockError, match="block 1"):
                await writer.seal(lease.lease_id, content)
            with pytest.raises(BlockNotFoundError):
                await writer.lease(b"t0")

    asyncio.run(scenario())


def test_a_part_that_arrives_broken_is_not_written(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as writer:
            lease = await writer.allocate(1)
            broken = pb.PutRequest(peer_id=writer.peer_id, lease_id=lease.lease_id, data=b"x" * PART_BYTES, checksum=1)
            with pytest.raises(CorruptBlockError, match="part 0 of block 0 arrived"):
                await writer.client.call(writer.client.stub.Put, iter([broken]))
            empty = {b"e0": np.zeros((NUM_PARTS, PART_BYTES), np.uint8)}
            await writer.seal(lease.lease_id, empty)  # which verifies that the block still is all 0

    asyncio.run(scenario())


def test_a_writer_that_is_killed_gives_its_blocks_back_after_its_lease(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as watcher:
            before = await watcher.stats()
            command = [sys.executable, "-c", DYING_WRITER, server.address, FINGERPRINT.SerializeToString().hex()]
            with subprocess.Popen([*command, "500"], stdout=subprocess.PIPE, text=True) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "written\n"

                async def is_fenced() -> bool:
                    return (await watcher.stats()).num_fenced_blocks == 5

                await until(is_fenced)
                with pytest.raises(PoolExhaustedError):  # alive, so it might still write
                    await watcher.allocate(NUM_BLOCKS)
                writer.kill()
                writer.wait()

            async def is_free() -> bool:
                stats = await watcher.stats()
                return (stats.num_free_blocks, stats.num_leases) == (before.num_free_blocks, before.num_leases)

            await until(is_free)
            async with peer(server, pb.ACCESS_MAP_READ) as reader:
                pool = MappedPool(reader.peer_id, reader.registered)
                await watcher.allocate(NUM_BLOCKS)
                assert not pool.parts.any(), "what the dead one wrote is wiped"
                pool.close()

    asyncio.run(scenario())


def test_a_handle_passes_a_prompt_to_another_process(server: Server) -> None:
    async def scenario() -> None:
        content = random_blocks(6, b"h0", b"h1")
        async with peer(server) as prefill, peer(server) as decode:
            lease_id = await prefill.stage(content)
            offer = pb.HandoffRequest(peer_id=prefill.peer_id, lease_id=lease_id, ttl_ms=10_000)
            handle = (await prefill.client.call(prefill.client.stub.Handoff, offer)).handle
            with pytest.raises(LeaseExpiredError):
                await prefill.describe(lease_id)
            take = pb.LeaseRequest(peer_id=decode.peer_id, handle=handle, ttl_ms=10_000)
            lease = await decode.client.call(decode.client.stub.Lease, take)
            decode.leases.append(lease.lease_id)
            np.testing.assert_array_equal(await decode.read(lease.lease_id, 2), np.stack([*content.values()]))
            with pytest.raises(LeaseExpiredError, match="handle"):
                await decode.client.call(decode.client.stub.Lease, take)

    asyncio.run(scenario())


def test_a_watcher_learns_what_is_sealed_and_evicted(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as writer:
            held: set[bytes] = set()
            stream = writer.client.stub.Watch(pb.WatchRequest())

            async def follow() -> None:
                async for change in stream:
                    held.difference_update(held if change.is_snapshot_start else change.removed_keys)
                    held.update(change.sealed_keys)

            following = asyncio.create_task(follow())

            async def has_key() -> bool:
                return b"w0" in held

            async def lacks_key() -> bool:
                return b"w0" not in held

            lease_id = await writer.stage(random_blocks(7, b"w0"))
            await until(has_key)
            await writer.release(lease_id)
            await writer.allocate(NUM_BLOCKS)
            await until(lacks_key)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "name", ["model_hash", "dtype", "block_size", "num_layers", "tp_size", "layout", "kv_revision"]
)
def test_a_peer_with_other_kv_is_refused_by_the_name_of_the_field(server: Server, name: str) -> None:
    async def scenario() -> None:
        other = pb.Fingerprint.FromString(FINGERPRINT.SerializeToString())
        setattr(other, name, {"dtype": "bfloat16"}.get(name, 2 if name != "model_hash" and name != "layout" else "x"))
        async with StagingClient(server.address) as client:
            request = pb.RegisterPeerRequest(fingerprint=other, name="other", access=pb.ACCESS_STREAM)
            with pytest.raises(UnsupportedError, match=rf"^{name}: expected"):
                await client.call(client.stub.RegisterPeer, request)

    asyncio.run(scenario())


def test_health_and_reflection_answer(server: Server) -> None:
    async def scenario() -> None:
        async with StagingClient(server.address) as client:
            health = health_pb2_grpc.HealthStub(client.channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="oasiskv.staging.v1.Staging"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            names = [
                one.name
                async for found in stub.ServerReflectionInfo(iter([asked]))
                for one in found.list_services_response.service
            ]
            assert "oasiskv.staging.v1.Staging" in names
            # By a method as well, as `grpcurl describe` and `ghz` ask; what there is none of is not found.
            for symbol, is_there in (("Staging", True), ("Staging.Drain", True), ("Staging.Drown", False), ("", False)):
                asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"oasiskv.staging.v1.{symbol}")
                answers = [one async for one in stub.ServerReflectionInfo(iter([asked]))]
                assert [one.HasField("file_descriptor_response") for one in answers] == [is_there]

    asyncio.run(scenario())


def test_a_strict_service_hands_no_memory_over_and_drains_on_sigterm(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        async with StagingClient(server.address) as client:
            request = pb.RegisterPeerRequest(fingerprint=FINGERPRINT, name="test", access=pb.ACCESS_MAP_READ)
            with pytest.raises(UnsupportedError, match=r"^access"):
                await client.call(client.stub.RegisterPeer, request)
        async with peer(server) as user:
            assert user.registered.memory_socket == ""
            content = random_blocks(8, b"d0")
            lease_id = await user.stage(content)
            server.process.send_signal(signal.SIGTERM)

            async def is_draining() -> bool:
                return (await user.stats()).is_draining

            await until(is_draining)
            with pytest.raises(PeerUnavailableError, match="drains"):
                await user.allocate(1)
            np.testing.assert_array_equal((await user.read(lease_id, 1))[0], content[b"d0"])
        assert server.process.wait(timeout=30) == 0

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario(server))
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_a_service_that_was_killed_starts_again_over_what_it_left(tmp_path: Path) -> None:
    async def use(server: Server) -> str:
        async with peer(server, pb.ACCESS_MAP_READ) as user:
            stats = await user.stats()
            assert stats.num_free_blocks == NUM_BLOCKS
            assert stats.num_cached_blocks == 0
            await user.stage(random_blocks(9, b"k0"))
            MappedPool(user.peer_id, user.registered).close()
            return user.registered.epoch

    epochs = set()
    for _ in range(2):
        with running(tmp_path, f'memory_socket = "{tmp_path}/memory.sock"') as server:
            epochs.add(asyncio.run(use(server)))
        assert (tmp_path / "memory.sock").exists()
    assert len(epochs) == 2


def test_a_wrong_field_is_named_and_changes_nothing(server: Server) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            lease = await user.allocate(1)
            before = await user.stats()
            bad_key = pb.SealedBlock(block_index=0, block_key=b"", checksums=[0] * NUM_PARTS)
            no_sums = pb.SealedBlock(block_index=0, block_key=b"k")
            for request, name in (
                (pb.SealRequest(peer_id=user.peer_id, lease_id=lease.lease_id, blocks=[bad_key]), "block_key"),
                (pb.SealRequest(peer_id=user.peer_id, lease_id=lease.lease_id, blocks=[no_sums]), "checksums"),
            ):
                with pytest.raises(InvalidRequestError, match=rf"^{name}"):
                    await user.client.call(user.client.stub.Seal, request)
            with pytest.raises(InvalidRequestError, match=r"^data"):
                await user.client.put(user.peer_id, lease.lease_id, [(0, 0, b"short")])
            with pytest.raises(InvalidRequestError, match=r"^part"):
                await user.client.put(user.peer_id, lease.lease_id, [(0, NUM_PARTS, bytes(PART_BYTES))])
            assert await user.stats() == before

    asyncio.run(scenario())
