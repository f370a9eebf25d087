"""The bytes of the pool: shared memory that peers map, and the hand-over of its descriptors over a unix socket."""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import ConfigError, InvalidRequestError, OasisError
from oasiskv.core.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

# Nobody who holds a descriptor may pull pages away from those who map them.
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
F_SEAL_FUTURE_WRITE = 0x10  # not in the fcntl module of Python 3.11
TOUCH_BYTES = 64 * 2**20
REQUIRED_PAGES = {"2MiB": (2**21, os.MFD_HUGE_2MB), "1GiB": (2**30, os.MFD_HUGE_1GB)}
"""Bytes of a page and the flag that asks for it, by setting; without such pages the service does not start."""
HUGE_PAGES = ("auto", "never", *REQUIRED_PAGES)
MEMINFO = Path("/proc/meminfo")
MAX_REQUEST_BYTES = 256
ACCEPT_RETRY_S = 0.5


class StagingMemory:
    """Blocks and their generations, each in a file in memory without a name; ended by `close`.

    Who has only a reading descriptor of the blocks can never map them to write, unless it runs as the same user as the
    service and opens the file anew through /proc. Nobody but the service can ever write a generation.
    """

    def __init__(self, fingerprint: Fingerprint, num_blocks: int, huge_pages: str = "never") -> None:
        """Take the memory; all of it is touched, so none is found missing later.

        The kernel kills processes where there is not enough, so the caller checks that first.

        Args:
            fingerprint: Shape of a block.
            num_blocks: How many.
            huge_pages: One of `HUGE_PAGES`; with auto, small ones are taken where huge ones cannot be had.

        Raises:
            ConfigError: A file cannot be as large as that, or there are too few pages of the size that is said; nothing
                is held.
        """
        num_bytes = num_blocks * fingerprint.block_bytes
        with contextlib.ExitStack() as resources:
            page_bytes, self.reason = _page_bytes(huge_pages, num_bytes)
            """Why the pages have the size they have."""
            _, size_flag = REQUIRED_PAGES.get(huge_pages, (0, 0))
            self.blocks_fd = _create(resources, "oasiskv-staging-blocks", num_bytes, page_bytes, size_flag)
            self.generations_fd = _create(resources, "oasiskv-staging-generations", num_blocks * 8)
            try:
                blocks = _map(resources, self.blocks_fd)
            except OSError as cause:  # pages are set aside for a file when it is mapped
                raise ConfigError(f"huge_pages: expected {self.reason} to be free, got {cause.strerror}") from cause
            generations = _map(resources, self.generations_fd)
            _touch(blocks)
            fcntl.fcntl(self.blocks_fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
            fcntl.fcntl(self.generations_fd, fcntl.F_ADD_SEALS, SIZE_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self.reading_fd = os.open(f"/proc/self/fd/{self.blocks_fd}", os.O_RDONLY | os.O_CLOEXEC)
            resources.callback(os.close, self.reading_fd)
            self._resources = resources.pop_all()
        self.parts: NDArray[np.uint8] = np.frombuffer(blocks, np.uint8, num_bytes).reshape(
            num_blocks, fingerprint.num_parts, fingerprint.part_bytes
        )
        """`[num_blocks, num_parts, part_bytes]`."""
        self.generations: NDArray[np.uint64] = np.frombuffer(generations, np.uint64)
        """`[num_blocks]`, by block id."""
        self.checksums: NDArray[np.uint64] = np.zeros((num_blocks, fingerprint.num_parts), np.uint64)
        """`[num_blocks, num_parts]`, of sealed blocks."""
        self.is_corrupt: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        """`[num_blocks]`, of blocks whose bytes were found to be wrong, until they get new content."""
        self._is_dirty = np.zeros(num_blocks, np.bool_)

    def take(self, block_ids: Sequence[int]) -> None:
        """Note that blocks get new content, all of it."""
        self.is_corrupt[block_ids] = False
        self._is_dirty[block_ids] = True

    def clear(self, block_ids: Iterable[int]) -> None:
        """Set blocks to 0 that were given out since they were last set to it."""
        for block_id in block_ids:
            if self._is_dirty[block_id]:
                self.parts[block_id] = 0
                self._is_dirty[block_id] = False

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Give blocks out with all bytes 0."""
        self.clear(block_ids)
        self._is_dirty[block_ids] = True

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last mapping, of this process and of others."""
        self._resources.close()


class MemorySocket:
    """Hands the memory to processes of registered peers, and notices when such a process ends.

    A process connects, sends its peer id and a newline, and gets `ok` with two descriptors, of the blocks and of the
    generations, or `error`, a class and a message. It keeps the connection for as long as it maps the memory: the
    kernel closes it whenever the process ends, however it ends.
    """

    def __init__(
        self, path: Path, memory: StagingMemory, open_link: Callable[[str], bool], close_link: Callable[[str], None]
    ) -> None:
        """Prepare; nothing listens before `start`.

        Args:
            path: Where to listen.
            memory: What to hand over.
            open_link: Called with a peer id; returns whether the peer may write, or raises an OasisError.
            close_link: Called when a process whose link was opened has ended.
        """
        self._path = path
        self._memory = memory
        self._open_link = open_link
        self._close_link = close_link
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The path cannot be listened on.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # What an earlier process left behind; a live one is told by connecting to it.
            if self._path.is_socket():
                with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
                    probe.connect(str(self._path))
                    raise OSError("another process listens there")
                self._path.unlink()
            listener.bind(str(self._path))
            listener.listen()
        except OSError as cause:
            listener.close()
            raise ConfigError(
                f"memory_socket: expected a path to listen on, got {str(self._path)!r}: {cause}"
            ) from cause
        self._socket = listener
        self._start_task(self._accept(listener))

    async def stop(self) -> None:
        """Close all connections and remove the socket; who maps the memory keeps it."""
        if self._socket is None:
            return
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._socket = None
        self._path.unlink(missing_ok=True)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files: later there may be fewer
                logger.warning("no memory can be handed over: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
            else:
                self._start_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(5.0):
                    peer_id = await _read_line(loop, connection)
                may_write = self._open_link(peer_id)
            except (OasisError, OSError, TimeoutError) as error:
                with contextlib.suppress(OSError):
                    connection.send(f"error {type(error).__name__} {error}\n".encode())
                return
            try:
                blocks_fd = self._memory.blocks_fd if may_write else self._memory.reading_fd
                socket.send_fds(connection, [b"ok\n"], [blocks_fd, self._memory.generations_fd])
                while await loop.sock_recv(connection, 1):
                    pass
            except OSError as error:
                logger.info("a peer's memory link broke: %s", error)
            finally:
                self._close_link(peer_id)


async def _read_line(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        data = await loop.sock_recv(connection, MAX_REQUEST_BYTES)
        line += data
        if not data or len(line) > MAX_REQUEST_BYTES:
            raise InvalidRequestError("peer_id: expected a peer id and a newline")
    return line[:-1].decode("ascii", errors="replace")


def _page_bytes(setting: str, num_bytes: int) -> tuple[int | None, str]:
    """Return the size of huge pages to use, None for small ones, and why."""
    if setting == "never":
        return None, "small pages: the configuration says never"
    if setting in REQUIRED_PAGES:
        page_bytes, _ = REQUIRED_PAGES[setting]
        return page_bytes, f"{-(-num_bytes // page_bytes)} huge pages of {page_bytes} bytes"
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    page_bytes = found.get("Hugepagesize", 0) * 1024
    num_needed = -(-num_bytes // page_bytes) if page_bytes else 0
    num_there = found.get("HugePages_Free", 0) - found.get("HugePages_Rsvd", 0)
    if not page_bytes or num_there < num_needed:
        return None, f"small pages: {num_needed} huge ones of {page_bytes} bytes are needed, {num_there} are set aside"
    return page_bytes, f"{num_needed} huge pages of {page_bytes} bytes"


def _create(
    resources: contextlib.ExitStack, name: str, num_bytes: int, huge_page_bytes: int | None = None, size_flag: int = 0
) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | size_flag
        num_bytes = -(-num_bytes // huge_page_bytes) * huge_page_bytes
    try:
        fd = os.memfd_create(name, flags)
    except OSError as cause:  # of a size of pages that the kernel does not have
        raise ConfigError(f"huge_pages: expected a size that this kernel has, got {cause.strerror}") from cause
    resources.callback(os.close, fd)
    # Other users cannot open it anew to write; only whom it is handed to has it at all.
    os.fchmod(fd, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
    except OSError as cause:
        raise ConfigError(f"num_blocks: expected a pool that one file can hold, got {num_bytes} bytes") from cause
    return fd


def _map(resources: contextlib.ExitStack, fd: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel may be built without one of them
            mapping.madvise(advice)
    return mapping


def _touch(mapping: mmap.mmap) -> None:
    flat = np.frombuffer(mapping, np.uint8)
    for start in range(0, len(flat), TOUCH_BYTES):
        flat[start : start + TOUCH_BYTES : mmap.PAGESIZE] = 0
