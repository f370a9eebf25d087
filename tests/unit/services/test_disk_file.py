import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.tiers import BlockStatus
from oasiskv.services.checksums import checksums
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig, DiskFile, slot_bytes

SMALL = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
ALIGNED = Fingerprint(model_hash="m", dtype="float16", block_size=16, num_layers=2, num_kv_heads=2, head_dim=64)
NUM_SLOTS = 4


def has_direct_io(folder: Path) -> bool:
    try:
        fd = os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    os.close(fd)
    (folder / "probe").unlink()
    return True


def configure(folder: Path, shape: Fingerprint = SMALL, num_slots: int = NUM_SLOTS) -> DiskConfig:
    max_bytes = ALIGNMENT + num_slots * slot_bytes(shape) + 1
    return DiskConfig(folder=str(folder), max_bytes=max_bytes, use_direct_io=has_direct_io(folder))


def block(shape: Fingerprint, seed: int) -> NDArray[np.uint8]:
    """A block that lies as those of the pool do: at a multiple of its size from a page."""
    pages = np.zeros(shape.block_bytes + ALIGNMENT, np.uint8)
    start = -pages.ctypes.data % ALIGNMENT
    data = pages[start : start + shape.block_bytes].reshape(shape.num_parts, shape.part_bytes)
    data[:] = np.random.default_rng(seed).integers(0, 256, data.shape, np.uint8)
    return data


def put(file: DiskFile, slot: int, key: bytes, generation: int, data: NDArray[np.uint8]) -> BlockStatus:
    return file.write(slot, key, generation, data, checksums(data), lambda: True)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DiskFile]:
    opened = DiskFile.open(configure(tmp_path), SMALL)
    yield opened
    opened.close()


@pytest.mark.parametrize("shape", [SMALL, ALIGNED], ids=["buffered", "in-place"])
def test_a_block_comes_back_bit_for_bit_after_the_file_was_closed(tmp_path: Path, shape: Fingerprint) -> None:
    config = configure(tmp_path, shape)
    file = DiskFile.open(config, shape)
    data = block(shape, 1)
    assert put(file, 2, b"key", 7, data) is BlockStatus.INTACT
    file.close()
    file = DiskFile.open(config, shape)
    assert file.scan(range(NUM_SLOTS)) == [(2, b"key", 7)]
    found = block(shape, 2)
    status, sums = file.read(2, b"key", 7, found)
    assert status is BlockStatus.INTACT
    np.testing.assert_array_equal(found, data)
    np.testing.assert_array_equal(sums, checksums(data))
    assert file.path.stat().st_size <= config.max_bytes
    file.close()


def test_the_longest_key_and_the_most_parts_fit_into_a_root_record(tmp_path: Path) -> None:
    wide = Fingerprint(model_hash="m", dtype="float16", block_size=1, num_layers=640, num_kv_heads=1, head_dim=2)
    file = DiskFile.open(configure(tmp_path, wide), wide)
    key = bytes(range(256))
    assert put(file, 0, key, 1, block(wide, 1)) is BlockStatus.INTACT
    assert file.read(0, key, 1, block(wide, 2))[0] is BlockStatus.INTACT
    file.close()


