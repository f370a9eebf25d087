"""The service with a disk tier, in this process: what goes down comes back, or is said to be gone."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oasiskv.core.errors import BlockNotFoundError, CorruptBlockError, PoolExhaustedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.tiers import BlockStatus, Tier
from oasiskv.services.checksums import checksums
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig, DiskFile, slot_bytes
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.service import Access, PartRange, SealRequest, StagingService

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=10, max_blocks_per_peer=10)
KEYS = [f"k{number}".encode() for number in range(8)]
DATA = np.random.default_rng(5).integers(0, 256, (len(KEYS), SHAPE.num_parts, SHAPE.part_bytes), np.uint8)


class Place:
    """A service, a peer of it, and the file below."""

    def __init__(self, service: StagingService, file: DiskFile) -> None:
        self.service = service
        self.file = file
        self.peer_id = service.register_peer(SHAPE, "test", Access.STREAM)

    async def stage(self, keys: list[bytes] = KEYS, data: NDArray[np.uint8] = DATA) -> None:
        lease_id, block_ids = await self.service.allocate(self.peer_id, len(keys), 9.0)
        self.service.memory.parts[block_ids] = data[: len(keys)]
        sealed = [
            SealRequest(block_index=i, block_key=key, checksums=checksums(data[i]).tolist())
            for i, key in enumerate(keys)
        ]
        await self.service.seal(self.peer_id, lease_id, sealed)
        self.service.leases.release(self.peer_id, [lease_id])

    async def written(self) -> None:
        async with asyncio.timeout(20):
            while self.service.tiers.num_unwritten or any(map(self.service.tiers.disk.is_writing, KEYS)):
                await asyncio.sleep(0.01)

    async def crowd_out(self) -> None:
        lease_id, _ = await self.service.allocate(self.peer_id, self.service.leases.num_free, 9.0)
        self.service.leases.release(self.peer_id, [lease_id])

    async def stage_on_disk_only(self) -> None:
        await self.stage()
        await self.written()
        await self.crowd_out()
        assert self.service.locate(self.peer_id, KEYS) == [Tier.DISK] * len(KEYS)

    async def read(self, lease_id: str, num_blocks: int) -> NDArray[np.uint8]:
        ranges = [PartRange(block_index=i, first_part=0, num_parts=SHAPE.num_parts) for i in range(num_blocks)]
        parts = [part.data async for part in self.service.get(self.peer_id, lease_id, ranges)]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(num_blocks, SHAPE.num_parts, SHAPE.part_bytes)

    def damage(self, key: bytes) -> None:
        found = self.service.tiers.disk.find(key)
        assert found is not None
        with self.file.path.open("r+b") as raw:
            raw.seek(ALIGNMENT + found.slot * slot_bytes(SHAPE) + ALIGNMENT + 100)
            raw.write(b"another's bytes")
            raw.flush()
            os.fsync(raw.fileno())


@asynccontextmanager
async def running(folder: Path, num_slots: int = 8, max_wait_s: float = 20.0) -> AsyncIterator[Place]:
    # Not every file system of a test host has direct I/O; test_disk_file tries it where it is.
    max_bytes = ALIGNMENT + num_slots * slot_bytes(SHAPE)
    disk = DiskConfig(folder=str(folder), max_bytes=max_bytes, use_direct_io=False, max_wait_s=max_wait_s)
    memory = StagingMemory(SHAPE, LIMITS.num_blocks)
    config = StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True, disk=disk)
    file = DiskFile.open(disk, SHAPE)
    service = StagingService(config, memory, disk_file=file)
    assert service.disk_tier is not None
    await service.disk_tier.start()
    place = Place(service, file)
    try:
        yield place
        service.tiers.check_invariants()
    finally:
        await service.disk_tier.stop()
        memory.close()


def test_what_memory_lost_comes_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            lease_id, block_ids, statuses = await place.service.lease(place.peer_id, [*KEYS, b"absent"], 1, 9.0)
            assert len(block_ids) == 8
            assert statuses == [BlockStatus.INTACT] * 8 + [BlockStatus.ABSENT]
            np.testing.assert_array_equal(await place.read(lease_id, 8), DATA)
            described = place.service.describe(place.peer_id, lease_id, [])
            np.testing.assert_array_equal(described.checksums, checksums(DATA))

    asyncio.run(scenario())


def test_a_restart_finds_what_was_written_to_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage()
            await place.written()
        async with running(tmp_path) as place:
            assert place.service.changes.num_sealed == 8, "a watcher learns of them"
            lease_id, _, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0)
            np.testing.assert_array_equal(await place.read(lease_id, 8), DATA)

    asyncio.run(scenario())


def test_a_block_that_is_not_intact_on_disk_ends_the_lease_before_it_and_is_tried_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            place.damage(KEYS[4])
            lease_id, block_ids, statuses = await place.service.lease(place.peer_id, KEYS, 1, 9.0)
            assert len(block_ids) == 4
            assert statuses[4] is BlockStatus.CORRUPT
            assert place.service.num_disk_errors == 1
            assert place.service.locate(place.peer_id, KEYS[3:6]) == [Tier.HOST, None, Tier.HOST]
            np.testing.assert_array_equal(await place.read(lease_id, 4), DATA[:4])
            place.service.leases.release(place.peer_id, [lease_id])
            assert place.service.leases.num_free == LIMITS.num_blocks
            with pytest.raises(BlockNotFoundError):
                await place.service.lease(place.peer_id, KEYS, 5, 9.0)
            assert place.service.num_disk_errors == 1, "nobody read it again"
            await place.crowd_out()  # a later request is admitted with no other trigger

    asyncio.run(scenario())


def test_a_disk_that_fails_to_write_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            calls = []

            def fail(fd: int, *arguments: Any) -> int:
                calls.append(fd)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(os, "pwritev", fail)
            await place.stage()
            await place.written()
            assert len(calls) == 8, "one try for each block"
            assert place.service.num_disk_errors == 8
            assert place.service.tiers.disk.num_held == 0
            monkeypatch.undo()
            lease_id, _, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0)
            place.service.leases.release(place.peer_id, [lease_id])
            await place.written()
            assert place.service.tiers.disk.num_held == 8, "there is room again"

    asyncio.run(scenario())


def test_a_slot_with_an_input_output_error_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_slots=2) as place:
            monkeypatch.setattr(os, "pwritev", lambda *arguments: os.preadv(-1, [], 0))  # EBADF, as good as EIO
            await place.stage(KEYS[:4])
            async with asyncio.timeout(20):
                while place.service.tiers.disk.num_retired < 2:
                    await asyncio.sleep(0.01)
            assert place.service.num_disk_errors == 2, "with no slot left nothing is tried"
            assert place.service.tiers.num_unwritten == 2

    asyncio.run(scenario())


def test_a_copy_in_memory_that_is_not_intact_is_replaced_by_that_on_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage()
            await place.written()
            lease_id, block_ids, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0)
            place.service.memory.parts[block_ids[2], 1, 5] ^= 1
            with pytest.raises(CorruptBlockError):
                await place.read(lease_id, 8)
            place.service.leases.release(place.peer_id, [lease_id])
            lease_id, block_ids, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0)
            np.testing.assert_array_equal(await place.read(lease_id, 8), DATA)

    asyncio.run(scenario())


def test_blocks_that_were_read_into_are_wiped_before_another_gets_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage()
            await place.written()
        async with running(tmp_path) as place:
            lease_id, _, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0)
            place.service.leases.release(place.peer_id, [lease_id])
            await place.crowd_out()
            assert not place.service.memory.parts.any()

    asyncio.run(scenario())


def test_memory_without_room_for_what_is_on_disk_is_said_to_be_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            await place.service.allocate(place.peer_id, 7, 9.0)
            reader_id = place.service.register_peer(SHAPE, "reader", Access.STREAM)
            with pytest.raises(PoolExhaustedError, match="expected 8 blocks in memory, got 3"):
                await place.service.lease(reader_id, KEYS, 8, 9.0)
            _, block_ids, statuses = await place.service.lease(reader_id, KEYS, 1, 9.0)
            assert len(block_ids) == 3
            assert statuses == [BlockStatus.INTACT] * 3 + [BlockStatus.NOT_READ] * 5

    asyncio.run(scenario())


def test_two_leases_on_the_same_blocks_read_them_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            other_id = place.service.register_peer(SHAPE, "other", Access.STREAM)
            leases = [place.service.lease(peer_id, KEYS, 8, 9.0) for peer_id in (place.peer_id, other_id)]
            (_, first, _), (_, second, _) = await asyncio.gather(*leases)
            assert first == second
            assert place.service.disk_tier is not None
            assert place.service.disk_tier.counts["read", BlockStatus.INTACT] == 8

    asyncio.run(scenario())


def test_a_disk_that_hangs_holds_up_other_leases_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, max_wait_s=0.1) as place:
            await place.stage_on_disk_only()
            await place.service.lease(place.peer_id, KEYS[:1], 1, 9.0)
            may_end = threading.Event()
            real = os.preadv

            def hang(*arguments: Any) -> int:
                may_end.wait(20)
                return real(*arguments)

            monkeypatch.setattr(os, "preadv", hang)
            hanging = asyncio.create_task(place.service.lease(place.peer_id, KEYS[:4], 1, 9.0))
            await asyncio.sleep(0.01)
            with pytest.raises(PoolExhaustedError, match="disk is busy"):
                await place.service.lease(place.peer_id, KEYS[4:], 1, 9.0)
            _, block_ids, statuses = await place.service.lease(place.peer_id, KEYS[:2], 1, 9.0)
            assert len(block_ids) == 1, "what is in memory is given"
            assert statuses == [BlockStatus.INTACT, BlockStatus.NOT_READ]
            may_end.set()
            assert len((await hanging)[1]) == 4
            _, block_ids, _ = await place.service.lease(place.peer_id, KEYS[4:5], 1, 9.0)
            assert len(block_ids) == 1, "the disk is back"

    asyncio.run(scenario())


def test_a_lease_that_is_cancelled_while_it_reads_holds_its_blocks_till_the_threads_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            is_reading, may_end = threading.Event(), threading.Event()
            real = os.preadv

            def read_slowly(*arguments: Any) -> int:
                is_reading.set()
                may_end.wait(20)
                return real(*arguments)

            monkeypatch.setattr(os, "preadv", read_slowly)
            leasing = asyncio.create_task(place.service.lease(place.peer_id, KEYS, 8, 9.0))
            await asyncio.to_thread(is_reading.wait, 20)
            for _ in range(3):
                leasing.cancel()
                await asyncio.sleep(0.01)
                assert place.service.leases.num_free == 2, "threads still write to the blocks"
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await leasing
            assert place.service.leases.num_free == LIMITS.num_blocks
            assert place.service.leases.counts().num_leases == 0

    asyncio.run(scenario())


def test_a_block_that_is_evicted_while_it_is_written_is_not_found_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            is_writing, may_end = threading.Event(), threading.Event()
            real = os.pwritev

            def write_slowly(*arguments: Any) -> int:
                is_writing.set()
                may_end.wait(20)
                return real(*arguments)

            monkeypatch.setattr(os, "pwritev", write_slowly)
            await place.stage(KEYS[:1])
            await asyncio.to_thread(is_writing.wait, 20)
            await place.crowd_out()
            may_end.set()
            await place.written()
            assert place.service.locate(place.peer_id, KEYS[:1]) == [None]
            assert place.file.scan(range(8)) == []
            assert place.service.tiers.num_lost == 1
            assert place.service.num_disk_errors == 0

    asyncio.run(scenario())


async def none_is_read(place: Place) -> None:
    assert place.service.disk_tier is not None
    async with asyncio.timeout(20):
        while place.service.disk_tier._ahead:
            await asyncio.sleep(0.01)


def test_a_lease_that_waits_for_some_blocks_has_the_others_read_ahead_for_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            first_id, block_ids, statuses = await place.service.lease(place.peer_id, KEYS, 1, 9.0, wait_blocks=3)
            assert len(block_ids) == 3
            assert statuses == [BlockStatus.INTACT] * 3 + [BlockStatus.NOT_READ] * 5
            np.testing.assert_array_equal(await place.read(first_id, 3), DATA[:3])
            await none_is_read(place)
            # Half of the 7 blocks that no lease holds.
            assert place.service.locate(place.peer_id, KEYS) == [Tier.HOST] * 6 + [Tier.DISK] * 2
            assert place.service.leases.num_free == LIMITS.num_blocks - 3, "what is read ahead is held by nobody"
            place.service.leases.release(place.peer_id, [first_id])
            lease_id, block_ids, _ = await place.service.lease(place.peer_id, KEYS, 8, 9.0, wait_blocks=1)
            assert len(block_ids) == 8, "never fewer than are wanted"
            np.testing.assert_array_equal(await place.read(lease_id, 8), DATA)

    asyncio.run(scenario())


def test_leases_come_between_what_is_read_ahead_and_the_next_reading_ends_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            may_read = threading.Semaphore(0)
            real = os.preadv

            def read_when_allowed(*arguments: Any) -> int:
                assert may_read.acquire(timeout=20)
                return real(*arguments)

            monkeypatch.setattr(os, "preadv", read_when_allowed)
            assert place.service.disk_tier is not None
            place.service.disk_tier.read_ahead(place.peer_id, KEYS)
            await asyncio.sleep(0.05)
            leasing = asyncio.create_task(place.service.lease(place.peer_id, KEYS[7:], 1, 9.0))
            place.service.disk_tier.read_ahead(place.peer_id, KEYS[6:])
            may_read.release(8)
            _, block_ids, _ = await leasing
            assert len(block_ids) == 1
            await none_is_read(place)
            assert len(place.service.disk_tier._ahead) == 0

    asyncio.run(scenario())


def test_reading_ahead_ends_at_a_block_that_is_not_intact_and_with_the_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as place:
            await place.stage_on_disk_only()
            place.damage(KEYS[2])
            assert place.service.disk_tier is not None
            place.service.disk_tier.read_ahead(place.peer_id, KEYS[2:])
            await none_is_read(place)
            assert place.service.locate(place.peer_id, KEYS[2:3]) == [None]
            assert place.service.leases.num_free == LIMITS.num_blocks
            place.service.disk_tier.read_ahead("unknown", KEYS)
            await none_is_read(place)
            place.service.disk_tier.read_ahead(place.peer_id, KEYS)

    asyncio.run(scenario())
