"""Host pools without a GPU: bytes, sharing between processes, and what is left after `close`."""

import array
import fcntl
import logging
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.engine import host_pool
from oasiskv.engine.host_pool import HostPool

# Odd numbers, so that neither a block nor the pool ends at a page.
CONFIG = HostPoolConfig(num_blocks=5, num_layers=3, num_kv_heads=7, block_size=16, head_dim=24, dtype_bytes=2)
LARGE = HostPoolConfig(num_blocks=512, num_layers=4, num_kv_heads=4, block_size=16, head_dim=128, dtype_bytes=2)
# What the heap and the stacks of threads may grow or shrink beside a pool of 64 MiB.
NOISE_BYTES = LARGE.total_bytes // 4
BACKINGS = pytest.mark.parametrize("make", [HostPool.private, HostPool.shared], ids=["private", "shared"])
Make = Callable[..., HostPool]


def noise(config: HostPoolConfig, dtype: torch.dtype) -> torch.Tensor:
    """Return random bytes in the shape of the pool, NaN patterns included."""
    data = torch.randint(256, (config.total_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return data.view(dtype).view(
        config.num_blocks, config.num_layers, config.num_kv_heads, config.block_size, 2 * config.head_dim
    )


def bytes_of(units: torch.Tensor) -> torch.Tensor:
    return units.contiguous().view(-1).view(torch.uint8)


def resident_bytes() -> int:
    """Return the memory that this process has mapped; unlike /proc/self/status, the roll-up counts exactly."""
    rss = re.search(r"^Rss:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert rss is not None
    return 1024 * int(rss[1])


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@BACKINGS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_written_are_read_back(make: Make, dtype: torch.dtype) -> None:
    config = replace(CONFIG, dtype_bytes=dtype.itemsize)
    expected = noise(config, dtype)
    with make(config, dtype) as pool:
        assert pool.units.dtype == dtype
        pool.units.copy_(expected)
        assert torch.equal(bytes_of(pool.units), bytes_of(expected))


@BACKINGS
def test_a_host_block_and_a_unit_are_contiguous_bytes(make: Make) -> None:
    with make(CONFIG, torch.bfloat16) as pool:
        units = pool.units
        assert units.is_contiguous()
        assert units[1].data_ptr() - units[0].data_ptr() == CONFIG.block_bytes
        assert units[0, 0, 1].data_ptr() - units[0, 0, 0].data_ptr() == CONFIG.unit_bytes
        assert units.nbytes == CONFIG.total_bytes


@BACKINGS
def test_a_pool_of_fp8_units_is_bytes_by_layer(make: Make) -> None:
    config = replace(CONFIG, dtype_bytes=1, block_size=16, head_dim=24)
    with make(config, torch.uint8) as pool:
        assert pool.units.shape == (config.num_blocks, config.num_layers, config.part_bytes)
        assert pool.units.is_contiguous()
        assert pool.units.nbytes == config.total_bytes


@BACKINGS
def test_all_pages_are_there_from_the_start_and_zero(make: Make) -> None:
    before = resident_bytes()
    with make(LARGE, torch.bfloat16) as pool:
        assert resident_bytes() - before >= LARGE.total_bytes - NOISE_BYTES
        assert not bytes_of(pool.units).any()


@BACKINGS
def test_close_returns_the_memory_and_the_descriptor(make: Make) -> None:
    with no_descriptor_left():
        pool = make(LARGE, torch.bfloat16)
        pool.units.fill_(1)
        held = resident_bytes()
        pool.close()
        assert held - resident_bytes() >= LARGE.total_bytes - NOISE_BYTES


@BACKINGS
def test_a_closed_pool_refuses_access_and_closes_again(make: Make) -> None:
    pool = make(CONFIG, torch.bfloat16)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match=r"^the host pool is closed$"):
        _ = pool.units
    with pytest.raises(RuntimeError, match=r"^the host pool is closed$"):
        _ = pool.fd


@BACKINGS
def test_a_view_outlives_the_pool_and_then_returns_the_memory(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with no_descriptor_left():
        pool = make(LARGE, torch.bfloat16)
        pool.units.fill_(3)
        view = pool.units[-1, 0].view(-1)[5:9]
        with caplog.at_level(logging.WARNING):
            pool.close()
        assert "views of a closed host pool are still in use" in caplog.text
        with pytest.raises(RuntimeError):
            _ = pool.units
        assert view.tolist() == [3, 3, 3, 3]
        held = resident_bytes()
        del view
        assert held - resident_bytes() >= LARGE.total_bytes - NOISE_BYTES


@BACKINGS
def test_progress_ends_with_everything(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", LARGE.total_bytes // 4 + mmap.PAGESIZE)
    reports: list[tuple[int, int]] = []
    with make(LARGE, torch.bfloat16, report=lambda done, total: reports.append((done, total))):
        assert len(reports) == 4
        assert reports == sorted(reports)
        assert reports[-1] == (LARGE.total_bytes, LARGE.total_bytes)


@BACKINGS
def test_a_failing_progress_callback_holds_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_pool, "CHUNK_BYTES", mmap.PAGESIZE * 1024)
    before = resident_bytes()
    with no_descriptor_left(), pytest.raises(KeyboardInterrupt):
        make(LARGE, torch.bfloat16, report=fail)
    assert resident_bytes() - before <= NOISE_BYTES


@BACKINGS
def test_a_size_that_cannot_be_mapped_is_refused(make: Make) -> None:
    config = replace(CONFIG, num_blocks=2**60 // CONFIG.block_bytes)
    with no_descriptor_left(), pytest.raises(ConfigError, match=r"^host_pool_bytes: expected a size that can be"):
        make(config, torch.bfloat16)


@BACKINGS
def test_another_dtype_is_refused(make: Make) -> None:
    with pytest.raises(UnsupportedError, match=r"^dtype: expected one of .*, got torch.int16$"):
        make(CONFIG, torch.int16)
    with pytest.raises(ConfigError, match=r"^dtype: expected 2 bytes per element, got torch.float32$"):
        make(CONFIG, torch.float32)


@BACKINGS
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a CUDA device")
def test_pinning_without_a_device_is_refused(make: Make) -> None:
    with no_descriptor_left(), pytest.raises(UnsupportedError, match=r"^pin: expected a CUDA device, got none$"):
        make(CONFIG, torch.bfloat16, pin=True)


def test_a_private_pool_has_no_descriptor() -> None:
    with (
        HostPool.private(CONFIG, torch.bfloat16) as pool,
        pytest.raises(UnsupportedError, match=r"^fd: expected a shared host pool, got a private one$"),
    ):
        _ = pool.fd


def test_the_size_of_a_shared_pool_cannot_change() -> None:
    with HostPool.shared(CONFIG, torch.bfloat16) as pool:
        for num_bytes in (0, CONFIG.total_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(pool.fd, num_bytes)


@pytest.mark.parametrize("writable", [False, True])
def test_an_attached_pool_sees_what_its_owner_writes(writable: bool) -> None:
    expected = noise(CONFIG, torch.bfloat16)
    with (
        HostPool.shared(CONFIG, torch.bfloat16) as owner,
        HostPool.attach(owner.fd, CONFIG, torch.bfloat16, writable=writable) as attached,
    ):
        owner.units.copy_(expected)
        assert torch.equal(bytes_of(attached.units), bytes_of(expected))


def test_an_attached_pool_outlives_its_owner() -> None:
    with no_descriptor_left():
        owner = HostPool.shared(CONFIG, torch.bfloat16)
        owner.units.fill_(5)
        attached = HostPool.attach(owner.fd, CONFIG, torch.bfloat16)
        owner.close()
        assert (attached.units == 5).all()
        again = HostPool.attach(attached.fd, CONFIG, torch.bfloat16)
        attached.close()
        assert (again.units == 5).all()
        again.close()


def test_attaching_leaves_the_callers_descriptor_open() -> None:
    with HostPool.shared(CONFIG, torch.bfloat16) as owner:
        fd = os.dup(owner.fd)
        HostPool.attach(fd, CONFIG, torch.bfloat16).close()
        assert os.fstat(fd).st_size == CONFIG.total_bytes
        os.close(fd)


def test_a_descriptor_opened_for_reading_can_be_attached_read_only() -> None:
    with HostPool.shared(CONFIG, torch.bfloat16) as owner:
        fd = os.open(f"/proc/self/fd/{owner.fd}", os.O_RDONLY | os.O_CLOEXEC)
        owner.units.fill_(2)
        with HostPool.attach(fd, CONFIG, torch.bfloat16) as attached:
            assert (attached.units == 2).all()
        with pytest.raises(ConfigError, match=r"^host_pool_bytes: expected a size that can be mapped"):
            HostPool.attach(fd, CONFIG, torch.bfloat16, writable=True)
        os.close(fd)


@pytest.mark.parametrize("num_blocks", [CONFIG.num_blocks - 1, CONFIG.num_blocks + 1])
def test_attaching_with_another_size_is_refused(num_blocks: int) -> None:
    config = replace(CONFIG, num_blocks=num_blocks)
    message = rf"^fd: expected a host pool of {config.total_bytes} bytes, got {CONFIG.total_bytes}$"
    with (
        HostPool.shared(CONFIG, torch.bfloat16) as owner,
        no_descriptor_left(),
        pytest.raises(ConfigError, match=message),
    ):
        HostPool.attach(owner.fd, config, torch.bfloat16)


def test_attaching_what_can_still_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, CONFIG.total_bytes)
    with (
        no_descriptor_left(),
        pytest.raises(ConfigError, match=r"^fd: expected a size sealed with 0x7, got seals 0x0$"),
    ):
        HostPool.attach(fd, CONFIG, torch.bfloat16)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == 0
    os.close(fd)


def test_attaching_a_file_on_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(CONFIG.total_bytes))
    with (
        path.open("r+b") as file,
        pytest.raises(ConfigError, match=r"^fd: expected a file in memory with a sealed size"),
    ):
        HostPool.attach(file.fileno(), CONFIG, torch.bfloat16)


def run_child(owner: HostPool, code: str, answer: Callable[[socket.socket], Any]) -> tuple[int, Any]:
    """Run code in another process that gets `owner.fd` over a unix socket as `fd`; return its status and the answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    prelude = f"""
import socket, torch
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.engine.host_pool import HostPool
config = {owner.config!r}
connection = socket.socket(fileno={theirs.fileno()})
_, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
"""
    with ours, subprocess.Popen([sys.executable, "-c", prelude + code], pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        socket.send_fds(ours, [b"p"], [owner.fd])
        result = answer(ours)
        return child.wait(), result


def test_another_process_attaches_and_writes() -> None:
    def exchange(connection: socket.socket) -> int:
        (total,) = array.array("q", connection.recv(8, socket.MSG_WAITALL))
        return total

    with HostPool.shared(CONFIG, torch.bfloat16) as owner:
        owner.units.copy_(noise(CONFIG, torch.bfloat16))
        expected = int(bytes_of(owner.units).sum())
        code = """
with HostPool.attach(fd, config, torch.bfloat16, writable=True) as pool:
    total = int(pool.units.view(-1).view(torch.uint8).sum())
    pool.units[-1].fill_(9)
    connection.send(total.to_bytes(8, "little"))
"""
        status, total = run_child(owner, code, exchange)
        assert (status, total) == (0, expected)
        assert (owner.units[-1] == 9).all()


def test_a_write_to_a_read_only_pool_ends_the_writer_and_changes_nothing() -> None:
    with HostPool.shared(CONFIG, torch.bfloat16) as owner:
        owner.units.fill_(4)
        code = """
pool = HostPool.attach(fd, config, torch.bfloat16)
assert (pool.units == 4).all()
connection.send(b"r")
pool.units[0, 0, 0, 0, 0] = 9
"""
        status, read = run_child(owner, code, lambda connection: connection.recv(1))
        assert (status, read) == (-signal.SIGSEGV, b"r")
        assert (owner.units == 4).all()


@BACKINGS
def test_neither_a_fork_nor_a_core_dump_copies_the_pool(make: Make) -> None:
    with make(CONFIG, torch.bfloat16) as pool:
        _, mapping = Path("/proc/self/smaps").read_text().split(f"\n{pool.units.data_ptr():x}-", 1)
        flags = re.search(r"^VmFlags: (.*)$", mapping, re.MULTILINE)
        assert flags is not None
        assert {"dc", "dd"} <= set(flags[1].split())


class FakeCudart:
    """Keeps what is registered, by address; refuses everything where it is told to."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self.has_room = True

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.has_room or address in self.registered:
            return 2
        self.registered[address] = (num_bytes, flags)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    cudart = FakeCudart()
    monkeypatch.setattr(host_pool, "_cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return cudart


@BACKINGS
def test_pinning_registers_all_bytes_until_close(make: Make, cudart: FakeCudart) -> None:
    with make(CONFIG, torch.bfloat16, pin=True) as pool:
        assert cudart.registered == {pool.units.data_ptr(): (CONFIG.total_bytes, host_pool.REGISTER_PORTABLE)}
    assert cudart.registered == {}


@BACKINGS
def test_a_pool_that_is_dropped_unclosed_is_unregistered(make: Make, cudart: FakeCudart) -> None:
    with no_descriptor_left():
        pool = make(CONFIG, torch.bfloat16, pin=True)
        assert len(cudart.registered) == 1
        del pool
        assert cudart.registered == {}


@BACKINGS
def test_memory_that_cannot_be_registered_is_refused_and_nothing_is_held(
    make: Make, cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    cudart.has_room = False
    before = resident_bytes()
    with no_descriptor_left(), pytest.raises(ConfigError) as error:
        make(LARGE, torch.bfloat16, pin=True)
    assert str(error.value) == (
        f"host_pool_bytes: expected memory that CUDA can register, got {LARGE.total_bytes} bytes: error 2"
    )
    # Also while the error, and with it every frame of the call, is still at hand.
    assert resident_bytes() - before <= NOISE_BYTES
    assert caplog.records == []


@pytest.mark.parametrize("writable", [False, True])
def test_an_attached_pool_is_registered_for_what_it_may_do(writable: bool, cudart: FakeCudart) -> None:
    with HostPool.shared(CONFIG, torch.bfloat16) as owner:
        with HostPool.attach(owner.fd, CONFIG, torch.bfloat16, writable=writable, pin=True) as attached:
            ((num_bytes, flags),) = cudart.registered.values()
            assert attached.units.data_ptr() in cudart.registered
            assert num_bytes == CONFIG.total_bytes
            assert bool(flags & host_pool.REGISTER_READ_ONLY) is not writable
        assert cudart.registered == {}


def test_memory_that_cuda_does_not_let_go_is_logged_and_returned(
    cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool.private(LARGE, torch.bfloat16, pin=True)
    cudart.registered.clear()
    held = resident_bytes()
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert [record.getMessage() for record in caplog.records] == ["CUDA did not unregister a host pool: error 1"]
    assert held - resident_bytes() >= LARGE.total_bytes - NOISE_BYTES


@BACKINGS
def test_threads_that_touch_first_are_bound_to_the_named_cpus_and_nobody_else(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, cpu = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def bind(process: int, cpus: set[int]) -> None:
        real(process, cpus)
        seen.append(os.sched_getaffinity(0))

    real = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    with make(LARGE, torch.float16, cpus={cpu}) as pool:
        assert seen == [{cpu}]
        assert not pool.units.any()
    assert os.sched_getaffinity(0) == before


def test_a_pool_is_made_where_threads_may_not_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: int, cpus: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with HostPool.private(CONFIG, torch.float16, cpus={0}) as pool:
        assert not pool.units.any()