def test_a_write_that_did_not_end_leaves_no_block(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process leaves: the first of two writes, which zeroed the old root record."""
    put(file, 0, b"old", 1, block(SMALL, 1))
    real = os.pwritev
    calls = []

    def die_before_the_second(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", die_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        put(file, 0, b"new", 2, block(SMALL, 2))
    assert file.scan(range(NUM_SLOTS)) == []


def test_a_block_that_changed_while_it_was_written_is_not_found(file: DiskFile) -> None:
    data = block(SMALL, 1)
    assert file.write(0, b"k", 1, data, checksums(data), lambda: False) is BlockStatus.STALE
    assert file.scan(range(NUM_SLOTS)) == []


@pytest.mark.parametrize("place", ["root", "key", "data"])
def test_a_flipped_bit_is_found_when_the_block_is_read(file: DiskFile, place: str) -> None:
    put(file, 1, b"key", 3, block(SMALL, 1))
    offset = ALIGNMENT + slot_bytes(SMALL) + {"root": 9, "key": 25, "data": ALIGNMENT + 700}[place]
    with file.path.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))
        raw.flush()
        os.fsync(raw.fileno())
    assert file.read(1, b"key", 3, block(SMALL, 2))[0] is BlockStatus.CORRUPT
    assert len(file.scan(range(NUM_SLOTS))) == (place == "data")


@pytest.mark.parametrize(("key", "generation"), [(b"other", 3), (b"key", 2)])
def test_a_slot_with_another_block_is_not_taken_for_the_one_that_was_asked_for(
    file: DiskFile, key: bytes, generation: int
) -> None:
    put(file, 1, b"key", 3, block(SMALL, 1))
    assert file.read(1, key, generation, block(SMALL, 2))[0] is BlockStatus.CORRUPT


def test_a_file_that_was_cut_off_gives_an_error_for_its_lost_blocks_only(file: DiskFile) -> None:
    for slot in range(NUM_SLOTS):
        put(file, slot, b"%d" % slot, slot, block(SMALL, slot))
    os.truncate(file.path, ALIGNMENT + 2 * slot_bytes(SMALL) + 5000)
    statuses = [file.read(slot, b"%d" % slot, slot, block(SMALL, 9))[0] for slot in range(NUM_SLOTS)]
    assert statuses == [BlockStatus.INTACT] * 2 + [BlockStatus.IO_ERROR] * 2


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EIO, BlockStatus.IO_ERROR), (errno.ENOSPC, BlockStatus.DISK_FULL), (errno.EDQUOT, BlockStatus.DISK_FULL)],
)
def test_an_error_of_the_device_is_a_status_of_the_block(
    file: DiskFile, monkeypatch: pytest.MonkeyPatch, number: int, status: BlockStatus
) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    put(file, 0, b"k", 1, block(SMALL, 1))
    monkeypatch.setattr(os, "pwritev", fail)
    monkeypatch.setattr(os, "preadv", fail)
    assert put(file, 1, b"l", 2, block(SMALL, 1)) is status
    assert file.read(0, b"k", 1, block(SMALL, 1))[0] is BlockStatus.IO_ERROR
    assert file.scan(range(NUM_SLOTS)) == []


def test_a_write_that_comes_short_is_no_block(file: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: ALIGNMENT)
    assert put(file, 1, b"l", 2, block(SMALL, 1)) is BlockStatus.DISK_FULL


def test_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    config = configure(tmp_path)
    file = DiskFile.open(config, SMALL)
    file.close()
    content = file.path.read_bytes().replace(b'"format": 1', b'"format": 2', 1)
    file.path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^disk\.folder: expected .* in format 1"):
        DiskFile.open(config, SMALL)
    assert file.path.read_bytes() == content


def test_a_file_in_use_is_refused_and_can_be_had_afterwards(file: DiskFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no other process uses"):
        DiskFile.open(configure(tmp_path), SMALL)
    assert put(file, 0, b"k", 1, block(SMALL, 1)) is BlockStatus.INTACT


def test_files_that_nobody_uses_are_removed_and_no_others(tmp_path: Path) -> None:
    other = replace(SMALL, model_hash="other")
    used = DiskFile.open(configure(tmp_path), replace(SMALL, model_hash="used"))
    DiskFile.open(configure(tmp_path), other).close()
    (tmp_path / "oasiskv-1234.new").write_bytes(b"half made")
    (tmp_path / "oasiskv-notes.txt").write_text("not ours")
    (tmp_path / "data").write_text("not ours")
    file = DiskFile.open(configure(tmp_path), SMALL)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {file.path.name, used.path.name, "oasiskv-notes.txt", "data"}
    file.close()
    used.close()


@pytest.mark.parametrize(("num_slots", "kept"), [(6, [0, 1, 2, 3]), (2, [0, 1])])
def test_another_size_keeps_the_blocks_that_fit(tmp_path: Path, num_slots: int, kept: list[int]) -> None:
    file = DiskFile.open(configure(tmp_path), SMALL)
    for slot in range(NUM_SLOTS):
        put(file, slot, b"%d" % slot, slot + 1, block(SMALL, slot))
    file.close()
    config = configure(tmp_path, num_slots=num_slots)
    file = DiskFile.open(config, SMALL)
    assert file.path.stat().st_size <= config.max_bytes
    assert [slot for slot, _, _ in file.scan(range(file.num_slots))] == kept
    assert put(file, num_slots - 1, b"new", 9, block(SMALL, 9)) is BlockStatus.INTACT
    file.close()


def test_a_disk_without_room_is_refused_at_the_start_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=r"^disk\.max_bytes: expected room for \d+ bytes in .*, got \d+ free"):
        DiskFile.open(configure(tmp_path), SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_without_filling_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise AssertionError("it was tried")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=r"^disk\.max_bytes: expected room for \d+ bytes in .*, got [1-9]\d* free$"):
        DiskFile.open(replace(configure(tmp_path), max_bytes=2**62), SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_grow_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile.open(configure(tmp_path), SMALL)
    assert put(file, 0, b"k", 1, block(SMALL, 1)) is BlockStatus.INTACT
    file.close()
    real, size = os.posix_fallocate, file.path.stat().st_size

    def run_out(fd: int, offset: int, num_bytes: int) -> None:
        real(fd, offset, size + 4096)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with pytest.raises(ConfigError, match="expected room"):
        DiskFile.open(replace(configure(tmp_path), max_bytes=2 * size), SMALL)
    assert file.path.stat().st_size == size


def test_what_is_no_file_of_ours_keeps_no_service_from_starting(tmp_path: Path) -> None:
    (tmp_path / "oasiskv-folder").mkdir()
    os.mkfifo(tmp_path / "oasiskv-pipe")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "oasiskv-link.new").symlink_to(tmp_path / "elsewhere")
    before = set(tmp_path.iterdir())
    DiskFile.open(configure(tmp_path), SMALL).close()
    assert before <= set(tmp_path.iterdir())
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def num_cached_pages(path: Path) -> int:
    """Return how many pages of a file the page cache has."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        buffer = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
        assert libc.mincore(ctypes.byref(buffer), ctypes.c_size_t(len(pages)), found) == 0
        del buffer
        return sum(one & 1 for one in found)


@pytest.mark.parametrize("is_direct", [True, False])
def test_bytes_pass_by_the_page_cache_unless_that_is_switched_off_and_the_file_says_which(
    tmp_path: Path, is_direct: bool
) -> None:
    try:
        file = DiskFile.open(replace(configure(tmp_path), use_direct_io=is_direct), ALIGNED)
    except ConfigError as error:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O: {error}")
    try:
        os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = block(ALIGNED, 1)
        assert put(file, 0, b"k", 1, parts) is BlockStatus.INTACT
        assert file.read(0, b"k", 1, block(ALIGNED, 2))[0] is BlockStatus.INTACT
        assert bool(num_cached_pages(file.path)) != is_direct
        assert file.reason.startswith("direct I/O" if is_direct else "through the page cache")
    finally:
        file.close()


def without_direct_io(real: Callable[..., int]) -> Callable[..., int]:
    def open_(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    return open_


def test_a_file_system_without_direct_io_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", without_direct_io(os.open))
    config = replace(configure(tmp_path), use_direct_io=True)
    with pytest.raises(ConfigError, match="set use_direct_io = false"):
        DiskFile.open(config, SMALL)
    assert list(tmp_path.iterdir()) == []
    file = DiskFile.open(replace(config, use_direct_io=False), SMALL)
    assert put(file, 0, b"k", 1, block(SMALL, 1)) is BlockStatus.INTACT
    file.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [({"max_bytes": 0}, "max_bytes"), ({"max_bytes": True}, "max_bytes"), ({"num_readers": -1}, "num_readers")],
)
def test_a_wrong_setting_is_refused_by_its_name(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        replace(configure(tmp_path), **change)


def test_a_folder_that_is_absent_and_a_size_below_one_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^disk\.folder: expected a folder"):
        DiskFile.open(replace(configure(tmp_path), folder=str(tmp_path / "absent")), SMALL)
    with pytest.raises(ConfigError, match=r"^disk\.max_bytes: expected at least"):
        DiskFile.open(replace(configure(tmp_path), max_bytes=5000), SMALL)
