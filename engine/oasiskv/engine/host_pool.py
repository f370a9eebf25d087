"""The host memory of one worker: the units of every host block, written by write-through and read by the transfer.

Which block belongs to whom is decided by `oasiskv.core.host_blocks` on the scheduler side; a worker only maps bytes.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import HostPoolConfig

logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, in the thread that makes the pool."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_BYTES = 256 * 2**20
"""What one thread touches and registers at a time; a multiple of the huge page size."""
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

    def __init__(
        self, config: HostPoolConfig, dtype: torch.dtype, mapping: mmap.mmap, *, writable: bool, fd: int | None
    ) -> None:
        self.config = config
        self._mapping = mapping
        self._fd = fd
        self._units: torch.Tensor | None = _as_units(mapping, config, dtype, writable=writable)
        self._registered: set[int] = set()
        """Offsets of the chunks that CUDA has registered."""

    @classmethod
    def private(
        cls, config: HostPoolConfig, dtype: torch.dtype, *, pin: bool = False, report: Report | None = None
    ) -> Self:
        """Take memory of this process; all pages are touched, so none is found missing later.

        Args:
            config: Shape of the pool.
            dtype: Type of the elements, as large as the config says.
            pin: Register the memory with CUDA, so that copies are asynchronous and kernels can read it.
            report: Progress callback.

        Raises:
            ConfigError: The memory cannot be mapped or registered, or dtype and config differ; nothing is held.
            UnsupportedError: The dtype is not handled, or `pin` without a CUDA device; nothing is held.
        """
        _check(config, dtype, pin=pin)
        mapping = _map(-1, config, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, writable=True)
        pool = cls(config, dtype, mapping, writable=True, fd=None)
        return pool._prepare(touch=True, register_flags=REGISTER_PORTABLE if pin else None, report=report)

    @classmethod
    def shared(
        cls, config: HostPoolConfig, dtype: torch.dtype, *, pin: bool = False, report: Report | None = None
    ) -> Self:
        """Take memory that other processes can attach to through `fd`; otherwise as `private`.

        The file has no name and its size is sealed, so nobody who holds the descriptor can pull pages away.
        """
        _check(config, dtype, pin=pin)
        fd = os.memfd_create("oasiskv-host-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _resize(fd, config)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            mapping = _map(fd, config, flags=mmap.MAP_SHARED, writable=True)
        except BaseException:
            os.close(fd)
            raise
        pool = cls(config, dtype, mapping, writable=True, fd=fd)
        return pool._prepare(touch=True, register_flags=REGISTER_PORTABLE if pin else None, report=report)

    @classmethod
    def attach(
        cls,
        fd: int,
        config: HostPoolConfig,
        dtype: torch.dtype,
        *,
        writable: bool = False,
        pin: bool = False,
        report: Report | None = None,
    ) -> Self:
        """Map the shared pool of another process.

        torch knows no read-only tensors: without `writable`, a write to `units` ends this process with SIGSEGV.

        Args:
            fd: Descriptor of the pool; duplicated, so the caller keeps its own.
            config: Shape of the pool, as its owner made it.
            dtype: Type of the elements, as its owner made it.
            writable: Whether this process may write too.
            pin: Register the memory with CUDA for this process.
            report: Progress callback; called only when pinning.

        Raises:
            ConfigError: `fd` is no shared pool of this size, or cannot be mapped or registered; nothing is held.
            UnsupportedError: The dtype is not handled, or `pin` without a CUDA device; nothing is held.
        """
        _check(config, dtype, pin=pin)
        own_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            _check_shared(own_fd, config)
            mapping = _map(own_fd, config, flags=mmap.MAP_SHARED, writable=writable)
        except BaseException:
            os.close(own_fd)
            raise
        pool = cls(config, dtype, mapping, writable=writable, fd=own_fd)
        flags = REGISTER_PORTABLE if writable else REGISTER_PORTABLE | REGISTER_READ_ONLY
        return pool._prepare(touch=False, register_flags=flags if pin else None, report=report)

    @property
    def units(self) -> torch.Tensor:
        """`[num_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]` on the CPU, contiguous, K|V per token.

        The bytes of a host block are contiguous, and so are those of a unit.
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
        if self._units is None:
            return
        address, self._units = self._units.data_ptr(), None
        try:
            self._unregister(address)
        finally:
            if self._fd is not None:
                os.close(self._fd)
            try:
                self._mapping.close()
            except BufferError:
                logger.warning(
                    "views of a closed host pool are still in use: its %d bytes are returned with the last of them",
                    self.config.total_bytes,
                )
                del self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, *, touch: bool, register_flags: int | None, report: Report | None) -> Self:
        """Touch all pages and register them with CUDA, as wanted; on any error the pool is closed."""
        address = self.units.data_ptr()

        def prepare_chunk(start: int, stop: int) -> None:
            if touch:
                np.frombuffer(self._mapping, np.uint8)[start : stop : mmap.PAGESIZE] = 0
            if register_flags is not None:
                error = _cudart().cudaHostRegister(address + start, stop - start, register_flags)
                if error != _cudart().cudaError.success:
                    raise ConfigError(
                        f"host_pool_bytes: expected {self.config.total_bytes} bytes that CUDA can register, "
                        f"got {error!s} at byte {start}"
                    )
                self._registered.add(start)

        try:
            if touch or register_flags is not None:
                self._for_each_chunk(prepare_chunk, uses_cuda=register_flags is not None, report=report)
        except BaseException:
            self.close()
            raise
        return self

    def _unregister(self, address: int) -> None:
        if not self._registered:
            return
        torch.cuda.synchronize()

        def unregister_chunk(start: int, stop: int) -> None:
            if start in self._registered:
                error = _cudart().cudaHostUnregister(address + start)
                if error != _cudart().cudaError.success:
                    logger.warning("CUDA did not unregister the host pool at byte %d: %s", start, error)

        self._for_each_chunk(unregister_chunk, uses_cuda=True)

    def _for_each_chunk(
        self, work: Callable[[int, int], None], *, uses_cuda: bool, report: Report | None = None
    ) -> None:
        """Run `work(start, stop)` for each chunk on threads, and report in this one.

        A page lies on the memory node of the thread that touches it first: to bind a pool, bind these threads.
        """
        total_bytes = self.config.total_bytes
        # A new thread starts on device 0, where CUDA would make a context that nobody uses.
        set_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if uses_cuda else None
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        done_bytes = 0
        with ThreadPoolExecutor(num_threads, thread_name_prefix="host-pool", initializer=set_device) as threads:
            chunks = {}
            for start in range(0, total_bytes, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, total_bytes)
                chunks[threads.submit(work, start, stop)] = stop - start
            try:
                for chunk in as_completed(chunks):
                    chunk.result()
                    done_bytes += chunks[chunk]
                    if report is not None:
                        report(done_bytes, total_bytes)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise


