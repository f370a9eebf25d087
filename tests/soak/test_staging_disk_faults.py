"""Many callers over a small pool and a disk that fails, stalls and lies at random: no wrong byte, nothing kept."""

import asyncio
import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.core.errors import BlockNotFoundError, CorruptBlockError, LeaseExpiredError, PoolExhaustedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.services.checksums import checksums
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig, DiskFile, slot_bytes
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.service import Access, PartRange, SealRequest, StagingService

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=24, max_blocks_per_peer=24)
NUM_SLOTS, NUM_CALLERS, NUM_CALLS = 40, 6, 400
CHAINS = [[f"{name}{number}".encode() for number in range(8)] for name in "abcdefgh"]
REFUSALS = (BlockNotFoundError, CorruptBlockError, LeaseExpiredError, PoolExhaustedError)


def content(key: bytes) -> np.ndarray:
    """What everyone writes under a key, `[num_parts, part_bytes]`."""
    seed = int.from_bytes(key, "big")
    return np.random.default_rng(seed).integers(0, 256, (SHAPE.num_parts, SHAPE.part_bytes), np.uint8)


class FaultyDisk:
    """Stands in for `os.preadv` and `os.pwritev`."""

    def __init__(self) -> None:
        self.rng = random.Random(7)
        self.preadv, self.pwritev = os.preadv, os.pwritev
        self.num_faults = 0

    def fault(self) -> "int | None":
        """Return nothing, a number of bytes, or raise."""
        chance = self.rng.random()
        if chance < 0.05:
            time.sleep(self.rng.uniform(0, 0.02))
        self.num_faults += chance > 0.95
        if chance > 0.99:
            raise OSError(errno.ENOSPC, "full")
        if chance > 0.985:
            raise OSError(errno.EIO, "broken")
        return ALIGNMENT if chance > 0.95 else None

    def read(self, fd: int, buffers: list[Any], offset: int) -> int:
        found = self.fault()
        moved = self.preadv(fd, buffers, offset)
        if found is not None and len(buffers) == 2 and self.rng.random() < 0.5:
            memoryview(buffers[1])[3] ^= 1  # a lie of the device
            return moved
        return moved if found is None else found

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        found = self.fault()
        moved = self.pwritev(fd, buffers[:1] if found is not None else buffers, offset)
        return moved if found is None or self.rng.random() < 0.5 else sum(len(memoryview(one)) for one in buffers)


class Caller:
    def __init__(self, service: StagingService, number: int) -> None:
        self.service = service
        self.rng = random.Random(number)
        self.peer_id = service.register_peer(SHAPE, f"caller {number}", Access.STREAM)
        self.num_read = 0

    async def stage(self, chain: list[bytes]) -> None:
        lease_id, block_ids = await self.service.allocate(self.peer_id, len(chain), 30.0)
        try:
            blocks = []
            for index, (key, block_id) in enumerate(zip(chain, block_ids, strict=True)):
                self.service.memory.parts[block_id] = content(key)
                sums = checksums(content(key)).tolist()
                blocks.append(SealRequest(block_index=index, block_key=key, checksums=sums))
            await self.service.seal(self.peer_id, lease_id, blocks)
        finally:
            self.service.leases.release(self.peer_id, [lease_id])

    async def read(self, chain: list[bytes]) -> None:
        lease_id, block_ids, _ = await self.service.lease(self.peer_id, chain, self.rng.choice([0, 1, 8]), 30.0)
        try:
            await asyncio.sleep(self.rng.choice([0, 0, 0.005]))
            ranges = [PartRange(block_index=i, first_part=0, num_parts=SHAPE.num_parts) for i in range(len(block_ids))]
            async for part in self.service.get(self.peer_id, lease_id, ranges):
                assert part.data == content(chain[part.block_index])[part.part].tobytes(), "another block's bytes"
                self.num_read += 1
        finally:
            self.service.leases.release(self.peer_id, [lease_id])

    async def call_many(self) -> None:
        for _ in range(NUM_CALLS):
            chain = self.rng.choice(CHAINS)[: self.rng.randint(1, 8)]
            work = self.stage(chain) if self.rng.random() < 0.4 else self.read(chain)
            task = asyncio.create_task(work)
            if self.rng.random() < 0.1:
                await asyncio.sleep(self.rng.uniform(0, 0.003))
                task.cancel()
            try:
                await task
            except (*REFUSALS, asyncio.CancelledError):
                await asyncio.sleep(0)


@pytest.mark.timeout(600)
def test_a_faulty_disk_under_many_callers_costs_blocks_and_never_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(seconds_of_peace: float) -> int:
        memory = StagingMemory(SHAPE, LIMITS.num_blocks)
        disk = DiskConfig(
            folder=str(tmp_path), max_bytes=ALIGNMENT + NUM_SLOTS * slot_bytes(SHAPE), use_direct_io=False
        )
        service = StagingService(
            StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True, disk=disk),
            memory,
            disk_file=DiskFile.open(disk, SHAPE),
        )
        assert service.disk_tier is not None
        await service.disk_tier.start()
        callers = [Caller(service, number) for number in range(NUM_CALLERS)]
        async with asyncio.TaskGroup() as running:
            for caller in callers:
                running.create_task(caller.call_many())
        await asyncio.sleep(seconds_of_peace)
        service.tiers.check_invariants()
        assert service.leases.num_free == LIMITS.num_blocks, "a block is still held"
        assert service.leases.num_leases == 0
        print(f"{service.disk_tier.counts}, {service.tiers.disk.num_retired} slots retired")
        await service.disk_tier.stop()
        memory.close()
        return sum(caller.num_read for caller in callers)

    faulty = FaultyDisk()
    with monkeypatch.context() as faults:
        faults.setattr(os, "preadv", faulty.read)
        faults.setattr(os, "pwritev", faulty.write)
        for _ in range(3):  # each time over what the one before left on disk
            assert asyncio.run(serve(0.2)) > 100
    assert faulty.num_faults > 100
    assert asyncio.run(serve(0.2)) > 100
