import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.core.errors import ConfigError, InvalidRequestError, LeaseExpiredError, UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services import checksums as checksums_module
from oasiskv.services.checksums import block_checksums, checksum, checksums
from oasiskv.services.clients.staging import MappedPool
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.memory import MemorySocket, StagingMemory
from oasiskv.services.staging.service import Access, Part, SealRequest, StagingService

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=8, max_blocks_per_peer=8, max_ttl_s=10.0, peer_ttl_s=10.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock, tmp_path: Path) -> Iterator[StagingService]:
    memory = StagingMemory(SHAPE, LIMITS.num_blocks)
    config = StagingConfig(fingerprint=SHAPE, leases=LIMITS, memory_socket=str(tmp_path / "s"))
    yield StagingService(config, memory, clock)
    memory.close()


def register(service: StagingService, access: Access) -> str:
    return service.register_peer(SHAPE, "test", access)


@pytest.mark.parametrize(("access", "may_write"), [(Access.MAP_READ, False), (Access.MAP_WRITE, True)])
def test_a_peer_maps_the_pool_as_it_registered(service: StagingService, access: Access, may_write: bool) -> None:
    assert service.open_link(register(service, access)) is may_write


def test_a_peer_for_streams_gets_no_memory_whatever_it_asks(service: StagingService) -> None:
    async def scenario() -> None:
        path = Path(service.config.memory_socket)
        link = MemorySocket(path, service.memory, service.open_link, service.leases.close_link)
        await link.start()
        registered = pb.RegisterPeerResponse(
            memory_socket=str(path), num_blocks=8, num_parts=SHAPE.num_parts, part_bytes=SHAPE.part_bytes
        )
        with pytest.raises(UnsupportedError, match=r"^access: "):
            await asyncio.to_thread(MappedPool, register(service, Access.STREAM), registered)
        with pytest.raises(LeaseExpiredError, match=r"^peer_id: "):
            await asyncio.to_thread(MappedPool, "guessed", registered)
        await link.stop()

    asyncio.run(scenario())


class OvertakenParts:
    """Blocks, of which the one that is being copied gets other content meanwhile."""

    def __init__(self, pool: MappedPool, service: StagingService) -> None:
        self.parts, self.service, self.block_id = pool.parts, service, 0

    def __getitem__(self, block_id: int) -> "OvertakenParts":
        self.block_id = block_id
        return self

    def copy(self) -> Any:
        copied = self.parts[self.block_id].copy()
        self.service.memory.generations[self.block_id] += 1
        return copied


