"""The file of the SSD tier: slots of one block each, whose root record is written last; next is `disk_tier`.

    file = superblock | slot | slot | ...        slot = root record | bytes of a block | padding

Who writes a slot first zeroes its root record together with the data, then writes the record: a process that is killed
leaves a block whole or not there. Where power fails, the device may have kept the two out of order; then the checksums
differ, and reading says so.
"""

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import MAX_KEY_BYTES
from oasiskv.core.tiers import BlockStatus
from oasiskv.services.checksums import checksums

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
# What direct I/O asks of addresses, offsets and lengths; no device in use wants more.
ALIGNMENT = 4096
PREFIX = "oasiskv-"
NEW_SUFFIX = ".new"
SUPERBLOCK_MAGIC = b"OASISKV-BLOCKS\n\0"
ROOT_MAGIC = b"OKVROOT\0"
ROOT = struct.Struct("<8sQII")
"""Magic, generation, bytes of the key, parts; then the key, a checksum per part, and the checksum of all this."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Where the SSD tier is, and how large."""

    folder: str
    """Folder on the SSD, for one service at a time; one file in it holds the blocks of one fingerprint."""

    max_bytes: int
    """Most bytes of that file; all of them are reserved at the start."""

    use_direct_io: bool = True
    """Whether to pass by the page cache, whose copy of a block would only take memory from the pool."""

    num_readers: int = 8
    """Blocks that are read at a time."""

    max_wait_s: float = 5.0
    """Seconds that a lease waits for those before it to have read; a device that hangs must not hold up every lease."""

    num_writers: int = 4
    """Blocks that are written at a time; fewer than are read, since nobody waits for them."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        if not isinstance(self.folder, str) or not self.folder:
            raise ConfigError(f"folder: expected the path of a folder, got {self.folder!r}")
        for name in ("max_bytes", "num_readers", "num_writers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"{name}: expected a positive integer, got {value!r}")
        if not self.max_wait_s > 0:
            raise ConfigError(f"max_wait_s: expected a positive number, got {self.max_wait_s!r}")


class DiskFile:
    """The slots of one file, which this process has for itself; made by `open`, ended by `close`.

    All methods may be called from any thread. None of them raises for what a device does: they say what became of the
    block.
    """

    def __init__(self, fd: int, path: Path, fingerprint: Fingerprint, num_slots: int) -> None:
        self.path = path
        self.num_slots = num_slots
        self._fd = fd
        self._fingerprint = fingerprint
        self._root_bytes = _root_bytes(fingerprint)
        self._slot_bytes = slot_bytes(fingerprint)
        # Blocks in the pool are aligned where their size is; others go through a buffer of the thread.
        self._is_aligned = fingerprint.block_bytes % ALIGNMENT == 0
        self._buffers = threading.local()

    @classmethod
    def open(cls, config: DiskConfig, fingerprint: Fingerprint) -> "DiskFile":
        """Open the file of a fingerprint, or make it, and remove what others that ended left in the folder.

        Raises:
            ConfigError: There is no room, the file is another process's or of another format, or the folder does not
                take direct I/O; nothing is held, and no file was changed.
        """
        num_slots = (config.max_bytes - ALIGNMENT) // slot_bytes(fingerprint)
        if num_slots < 1:
            least = ALIGNMENT + slot_bytes(fingerprint)
            raise ConfigError(f"disk.max_bytes: expected at least {least} for one block, got {config.max_bytes}")
        superblock = _superblock(fingerprint)
        name = xxhash.xxh3_64_hexdigest(json.dumps(asdict(fingerprint)).encode())
        path = Path(config.folder) / f"{PREFIX}{name}.blocks"
        try:
            folder_fd = os.open(config.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as cause:
            raise ConfigError(f"disk.folder: expected a folder, got {config.folder!r}: {cause}") from cause
        try:
            # Two that start at a time would each remove what the other is about to make.
            fcntl.flock(folder_fd, fcntl.LOCK_EX)
            _sweep(path)
            fd = _open_file(path, superblock, ALIGNMENT + num_slots * slot_bytes(fingerprint), config)
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)
        return cls(fd, path, fingerprint, num_slots)

    @property
    def reason(self) -> str:
        """How bytes reach the device, and why; as the kernel has the file open, whatever the setting says."""
        if fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
            return "direct I/O"
        return "through the page cache, since use_direct_io is false"

    def close(self) -> None:
        """Let another process have the file; no other method may be running."""
        os.close(self._fd)

    def scan(self, slots: range) -> list[tuple[int, bytes, int]]:
        """Return slot, block key and generation of each slot that has a root record."""
        found = []
        for slot in slots:
            root = self._buffer("root", self._root_bytes)
            try:
                is_whole = os.preadv(self._fd, [root], self._offset(slot)) == self._root_bytes
            except OSError as error:
                logger.warning("%s: slot %d is not readable: %s", self.path, slot, error)
                continue
            record = self._parse(root) if is_whole else None
            if record is not None:
                found.append((slot, record[0], record[1]))
        return found

    def write(
        self,
        slot: int,
        block_key: bytes,
        generation: int,
        parts: NDArray[np.uint8],
        sums: NDArray[np.uint64],
        is_current: Callable[[], bool],
    ) -> BlockStatus:
        """Write a block; found by a later `scan` only if it returns INTACT.

        Args:
            slot: Where to; what it held is gone, whatever comes of it.
            block_key: Key of the block.
            generation: Of the slot's content.
            parts: `[num_parts, part_bytes]`, in the pool.
            sums: `[num_parts]`, checksums of the parts.
            is_current: Asked after the data are written: whether `parts` still held that block.
        """
        root = self._buffer("root", self._root_bytes)
        root[:] = bytes(self._root_bytes)
        data = self._data(parts, is_read=False)
        try:
            if os.pwritev(self._fd, [root, data], self._offset(slot)) != self._slot_bytes:
                return BlockStatus.DISK_FULL
            if not is_current():
                return BlockStatus.STALE
            self._compose(root, block_key, generation, sums)
            if os.pwritev(self._fd, [root], self._offset(slot)) != self._root_bytes:
                return BlockStatus.IO_ERROR
        except OSError as error:
            logger.warning("%s: slot %d was not written: %s", self.path, slot, error)
            return BlockStatus.DISK_FULL if error.errno in FULL else BlockStatus.IO_ERROR
        return BlockStatus.INTACT

    def read(
        self, slot: int, block_key: bytes, generation: int, parts: NDArray[np.uint8]
    ) -> tuple[BlockStatus, NDArray[np.uint64]]:
        """Read a block into `parts`, `[num_parts, part_bytes]`, and return its checksums, `[num_parts]`.

        Anything may be in `parts` unless it returns INTACT: root record, key, generation and checksums are as written.
        """
        nothing = np.zeros(0, np.uint64)
        root = self._buffer("root", self._root_bytes)
        data = self._data(parts, is_read=True)
        try:
            num_read = os.preadv(self._fd, [root, data], self._offset(slot))
        except OSError as error:
            logger.warning("%s: slot %d is not readable: %s", self.path, slot, error)
            return BlockStatus.IO_ERROR, nothing
        if num_read != self._slot_bytes:
            logger.warning("%s: slot %d gave %d of %d bytes", self.path, slot, num_read, self._slot_bytes)
            return BlockStatus.IO_ERROR, nothing
        record = self._parse(root)
        if record is None or record[:2] != (block_key, generation):
            return BlockStatus.CORRUPT, nothing
        if not self._is_aligned:
            parts.reshape(-1)[:] = np.frombuffer(data, np.uint8, self._fingerprint.block_bytes)
        if not np.array_equal(checksums(parts), record[2]):
            return BlockStatus.CORRUPT, nothing
        return BlockStatus.INTACT, record[2]

    def _offset(self, slot: int) -> int:
        return ALIGNMENT + slot * self._slot_bytes

    def _buffer(self, name: str, num_bytes: int) -> mmap.mmap:
        """Return aligned memory of this thread."""
        buffer: mmap.mmap | None = getattr(self._buffers, name, None)
        if buffer is None:
            buffer = mmap.mmap(-1, num_bytes)
            setattr(self._buffers, name, buffer)
        return buffer

    def _data(self, parts: NDArray[np.uint8], *, is_read: bool) -> memoryview:
        if self._is_aligned:
            return parts.reshape(-1).data
        buffer = memoryview(self._buffer("data", self._slot_bytes - self._root_bytes))
        if not is_read:
            buffer[: self._fingerprint.block_bytes] = parts.reshape(-1).data
        return buffer

    def _compose(self, root: mmap.mmap, block_key: bytes, generation: int, sums: NDArray[np.uint64]) -> None:
        head = ROOT.pack(ROOT_MAGIC, generation, len(block_key), len(sums)) + block_key + sums.astype("<u8").tobytes()
        record = head + xxhash.xxh3_64_digest(head)
        root[: len(record)] = record

    def _parse(self, root: mmap.mmap) -> tuple[bytes, int, NDArray[np.uint64]] | None:
        """Return key, generation and checksums; None if there is no record or it is torn."""
        magic, generation, key_bytes, num_parts = ROOT.unpack_from(root)
        end = ROOT.size + key_bytes + 8 * num_parts
        if magic != ROOT_MAGIC or num_parts != self._fingerprint.num_parts or end + 8 > self._root_bytes:
            return None
        if xxhash.xxh3_64_digest(root[:end]) != root[end : end + 8]:
            return None
        sums = np.frombuffer(root[ROOT.size + key_bytes : end], "<u8").astype(np.uint64)
        return root[ROOT.size : ROOT.size + key_bytes], generation, sums


def slot_bytes(fingerprint: Fingerprint) -> int:
    """Return the bytes of a slot."""
    return _root_bytes(fingerprint) + _round_up(fingerprint.block_bytes)


def _root_bytes(fingerprint: Fingerprint) -> int:
    return _round_up(ROOT.size + MAX_KEY_BYTES + 8 * fingerprint.num_parts + 8)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _superblock(fingerprint: Fingerprint) -> bytes:
    """Return what tells a file of ours, of this format, and of this fingerprint."""
    text = json.dumps({"format": FORMAT_VERSION, **asdict(fingerprint)}).encode()
    head = SUPERBLOCK_MAGIC + struct.pack("<I", len(text)) + text
    return head.ljust(ALIGNMENT, b"\0")


def _sweep(own: Path) -> None:
    """Remove files of ours that no process uses: of other fingerprints, and those that were being made."""
    for path in sorted(own.parent.glob(f"{PREFIX}*")):
        if path == own or path.is_symlink() or not path.is_file():
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("%s is left, as it cannot be opened: %s", path, error)
            continue
        try:
            is_ours = path.suffix == NEW_SUFFIX or os.pread(fd, len(SUPERBLOCK_MAGIC), 0) == SUPERBLOCK_MAGIC
            if is_ours and _lock(fd):
                path.unlink()
                logger.info("removed %s, which no process uses", path)
        finally:
            os.close(fd)


def _open_file(path: Path, superblock: bytes, num_bytes: int, config: DiskConfig) -> int:
    """Return a descriptor of the file, locked, as large as asked and with the superblock."""
    is_new = not path.exists()
    # Under another name until it is whole.
    place = path.with_suffix(NEW_SUFFIX) if is_new else path
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_new else 0) | (os.O_DIRECT if config.use_direct_io else 0)
    try:
        fd = os.open(place, flags, 0o600)
    except OSError as cause:
        hint = "; set use_direct_io = false" if cause.errno == errno.EINVAL else ""
        raise ConfigError(f"disk.folder: expected to open {str(place)!r}, got {cause}{hint}") from cause
    try:
        if not _lock(fd):
            raise ConfigError(f"disk.folder: expected a file that no other process uses, got {str(place)!r}")
        buffer = mmap.mmap(-1, ALIGNMENT)
        if is_new:
            _reserve(fd, num_bytes, place)
            buffer[:] = superblock
            os.pwritev(fd, [buffer], 0)
            os.fsync(fd)
            place.rename(path)
        else:
            os.preadv(fd, [buffer], 0)
            if buffer[:] != superblock:
                raise ConfigError(
                    f"disk.folder: expected {str(path)!r} in format {FORMAT_VERSION}, got another; it was written by "
                    f"another version of OasisKV, or is damaged: remove it to start with an empty disk tier"
                )
            _reserve(fd, num_bytes, path)
    except BaseException:
        os.close(fd)
        if is_new:
            place.unlink(missing_ok=True)
        raise
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _reserve(fd: int, num_bytes: int, path: Path) -> None:
    """Give the file its size, so that no write finds the file system full later."""
    before, system = os.fstat(fd), os.fstatvfs(fd)
    num_free = system.f_bavail * system.f_frsize
    refusal = f"disk.max_bytes: expected room for {num_bytes} bytes in {str(path.parent)!r}, got {num_free} free"
    # Trying would fill the file system for a moment, for everybody who writes to it.
    if num_bytes - before.st_blocks * 512 > num_free:
        raise ConfigError(refusal)
    try:
        if before.st_size > num_bytes:
            os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as cause:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, before.st_size)
        raise ConfigError(f"{refusal}: {cause}") from cause
