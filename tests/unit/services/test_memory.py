import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from oasiskv.core.errors import ConfigError, LeaseExpiredError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.engine.host_pool import HostPool
from oasiskv.services.staging import memory as memory_module
from oasiskv.services.staging.memory import MemorySocket, StagingMemory

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
NUM_BLOCKS = 5


@pytest.fixture
def memory() -> Iterator[StagingMemory]:
    made = StagingMemory(SHAPE, NUM_BLOCKS)
    yield made
    made.close()


def test_a_reader_can_not_map_the_blocks_to_write(memory: StagingMemory) -> None:
    size = os.fstat(memory.reading_fd).st_size
    mmap.mmap(memory.reading_fd, size, prot=mmap.PROT_READ).close()
    with pytest.raises(PermissionError):
        mmap.mmap(memory.reading_fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_nobody_can_map_the_generations_to_write(memory: StagingMemory) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(memory.generations_fd, NUM_BLOCKS * 8, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(memory.generations_fd, b"x", 0)
    memory.generations[3] = 8
    with mmap.mmap(memory.generations_fd, NUM_BLOCKS * 8, prot=mmap.PROT_READ) as seen:
        assert np.frombuffer(seen[:], np.uint64).tolist() == [0, 0, 0, 8, 0]


def test_nobody_can_pull_pages_away(memory: StagingMemory) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.blocks_fd, 0)
    assert fcntl.fcntl(memory.blocks_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


def test_a_block_is_wiped_when_it_is_given_out_again(memory: StagingMemory) -> None:
    memory.wipe([1, 2])
    memory.parts[1:3] = 7
    memory.wipe([2, 3])
    assert [bool(memory.parts[block_id].any()) for block_id in range(NUM_BLOCKS)] == [False, True, False, False, False]


def test_the_engine_maps_the_blocks_as_a_host_pool(memory: StagingMemory) -> None:
    memory.parts[2, 1] = np.arange(SHAPE.part_bytes, dtype=np.uint8)
    config = HostPoolConfig(
        num_blocks=NUM_BLOCKS, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype_bytes=2
    )
    with HostPool.attach(memory.reading_fd, config, torch.float16) as pool:
        seen = pool.units[2, 1].clone()
    np.testing.assert_array_equal(seen.view(torch.uint8).numpy().ravel(), np.arange(SHAPE.part_bytes, dtype=np.uint8))


def test_the_socket_refuses_who_is_no_peer_and_notices_the_end_of_who_is(memory: StagingMemory, tmp_path: Path) -> None:
    opened: list[str] = []
    closed: list[str] = []

    def open_link(peer_id: str) -> bool:
        if peer_id != "known":
            raise LeaseExpiredError("peer_id: expected a registered peer")
        opened.append(peer_id)
        return False

    async def ask(line: bytes) -> tuple[bytes, int]:
        def talk() -> tuple[bytes, int]:
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(tmp_path / "s"))
                link.sendall(line)
                answer, fds, _, _ = socket.recv_fds(link, 4096, 2)
                for fd in fds:
                    os.close(fd)
                return answer, len(fds)

        return await asyncio.to_thread(talk)

    async def scenario() -> None:
        listener = MemorySocket(tmp_path / "s", memory, open_link, closed.append)
        await listener.start()
        assert await ask(b"known\n") == (b"ok\n", 2)
        answer, num_fds = await ask(b"unknown\n")
        assert answer.startswith(b"error LeaseExpiredError peer_id")
        assert num_fds == 0
        assert (await ask(b"x" * 1000))[0].startswith(b"error InvalidRequestError peer_id")
        assert (await ask(b"\xff\n"))[0].startswith(b"error LeaseExpiredError")
        async with asyncio.timeout(10):
            while not closed:
                await asyncio.sleep(0.01)
        with pytest.raises(ConfigError, match="memory_socket"):
            await MemorySocket(tmp_path / "s", memory, open_link, closed.append).start()
        await listener.stop()

    asyncio.run(scenario())
    assert opened == closed == ["known"]
    assert not (tmp_path / "s").exists()


def test_the_socket_of_a_process_that_died_is_taken_over(memory: StagingMemory, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))

    async def scenario() -> None:
        listener = MemorySocket(tmp_path / "s", memory, lambda peer_id: True, lambda peer_id: None)
        await listener.start()
        await listener.stop()

    asyncio.run(scenario())


def test_huge_pages_that_are_not_there_give_small_ones_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory_module, "MEMINFO", meminfo)
    for text, reason in (
        (
            "HugePages_Free:   3\nHugePages_Rsvd:   3\nHugepagesize:  2048 kB\n",
            "1 huge ones of 2097152 bytes are needed",
        ),
        ("MemTotal: 1 kB\n", "small pages: 0 huge ones"),
    ):
        meminfo.write_text(text)
        made = StagingMemory(SHAPE, NUM_BLOCKS, "auto")
        assert reason in made.reason
        made.close()
    made = StagingMemory(SHAPE, NUM_BLOCKS, "never")
    assert made.reason == "small pages: the configuration says never"
    made.close()


def test_pages_of_a_size_that_is_required_are_asked_for_and_nothing_else_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = os.memfd_create, {}

    def memfd_create(name: str, flags: int) -> int:
        asked[name] = flags
        return real(name, flags & ~(os.MFD_HUGETLB | os.MFD_HUGE_2MB | os.MFD_HUGE_1GB))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    made = StagingMemory(SHAPE, NUM_BLOCKS, "2MiB")
    assert (made.reason, os.fstat(made.blocks_fd).st_size) == ("1 huge pages of 2097152 bytes", 2**21)
    made.close()
    wanted = os.MFD_HUGETLB | os.MFD_HUGE_2MB
    assert asked["oasiskv-staging-blocks"] & wanted == wanted
    assert not asked["oasiskv-staging-generations"] & os.MFD_HUGETLB
    num_open = len(os.listdir("/proc/self/fd"))

    def full(*arguments: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(ConfigError, match="huge_pages: expected 1 huge pages of 2097152 bytes to be free, got Cannot"):
        StagingMemory(SHAPE, NUM_BLOCKS, "2MiB")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_huge_pages_hold_the_pool_where_there_are_some(tmp_path: Path) -> None:
    made = StagingMemory(SHAPE, NUM_BLOCKS, "auto")
    try:
        if not made.reason.startswith("1 huge pages"):
            pytest.skip(f"this host has none to spare: {made.reason}")
        assert os.fstat(made.blocks_fd).st_size % (2 * 2**20) == 0
        made.parts[NUM_BLOCKS - 1] = 3
        assert made.parts.shape == (NUM_BLOCKS, SHAPE.num_parts, SHAPE.part_bytes)
        config = HostPoolConfig(
            num_blocks=NUM_BLOCKS, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype_bytes=2
        )
        with HostPool.attach(made.reading_fd, config, torch.float16) as pool:
            assert (pool.units[NUM_BLOCKS - 1].view(torch.uint8) == 3).all()
    finally:
        made.close()