def test_a_copy_that_was_overtaken_is_not_taken_for_the_block(
    service: StagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        path = Path(service.config.memory_socket)
        link = MemorySocket(path, service.memory, service.open_link, service.leases.close_link)
        await link.start()
        registered = pb.RegisterPeerResponse(
            memory_socket=str(path), num_blocks=8, num_parts=SHAPE.num_parts, part_bytes=SHAPE.part_bytes
        )
        pool = await asyncio.to_thread(MappedPool, register(service, Access.MAP_READ), registered)
        block = pb.BlockDescriptor(block_id=2, generation=0, checksums=empty_checksums())
        assert not pool.read(block).any()
        monkeypatch.setattr(pool, "parts", OvertakenParts(pool, service))
        with pytest.raises(LeaseExpiredError, match=r"^generation: expected 0 .* got 1"):
            pool.read(block)
        pool.close()
        await link.stop()

    asyncio.run(scenario())


def test_who_is_forgotten_is_not_remembered_anywhere(service: StagingService, clock: Clock) -> None:
    for _ in range(1000):
        register(service, Access.STREAM)
        clock.now_s += 11.0
    assert service.num_known_access == 1


def test_a_seal_during_which_the_lease_ends_seals_nothing(service: StagingService, clock: Clock) -> None:
    async def scenario() -> None:
        peer_id = register(service, Access.STREAM)
        lease_id, _ = await service.allocate(peer_id, 1, 5.0)
        block = SealRequest(block_index=0, block_key=b"k", checksums=empty_checksums())
        sealing = asyncio.create_task(service.seal(peer_id, lease_id, [block]))
        await asyncio.sleep(0)
        clock.now_s = 6.0
        with pytest.raises(LeaseExpiredError):
            await sealing
        assert service.leases.find(b"k") is None
        assert service.leases.num_free == LIMITS.num_blocks
        service.leases.check_invariants()

    asyncio.run(scenario())


def empty_checksums() -> list[int]:
    sums: list[int] = checksums(np.zeros((SHAPE.num_parts, SHAPE.part_bytes), np.uint8)).tolist()
    return sums


def test_two_writers_that_seal_the_same_content_at_once_share_one_block(service: StagingService) -> None:
    async def scenario() -> None:
        peers = [register(service, Access.STREAM) for _ in range(2)]
        leases = [(await service.allocate(peer_id, 1, 5.0))[0] for peer_id in peers]
        block = SealRequest(block_index=0, block_key=b"k", checksums=empty_checksums())
        work = [service.seal(peer_id, lease_id, [block]) for peer_id, lease_id in zip(peers, leases, strict=True)]
        first, second = await asyncio.gather(*work)
        assert first == second == [service.leases.find(b"k")]
        assert service.leases.num_free == LIMITS.num_blocks - 1
        assert service.describe(peers[1], leases[1], []).checksums.tolist() == [empty_checksums()]

    asyncio.run(scenario())


def test_blocks_that_are_held_already_are_part_of_a_new_lease_as_they_are(service: StagingService) -> None:
    async def scenario() -> None:
        peer_id = register(service, Access.STREAM)
        lease_id, (held_id,) = await service.allocate(peer_id, 1, 5.0)
        data = bytes(range(256))
        service.put(peer_id, lease_id, Part(block_index=0, part=2, data=data, checksum=checksum(data)))
        sums = empty_checksums()
        sums[2] = checksum(data)
        await service.seal(peer_id, lease_id, [SealRequest(block_index=0, block_key=b"k", checksums=sums)])
        again_id, block_ids = await service.allocate(peer_id, 2, 5.0, [b"k", b"absent"])
        assert block_ids[0] == held_id
        assert service.memory.parts[held_id, 2].tobytes() == data
        with pytest.raises(InvalidRequestError):
            service.put(peer_id, again_id, Part(block_index=0, part=0, data=data, checksum=checksum(data)))
        with pytest.raises(InvalidRequestError, match="block_key"):
            await service.allocate(peer_id, 2, 5.0, [b""])

    asyncio.run(scenario())


def test_a_part_is_written_to_its_place_and_nowhere_else(service: StagingService) -> None:
    async def scenario() -> None:
        peer_id = register(service, Access.STREAM)
        lease_id, (block_id,) = await service.allocate(peer_id, 1, 5.0)
        data = bytes(range(256))
        service.put(peer_id, lease_id, Part(block_index=0, part=2, data=data, checksum=checksum(data)))
        assert service.memory.parts[block_id, 2].tobytes() == data
        assert not service.memory.parts[block_id, :2].any()

    asyncio.run(scenario())


def test_a_batch_of_checksums_equals_one_by_one() -> None:
    parts = np.random.default_rng(1).integers(0, 256, (3, 5, 77), np.uint8)
    expected = [[checksum(part.tobytes()) for part in block] for block in parts]
    assert checksums(parts).tolist() == expected
    assert checksums(parts[:0]).shape == (0, 5)
    assert block_checksums(parts, [2, 0, 2]).tolist() == [expected[2], expected[0], expected[2]]
    assert block_checksums(parts, []).shape == (0, 5)


def test_hashing_lets_other_threads_go_on_after_each_batch_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = np.random.default_rng(2).integers(0, 256, (9, 4, 64), np.uint8)
    expected = [[checksum(part.tobytes()) for part in block] for block in parts]
    batches = []
    fromiter = np.fromiter

    def spy(numbers: Iterator[int], dtype: type, count: int) -> Any:
        batches.append(count * parts.shape[-1])
        return fromiter(numbers, dtype, count)

    monkeypatch.setattr(np, "fromiter", spy)
    monkeypatch.setattr(checksums_module, "BATCH_BYTES", 600)
    assert checksums(parts).tolist() == expected
    assert block_checksums(parts, list(range(9))).tolist() == expected
    assert sum(batches) == 2 * parts.nbytes
    assert max(batches) <= 600


def test_strict_mode_and_a_memory_socket_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^memory_socket"):
        StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True, memory_socket="/run/s")
    with pytest.raises(ConfigError, match=r"^memory_socket"):
        StagingConfig(fingerprint=SHAPE, leases=LIMITS)
