from oasiskv.core.disk_blocks import DiskBlock, DiskBlocks


def write(disk: DiskBlocks, block_key: bytes) -> DiskBlock:
    place = disk.prepare_write(block_key)
    assert place is not None
    disk.complete_write(block_key, is_written=True)
    return place


def test_the_least_recently_used_block_makes_room() -> None:
    changes: list[tuple[bytes, bool]] = []
    disk = DiskBlocks(2, lambda block_key, is_held: changes.append((block_key, is_held)))
    first = write(disk, b"a")
    write(disk, b"b")
    disk.touch(b"a")
    third = write(disk, b"c")
    assert disk.find(b"a") == first
    assert disk.find(b"b") is None
    assert third.generation > first.generation
    assert changes == [(b"a", True), (b"b", True), (b"b", False), (b"c", True)]
    assert disk.num_evicted == 1
    disk.check_invariants()


def test_a_block_is_found_only_once_its_write_is_complete() -> None:
    disk = DiskBlocks(1)
    assert disk.prepare_write(b"a") is not None
    assert disk.find(b"a") is None
    assert disk.prepare_write(b"a") is None, "it is being written"
    assert disk.prepare_write(b"b") is None, "no slot is left"
    disk.complete_write(b"a", is_written=False)
    assert disk.find(b"a") is None
    assert disk.prepare_write(b"b") is not None
    disk.check_invariants()


def test_a_slot_on_which_the_device_failed_is_not_tried_again() -> None:
    disk = DiskBlocks(2)
    bad = disk.prepare_write(b"a")
    assert bad is not None
    disk.complete_write(b"a", is_written=False, is_bad=True)
    write(disk, b"b")
    disk.drop(b"b", is_bad=True)
    assert disk.num_retired == 2
    assert not disk.has_room
    assert disk.prepare_write(b"c") is None
    disk.check_invariants()


def test_a_restart_finds_the_newest_copy_of_each_key_and_goes_on_counting() -> None:
    disk = DiskBlocks(4)
    disk.restore([(3, b"a", 9), (0, b"b", 7), (1, b"a", 5)])
    assert disk.find(b"a") == DiskBlock(3, 9)
    assert disk.num_held == 2
    disk.check_invariants()
    assert {write(disk, key).slot for key in (b"c", b"d")} == {1, 2}
    assert write(disk, b"e") == DiskBlock(0, 12), "the block written first goes first"


def test_without_slots_nothing_is_written() -> None:
    disk = DiskBlocks(0)
    assert disk.prepare_write(b"a") is None
    assert not disk.has_room
