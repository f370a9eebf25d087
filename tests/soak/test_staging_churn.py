"""Peers that come, stage, read, hand over and vanish without a word, for minutes: the service keeps nothing of them."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import psutil
import pytest

from oasiskv.core.errors import BlockNotFoundError, LeaseExpiredError, PoolExhaustedError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.testing import Peer, Server, disk_table, random_blocks, running, until

HALF_S = 120
MAX_GROWTH_BYTES = 8 * 2**20
"""Room for the log of events, which is bounded and fills within the first minutes, and for what malloc keeps."""
LEASES = "[leases]\nmax_ttl_s = 0.5\npeer_ttl_s = 2.0\n"


async def visit(server: Server, chance: random.Random) -> None:
    """Be one peer for a few blocks, and give back what one may give back or not."""
    async with StagingClient(server.address) as client:
        user = await Peer.register(client)
        names = [b"%d" % chance.randrange(200) for _ in range(3)]
        content = random_blocks(chance.randrange(2**31), *dict.fromkeys(names))
        with contextlib.suppress(BlockNotFoundError, LeaseExpiredError, PoolExhaustedError):
            lease_id = await user.stage(content)
            if chance.random() < 0.3:
                await client.call(
                    client.stub.Handoff, pb.HandoffRequest(peer_id=user.peer_id, lease_id=lease_id, ttl_ms=200)
                )
            lease = await user.lease(*content)
            async for _ in client.get(user.peer_id, lease.lease_id, [pb.PartRange(num_parts=1)]):
                break
        if chance.random() < 0.7:
            await user.release()


@pytest.mark.timeout(900)
def test_minutes_of_peers_that_vanish_cost_no_memory_no_file_and_no_thread(tmp_path: Path) -> None:
    async def visits(server: Server, number: int, end_s: float) -> int:
        chance, num_visits = random.Random(number), 0
        while time.monotonic() < end_s:
            await visit(server, chance)
            num_visits += 1
        return num_visits

    async def half(server: Server) -> int:
        end_s = time.monotonic() + HALF_S
        return sum(await asyncio.gather(*(visits(server, number, end_s) for number in range(4))))

    async def is_empty(server: Server) -> bool:
        async with StagingClient(server.address) as client:
            stats = await client.call(client.stub.Stats, pb.StatsRequest())
        return bool(stats.num_peers == stats.num_leases == 0 and stats.num_free_blocks == stats.num_blocks)

    with running(tmp_path, "is_strict = true", LEASES + disk_table(tmp_path, 32)) as server:
        process, found = psutil.Process(server.process.pid), []
        for _ in range(2):
            num_visits = asyncio.run(half(server))
            asyncio.run(until(lambda: is_empty(server)))
            found.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
            print(f"{num_visits} visits, then resident bytes, open files and threads: {found[-1]}")
        (before, num_files, num_threads), (after, *others) = found
        assert after < before + MAX_GROWTH_BYTES
        assert others[0] <= num_files + 2
        assert others[1] <= num_threads + 4
