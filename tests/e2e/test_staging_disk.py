"""The disk tier of a staging process: it outlives the process, however that ends."""

import asyncio
import os
import signal
import socket
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from oasiskv.core.errors import BlockNotFoundError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.testing import (
    NUM_BLOCKS,
    NUM_PARTS,
    PART_BYTES,
    disk_table,
    kill_while_writing,
    peer,
    random_blocks,
    running,
    until,
)

KEYS = [f"d{number}".encode() for number in range(8)]
CONTENT = random_blocks(11, *KEYS)


@pytest.mark.timeout(240)
def test_a_service_that_is_killed_while_it_writes_finds_its_intact_blocks_again(tmp_path: Path) -> None:
    found = kill_while_writing(tmp_path, num_rounds=6, seed=1)
    print(f"blocks found after each start: {found}")
    assert max(found) > 0


def test_prefix_blocks_that_left_memory_come_back_and_outlive_a_restart(tmp_path: Path) -> None:
    async def fill() -> None:
        async with peer(server) as user:
            await user.release(await user.stage(CONTENT))

            async def is_on_disk() -> bool:
                return (await user.stats()).num_held_disk_blocks == len(KEYS)

            await until(is_on_disk)
            await user.release((await user.allocate(NUM_BLOCKS)).lease_id)
            assert await user.locate(*KEYS, b"absent") == [pb.TIER_DISK] * 8 + [pb.TIER_UNSPECIFIED]
            await read_all()

    async def read_all() -> None:
        async with peer(server) as user:
            lease = await user.lease(*KEYS, b"absent", min_blocks=8)
            assert lease.num_blocks == 8
            assert list(lease.block_statuses) == [pb.BLOCK_STATUS_INTACT] * 8 + [pb.BLOCK_STATUS_ABSENT]
            np.testing.assert_array_equal(await user.read(lease.lease_id, 8), np.stack([*CONTENT.values()]))
            assert await user.locate(*KEYS) == [pb.TIER_HOST] * 8

    tables = disk_table(tmp_path, 12)
    with running(tmp_path, "is_strict = true", tables) as server:
        asyncio.run(fill())
    with running(tmp_path, "is_strict = true", tables) as server:
        asyncio.run(read_all())


def test_what_was_still_in_memory_is_written_before_a_drained_service_ends(tmp_path: Path) -> None:
    async def stage() -> None:
        async with peer(server) as user:
            await user.stage(CONTENT)  # and released at the end, just before the signal

    async def check() -> None:
        async with peer(server) as user:
            assert await user.check(KEYS, CONTENT) == KEYS

    tables = disk_table(tmp_path, 12)
    with running(tmp_path, "is_strict = true", tables) as server:
        asyncio.run(stage())
        assert server.end(signal.SIGTERM) == 0
    with running(tmp_path, "is_strict = true", tables) as server:
        asyncio.run(check())


def test_blocks_cut_off_by_another_process_are_reported_and_not_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            await user.release(await user.stage(CONTENT))

            async def is_on_disk() -> bool:
                return (await user.stats()).num_held_disk_blocks == len(KEYS)

            await until(is_on_disk)
            await user.release((await user.allocate(NUM_BLOCKS)).lease_id)
            (path,) = tmp_path.glob("*.blocks")
            os.truncate(path, 4096)
            with pytest.raises(BlockNotFoundError):
                await user.lease(*KEYS)
            stats = await user.stats()
            assert stats.num_disk_errors_total == len(KEYS)
            assert stats.num_free_blocks == NUM_BLOCKS
            assert await user.locate(*KEYS) == [pb.TIER_UNSPECIFIED] * 8
            with pytest.raises(BlockNotFoundError):
                await user.lease(*KEYS)
            assert (await user.stats()).num_disk_errors_total == len(KEYS)
            await user.release(await user.stage(CONTENT))
            assert (await user.lease(*KEYS)).num_blocks == len(KEYS), "memory serves on"

    with running(tmp_path, "is_strict = true", disk_table(tmp_path, 12)) as server:
        asyncio.run(scenario())


def test_metrics_tell_the_tiers_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            await user.release(await user.stage(CONTENT))

            async def is_on_disk() -> bool:
                return (await user.stats()).num_held_disk_blocks == len(KEYS)

            await until(is_on_disk)
            await user.lease(*KEYS[:2])
            await user.release()
            await user.release((await user.allocate(NUM_BLOCKS)).lease_id)
            await user.lease(*KEYS[:3], b"absent")

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tables = f'metrics_address = "127.0.0.1:{port}"\n' + disk_table(tmp_path, 12)
    with running(tmp_path, "is_strict = true", tables) as server:
        asyncio.run(scenario())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    block_bytes = NUM_PARTS * PART_BYTES
    for name, value in {
        'capacity_bytes{tier="host"}': NUM_BLOCKS * block_bytes,
        'capacity_bytes{tier="disk"}': 12 * block_bytes,
        'used_bytes{tier="host"}': 3 * block_bytes,
        'used_bytes{tier="disk"}': 8 * block_bytes,
        'evictable_bytes{tier="host"}': 3 * block_bytes,
        "leases": 0,
        "peers": 1,
        "sealed_blocks_total": 8,
        'leased_blocks_total{tier="host"}': 2,
        'leased_blocks_total{tier="disk"}': 3,
        'missed_blocks_total{cause="absent"}': 1,
        'missed_blocks_total{cause="io_error"}': 0,
        'evictions_total{tier="host"}': 8,
        'drops_total{reason="not_written",tier="host"}': 0,
        'drops_total{reason="corrupt",tier="disk"}': 0,
        'disk_bytes_total{op="write"}': 8 * block_bytes,
        'disk_bytes_total{op="read"}': 3 * block_bytes,
    }.items():
        assert float(lines[f"oasiskv_staging_{name}"]) == value, name
    assert float(lines['oasiskv_staging_disk_seconds_total{op="read"}']) > 0
    assert float(lines['oasiskv_rpc_calls_total{method="Lease",result="ok"}']) == 2
