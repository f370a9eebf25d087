import asyncio

from oasiskv.services.staging.changes import MAX_KEYS_PER_MESSAGE, ChangeLog


def apply(state: set[bytes], log: ChangeLog, sequence: int | None) -> int:
    for change in log.after(sequence):
        if change.is_snapshot_start:
            state.clear()
        state |= set(change.sealed_keys)
        state -= set(change.removed_keys)
        sequence = change.sequence
    assert sequence is not None
    return sequence


def test_a_watcher_that_applies_all_changes_knows_what_is_held() -> None:
    log, state = ChangeLog(), set[bytes]()
    log.add(b"a", True)
    sequence = apply(state, log, None)
    assert state == {b"a"}
    for block_key, is_held in ((b"b", True), (b"a", False), (b"c", True), (b"c", False), (b"a", True)):
        log.add(block_key, is_held)
    sequence = apply(state, log, sequence)
    assert state == {b"a", b"b"}
    assert log.after(sequence) == []


def test_a_key_stands_once_in_a_message() -> None:
    log = ChangeLog()
    for is_held in (True, False, True, False):
        log.add(b"a", is_held)
    (change,) = log.after(0)
    assert (change.sealed_keys, change.removed_keys) == ((), (b"a",))


def test_a_watcher_too_far_behind_starts_over_from_a_snapshot() -> None:
    log, state = ChangeLog(max_events=2), {b"stale"}
    for number in range(5):
        log.add(bytes([number]), True)
    assert log.after(2)[0].is_snapshot_start
    apply(state, log, 2)
    assert state == {bytes([number]) for number in range(5)}
    assert not log.after(3)[0].is_snapshot_start


def test_no_message_grows_beyond_its_bound() -> None:
    log, state = ChangeLog(), set[bytes]()
    keys = [number.to_bytes(4) for number in range(2 * MAX_KEYS_PER_MESSAGE + 1)]
    for block_key in keys:
        log.add(block_key, True)
    for start in (0, None):
        state.clear()
        messages = log.after(start)
        assert [len(change.sealed_keys) for change in messages] == [MAX_KEYS_PER_MESSAGE, MAX_KEYS_PER_MESSAGE, 1]
        assert apply(state, log, start) == len(keys)
        assert state == set(keys)


def test_a_sequence_of_another_life_starts_over_too() -> None:
    log = ChangeLog()
    assert log.after(7)[0].is_snapshot_start


def test_waiting_ends_with_the_next_change() -> None:
    async def scenario() -> int:
        log = ChangeLog()
        waiting = asyncio.create_task(log.wait(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        log.add(b"a", True)
        await waiting
        return log.after(0)[-1].sequence

    assert asyncio.run(scenario()) == 1
