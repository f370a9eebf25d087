"""The host memory of one worker: the units of every host block, written by write-through and read by the transfer.

Which block belongs to whom is decided by `oasiskv.core.host_blocks` on the scheduler side; a worker only maps bytes.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.kernels.formats import FP8, WIDE

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called with the bytes that are ready and the bytes in all, in the thread that makes the pool."""

DTYPES = (*WIDE, FP8, torch.uint8)
"""Of the elements; bytes where units are fp8 with scales of their own."""
CHUNK_BYTES = 256 * 2**20
"""What a thread touches at a time; a multiple of the huge page size."""
MAX_THREADS = 16

# Growing is forbidden too: a pool has one size for all its life, so that checking it once on attaching is enough.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices, not only the current one
REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly: without it CUDA refuses a mapping that cannot be written


class HostPool:
    """The units of all host blocks in one tensor; made by `private`, `shared` or `attach`, ended by `close` or `with`.

    The mapping lives as long as the pool is open or any view of `units` is alive: a forgotten view never dangles. A
    forked child does not inherit it.
    """

    def __init__(self, config: HostPoolConfig, units: torch.Tensor, fd: int | None, resources: ExitStack) -> None:
        self.config = config
        self._units: torch.Tensor | None = units
        self._fd = fd
        self._resources = resources

    @classmethod
    def private(
        cls,
        config: HostPoolConfig,
        dtype: torch.dtype,
        *,
        pin: bool = False,
        report: Report | None = None,
        cpus: Collection[int] = (),
    ) -> Self:
        """Take memory of this process; all of it is touched, so none is found missing later.

        Args:
            config: Shape of the pool.
            dtype: Type of the elements, as large as the config says.
            pin: Register the memory with CUDA, so that copies are asynchronous and kernels can read it.
            report: Progress callback.
            cpus: CPUs on whose memory node the pool is to lie; none for any.

        Raises:
            ConfigError: The memory cannot be mapped or registered, or dtype and config differ; nothing is held.
            UnsupportedError: The dtype is not handled, or `pin` without a CUDA device; nothing is held.
        """
        _check(config, dtype, pin=pin)
        with ExitStack() as resources:
            mapping = _map(resources, -1, config, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, writable=True)
            _touch(mapping, report, cpus)
            if pin:
                _register(resources, mapping, REGISTER_PORTABLE)
            return cls(config, _as_units(mapping, config, dtype, writable=True), None, resources.pop_all())

    @classmethod
    def shared(
        cls,
        config: HostPoolConfig,
        dtype: torch.dtype,
        *,
        pin: bool = False,
        report: Report | None = None,
        cpus: Collection[int] = (),
    ) -> Self:
        """Take memory that other processes can attach to through `fd`; otherwise as `private`.

        The file has no name and its size is sealed, so nobody who holds the descriptor can pull pages away.
        """
        _check(config, dtype, pin=pin)
        with ExitStack() as resources:
            fd = os.memfd_create("oasiskv-host-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            resources.callback(os.close, fd)
            _seal_size(fd, config)
            mapping = _map(resources, fd, config, flags=mmap.MAP_SHARED, writable=True)
            _touch(mapping, report, cpus)
            if pin:
                _register(resources, mapping, REGISTER_PORTABLE)
            return cls(config, _as_units(mapping, config, dtype, writable=True), fd, resources.pop_all())

    @classmethod
    def attach(
        cls, fd: int, config: HostPoolConfig, dtype: torch.dtype, *, writable: bool = False, pin: bool = False
    ) -> Self:
        """Map the shared pool of another process.

        torch knows no read-only tensors: without `writable`, a write to `units` ends this process with SIGSEGV.

        Args:
            fd: Descriptor of the pool; duplicated, so the caller keeps its own.
            config: Shape of the pool, as its owner made it.
            dtype: Type of the elements, as its owner made it.
            writable: Whether this process may write too.
            pin: Register the memory with CUDA for this process.

        Raises:
            ConfigError: `fd` is no shared pool of this size, or cannot be mapped or registered; nothing is held.
            UnsupportedError: The dtype is not handled, or `pin` without a CUDA device; nothing is held.
        """
        _check(config, dtype, pin=pin)
        with ExitStack() as resources:
            own_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
            resources.callback(os.close, own_fd)
            _check_shared(own_fd, config)
            mapping = _map(resources, own_fd, config, flags=mmap.MAP_SHARED, writable=writable)
            if pin:
                _register(resources, mapping, REGISTER_PORTABLE | (0 if writable else REGISTER_READ_ONLY))
            return cls(config, _as_units(mapping, config, dtype, writable=writable), own_fd, resources.pop_all())

    @property
    def units(self) -> torch.Tensor:
        """`[num_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]` on the CPU, contiguous, K|V per token.

        The bytes of a host block are contiguous, and so are those of a unit. A pool of fp8 units is
        `uint8[num_blocks, num_layers, part_bytes]`; `kernels.fp8.reference.views` tells where units and scales lie.
        """
        if self._units is None:
            raise RuntimeError("the host pool is closed")
        return self._units

    @property
    def fd(self) -> int:
        """Descriptor for `attach` in another process, open until `close`; it gives the right to write too."""
        if self._units is None:
            raise RuntimeError("the host pool is closed")
        if self._fd is None:
            raise UnsupportedError("fd: expected a shared host pool, got a private one")
        return self._fd

    def close(self) -> None:
        """Wait for the device, unregister and unmap the memory, close the descriptor; closing again changes nothing.

        Where views of `units` are still alive, the memory is returned with the last of them; it is not pinned any more.
        """
        self._units = None
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The mapping goes with the last reference anyway; were it still registered then, CUDA would refuse to register
        # the next mapping that gets the same addresses.
        if not sys.is_finalizing():
            self.close()


def _check(config: HostPoolConfig, dtype: torch.dtype, *, pin: bool) -> None:
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype: expected one of {DTYPES}, got {dtype}")
    if dtype.itemsize != config.dtype_bytes:
        raise ConfigError(f"dtype: expected {config.dtype_bytes} bytes per element, got {dtype}")
    if (dtype == FP8) != config.is_fp8_cache:
        raise ConfigError(f"dtype: expected {FP8} for an fp8 cache and nothing else, got {dtype}")
    if pin and not torch.cuda.is_available():
        raise UnsupportedError("pin: expected a CUDA device, got none")


def _seal_size(fd: int, config: HostPoolConfig) -> None:
    try:
        os.ftruncate(fd, config.total_bytes)
    except OSError as cause:
        raise ConfigError(f"host_pool_bytes: expected a size that can be shared, got {config.total_bytes}") from cause
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def _check_shared(fd: int, config: HostPoolConfig) -> None:
    status = os.fstat(fd)
    num_bytes = status.st_size
    # A file of huge pages ends with a whole one; of such a file the block size is that of a page.
    rounded = -(-config.total_bytes // status.st_blksize) * status.st_blksize
    if num_bytes not in (config.total_bytes, rounded):
        raise ConfigError(f"fd: expected a host pool of {config.total_bytes} bytes, got {num_bytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as cause:
        raise ConfigError("fd: expected a file in memory with a sealed size, got another kind of file") from cause
    # Whoever may shrink the file can kill every process that maps it.
    if seals & SEALS != SEALS:
        raise ConfigError(f"fd: expected a size sealed with {SEALS:#x}, got seals {seals:#x}")


def _map(resources: ExitStack, fd: int, config: HostPoolConfig, *, flags: int, writable: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    try:
        # All of the file: huge pages can be unmapped only whole.
        num_bytes = config.total_bytes if fd < 0 else os.fstat(fd).st_size
        mapping = mmap.mmap(fd, num_bytes, flags=flags, prot=protection)
    except OSError as cause:
        raise ConfigError(f"host_pool_bytes: expected a size that can be mapped, got {config.total_bytes}") from cause
    resources.callback(_unmap, mapping)
    # Huge pages make touching and registering faster; a fork would copy pinned pages at once, a core dump write them.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel may be built without one of them
            mapping.madvise(advice)
    return mapping


def _unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        logger.warning(
            "views of a closed host pool are still in use: its %d bytes are returned with the last of them",
            len(mapping),
        )


def _touch(mapping: mmap.mmap, report: Report | None, cpus: Collection[int]) -> None:
    """Write to every page from several threads, on some CPUs if any are named.

    A page lies on the memory node of the thread that touches it first.
    """

    def bind() -> None:
        if cpus:
            with contextlib.suppress(OSError):  # memory elsewhere serves too
                os.sched_setaffinity(0, cpus)  # of this thread alone

    def touch_chunk(start: int) -> int:
        chunk = np.frombuffer(mapping, np.uint8)[start : start + CHUNK_BYTES]
        chunk[:: mmap.PAGESIZE] = 0
        return chunk.size

    num_threads = min(MAX_THREADS, len(cpus or os.sched_getaffinity(0)))
    ready_bytes = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="host-pool", initializer=bind) as threads:
        chunks = [threads.submit(touch_chunk, start) for start in range(0, len(mapping), CHUNK_BYTES)]
        try:
            for chunk in as_completed(chunks):
                ready_bytes += chunk.result()
                if report is not None:
                    report(ready_bytes, len(mapping))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _as_units(mapping: mmap.mmap, config: HostPoolConfig, dtype: torch.dtype, *, writable: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        if not writable:
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        # torch keeps the object it is given alive but not its buffer: from the mapping itself, `mapping.close()` would
        # unmap under a live tensor. A memoryview holds the buffer, so that `close` raises BufferError instead.
        flat = torch.frombuffer(memoryview(mapping)[: config.total_bytes], dtype=dtype)
    if config.is_fp8:
        return flat.view(config.num_blocks, config.num_layers, config.part_bytes)
    return flat.view(config.num_blocks, config.num_layers, config.num_kv_heads, config.block_size, 2 * config.head_dim)


def _register(resources: ExitStack, mapping: mmap.mmap, flags: int) -> None:
    """Register with CUDA as one piece: a copy over the edge of two registrations is refused, however near they lie.

    Once the pages are touched, many pieces on many threads are hardly faster: on an H200 host 24 GiB took 0.77 s in one
    piece and 0.66 s in 96.
    """
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    error = _call_cuda("cudaHostRegister", address, len(mapping), flags)
    if error is not None:
        raise ConfigError(f"host_pool_bytes: expected memory that CUDA can register, got {len(mapping)} bytes: {error}")
    resources.callback(_unregister, address)


def _unregister(address: int) -> None:
    torch.cuda.synchronize()
    error = _call_cuda("cudaHostUnregister", address)
    if error is not None:
        logger.warning("CUDA did not unregister a host pool: %s", error)


def _call_cuda(name: str, *arguments: int) -> str | None:
    """Call a function of the CUDA runtime and return None, or why it failed.

    CUDA remembers a failure for the thread it happened in, and torch raises it at whatever that thread does next. So
    the call has a thread of its own; that starts on device 0, where a context would be made for nothing.
    """
    cudart = _cudart()
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        error = thread.submit(getattr(cudart, name), *arguments).result()
    return None if error == cudart.cudaError.success else str(cudart.cudaGetErrorString(error))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
