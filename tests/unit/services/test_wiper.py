"""What a lease held is gone soon after the lease, and nobody's new bytes with it."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from oasiskv.core.errors import PoolExhaustedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.services.checksums import checksums
from oasiskv.services.staging import wiper
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.service import Access, SealRequest, StagingService

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=8, max_blocks_per_peer=8)


@pytest.fixture
def service() -> Iterator[StagingService]:
    memory = StagingMemory(SHAPE, LIMITS.num_blocks)
    yield StagingService(StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True), memory)
    memory.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def seal(service: StagingService, peer_id: str, lease_id: str, block_ids: list[int], name: str) -> None:
    blocks = [
        SealRequest(
            block_index=index,
            block_key=b"%s %d" % (name.encode(), index),
            checksums=checksums(service.memory.parts[block_id]),
        )
        for index, block_id in enumerate(block_ids)
    ]
    await service.seal(peer_id, lease_id, blocks)


def test_what_was_not_sealed_is_wiped_when_its_lease_ends_and_what_was_is_kept(service: StagingService) -> None:
    async def scenario() -> None:
        service.wiper.start()
        peer_id = service.register_peer(SHAPE, "test", Access.STREAM)
        lease_id, block_ids = await service.allocate(peer_id, 5, 30.0)
        service.memory.parts[block_ids] = 7
        await seal(service, peer_id, lease_id, block_ids[:2], "kept")
        service.leases.release(peer_id, [lease_id])
        await until(lambda: not service.wiper.num_waiting)
        assert [bool(service.memory.parts[block_id].any()) for block_id in block_ids] == [True] * 2 + [False] * 3
        await service.wiper.stop()

    asyncio.run(scenario())


def test_a_block_that_was_found_to_be_corrupt_is_wiped_too(service: StagingService) -> None:
    async def scenario() -> None:
        service.wiper.start()
        peer_id = service.register_peer(SHAPE, "test", Access.STREAM)
        lease_id, (block_id,) = await service.allocate(peer_id, 1, 30.0)
        service.memory.parts[block_id] = 7
        await seal(service, peer_id, lease_id, [block_id], "corrupt")
        service.leases.drop(block_id)
        await asyncio.sleep(0)
        assert service.memory.parts[block_id].any(), "its lease goes on"
        service.leases.release(peer_id, [lease_id])
        await until(lambda: not service.memory.parts[block_id].any())
        await service.wiper.stop()

    asyncio.run(scenario())


def test_who_is_given_a_block_that_is_being_wiped_waits_and_keeps_its_bytes(
    service: StagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = service.memory.clear
    is_wiping, may_end = threading.Event(), threading.Event()

    def clear_slowly(block_ids: Iterable[int]) -> None:
        if not is_wiping.is_set():  # the first is that of the wiper
            is_wiping.set()
            may_end.wait(20)
        clear(block_ids)

    async def scenario() -> None:
        peer_id = service.register_peer(SHAPE, "test", Access.STREAM)
        lease_id, block_ids = await service.allocate(peer_id, 8, 30.0)
        service.memory.parts[block_ids] = 7
        monkeypatch.setattr(service.memory, "clear", clear_slowly)
        service.wiper.start()
        service.leases.release(peer_id, [lease_id])
        await until(is_wiping.is_set)
        allocating = asyncio.create_task(service.allocate(peer_id, 8, 30.0))
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert not allocating.done(), "a thread would still set these blocks to 0"
        may_end.set()
        _, block_ids = await allocating
        assert not service.memory.parts.any()
        service.memory.parts[block_ids] = 9
        await asyncio.sleep(0.05)
        assert (service.memory.parts == 9).all()
        await service.wiper.stop()

    asyncio.run(scenario())


def test_whatever_the_order_a_lease_begins_with_zeros_and_keeps_what_is_written(
    service: StagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiper, "BATCH_BYTES", 2 * SHAPE.block_bytes)
    chance = random.Random(5)

    async def use(peer_id: str, number: int) -> None:
        for turn in range(60):
            try:
                lease_id, block_ids = await service.allocate(peer_id, chance.randint(1, 4), 30.0)
            except PoolExhaustedError:
                await asyncio.sleep(0)
                continue
            assert not service.memory.parts[block_ids].any()
            service.memory.parts[block_ids] = 1 + number
            if chance.random() < 0.3:
                await seal(service, peer_id, lease_id, block_ids, f"{number} {turn}")
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
            assert (service.memory.parts[block_ids] == 1 + number).all()
            service.leases.release(peer_id, [lease_id])

    async def scenario() -> None:
        service.wiper.start()
        async with asyncio.TaskGroup() as peers:
            for number in range(6):
                peer_id = service.register_peer(SHAPE, f"{number}", Access.STREAM)
                peers.create_task(use(peer_id, number))
        await until(lambda: not service.wiper.num_waiting)
        cached = {block_id for block_id in range(8) if service.leases.is_sealed(block_id)}
        dirty = set(np.flatnonzero(service.memory.parts.reshape(8, -1).any(axis=1)).tolist())
        assert dirty == cached
        service.tiers.check_invariants()
        await service.wiper.stop()

    asyncio.run(scenario())
