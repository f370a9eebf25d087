"""What a service holds when it is told to end goes to its successor, and its readers find it there."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import MappedPool, StagingClient
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import SHAPE
from oasiskv.services.testing import NUM_BLOCKS, Peer, Server, peer, random_blocks, running, until


def folder(place: Path, name: str) -> Path:
    made = place / name
    made.mkdir()
    return made


async def end(server: Server) -> None:
    """Send SIGTERM and wait for a good end."""
    assert await asyncio.to_thread(server.end, signal.SIGTERM) == 0


def test_what_a_service_holds_when_it_ends_is_found_at_its_successor(tmp_path: Path) -> None:
    content = random_blocks(1, *(b"%d" % number for number in range(12)))
    names = list(content)

    async def scenario(first: Server, second: Server) -> None:
        async with StagingClient(first.address) as client, peer(second) as reader:
            writer = await Peer.register(client)
            await writer.release(await writer.stage({name: content[name] for name in names[:10]}))
            await reader.release(await reader.stage({name: content[name] for name in names[8:]}))
            held = await writer.lease(*names[:3])  # is served, and handed over all the same
            ending = asyncio.create_task(end(first))

            async def has_all() -> bool:
                return all(await reader.locate(*names))

            await until(has_all)
            np.testing.assert_array_equal((await writer.read(held.lease_id, 1))[0], content[names[0]])
            assert not ending.done()
            await writer.release(held.lease_id)
            await ending
            assert await reader.check(names, content) == names
            stats = await reader.stats()
            assert (stats.num_leases, stats.num_free_blocks, stats.num_cached_blocks) == (0, NUM_BLOCKS, 12)

    with running(folder(tmp_path, "second"), "is_strict = true") as second:
        setting = f'is_strict = true\nsuccessor = "{second.address}"'
        with running(folder(tmp_path, "first"), setting) as first:
            asyncio.run(scenario(first, second))


def test_a_block_that_is_no_longer_intact_is_not_handed_over(tmp_path: Path) -> None:
    content = random_blocks(2, b"a", b"b", b"c")

    async def scenario(first: Server, second: Server) -> None:
        async with StagingClient(first.address) as client, peer(second) as reader:
            writer = await Peer.register(client, pb.ACCESS_MAP_WRITE)
            lease_id = await writer.stage(content)
            described = await writer.describe(lease_id)
            pool = await asyncio.to_thread(MappedPool, writer.peer_id, writer.registered)
            pool.parts[described[1].block_id, 2, 7] ^= 1
            pool.close()
            await writer.release(lease_id)
            await end(first)
            assert await reader.check([b"a", b"b", b"c"], content) == [b"a", b"c"]

    with running(folder(tmp_path, "second"), "is_strict = true") as second:
        place = folder(tmp_path, "first")
        setting = f'memory_socket = "{place}/memory.sock"\ntransport = "none"\nsuccessor = "{second.address}"'
        with running(place, setting) as first:
            asyncio.run(scenario(first, second))


@pytest.mark.parametrize("why", ["away", "full", "of other KV"])
def test_a_successor_that_cannot_take_it_keeps_nobody_from_ending(tmp_path: Path, why: str) -> None:
    content = random_blocks(3, *(b"%d" % number for number in range(8)))

    async def scenario(address: str, is_full: bool) -> None:
        setting = f'is_strict = true\nsuccessor = "{address}"'
        with running(folder(tmp_path, "first"), setting) as first:
            async with StagingClient(first.address) as client, StagingClient(address) as other:
                writer = await Peer.register(client)
                await writer.release(await writer.stage(content))
                if is_full:
                    reader = await Peer.register(other)
                    await reader.allocate(NUM_BLOCKS - 3)
                await end(first)
                if is_full:
                    assert (await reader.stats()).num_leases == 1

    if why == "of other KV":
        staging = {"is_strict": True, "memory_socket": ""}
        with StagingProcess(folder(tmp_path, "second"), SHAPE, 16, staging=staging) as stranger:
            asyncio.run(scenario(stranger.address, is_full=False))
        return
    with running(folder(tmp_path, "second"), "is_strict = true") as second:
        if why == "away":
            second.end(signal.SIGKILL)
        asyncio.run(scenario(second.address, why == "full"))