def _check(config: HostPoolConfig, dtype: torch.dtype, *, pin: bool) -> None:
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype: expected one of {DTYPES}, got {dtype}")
    if dtype.itemsize != config.dtype_bytes:
        raise ConfigError(f"dtype: expected {config.dtype_bytes} bytes per element, got {dtype}")
    if pin and not torch.cuda.is_available():
        raise UnsupportedError("pin: expected a CUDA device, got none")


def _check_shared(fd: int, config: HostPoolConfig) -> None:
    num_bytes = os.fstat(fd).st_size
    if num_bytes != config.total_bytes:
        raise ConfigError(f"fd: expected a host pool of {config.total_bytes} bytes, got {num_bytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as cause:
        raise ConfigError("fd: expected a file in memory with a sealed size, got another kind of file") from cause
    # Whoever may shrink the file can kill every process that maps it.
    if seals & SEALS != SEALS:
        raise ConfigError(f"fd: expected a size sealed with {SEALS:#x}, got seals {seals:#x}")


def _resize(fd: int, config: HostPoolConfig) -> None:
    try:
        os.ftruncate(fd, config.total_bytes)
    except OSError as cause:
        raise ConfigError(f"host_pool_bytes: expected a size that can be shared, got {config.total_bytes}") from cause


def _map(fd: int, config: HostPoolConfig, *, flags: int, writable: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    try:
        mapping = mmap.mmap(fd, config.total_bytes, flags=flags, prot=protection)
    except OSError as cause:
        raise ConfigError(f"host_pool_bytes: expected a size that can be mapped, got {config.total_bytes}") from cause
    # Huge pages make touching and registering faster; a fork would copy pinned pages at once, a core dump write them.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel may be built without one of them
            mapping.madvise(advice)
    return mapping


def _as_units(mapping: mmap.mmap, config: HostPoolConfig, dtype: torch.dtype, *, writable: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        if not writable:
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        # torch keeps the object it is given alive but not its buffer: from the mapping itself, `mapping.close()` would
        # unmap under a live tensor. A memoryview holds the buffer, so that `close` raises BufferError instead.
        flat = torch.frombuffer(memoryview(mapping), dtype=dtype)
    return flat.view(config.num_blocks, config.num_layers, config.num_kv_heads, config.block_size, 2 * config.head_dim)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
