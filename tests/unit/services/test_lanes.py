"""Chunks of one-sided copies in two threads: each once, the next begun before one is waited for, none left behind."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oasiskv.core.errors import PeerUnavailableError
from oasiskv.services.clients.one_sided import in_lanes

CHUNKS = [slice(number, number + 1) for number in range(9)]


class Transfers:
    """Stands for those of NIXL: notes, by chunk, what was done with it."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.events: list[tuple[str, int, int]] = []
        self.under_way: set[int] = set()

    def note(self, event: str, chunk: slice) -> None:
        self.events.append((event, chunk.start, threading.get_ident()))

    def begin(self, chunk: slice) -> Any:
        self.note("begin", chunk)
        self.under_way.add(chunk.start)
        return self.Transfer(self, chunk)

    def finish(self, chunk: slice, transfer: Any) -> None:
        self.note("finish", chunk)
        assert transfer.chunk is chunk
        if chunk.start == self.fails_at:
            raise PeerUnavailableError("the other side is away")
        self.under_way.discard(chunk.start)

    class Transfer:
        def __init__(self, made_by: "Transfers", chunk: slice) -> None:
            self.made_by, self.chunk = made_by, chunk

        def cancel(self) -> None:
            self.made_by.under_way.discard(self.chunk.start)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_every_chunk_is_carried_out_once(thread: ThreadPoolExecutor) -> None:
    transfers = Transfers()
    in_lanes(CHUNKS, transfers.begin, transfers.finish, thread)
    for event in ("begin", "finish"):
        assert sorted(start for name, start, _ in transfers.events if name == event) == list(range(9))
    assert not transfers.under_way


def test_a_thread_begins_its_next_chunk_before_it_waits_for_one(thread: ThreadPoolExecutor) -> None:
    transfers = Transfers()
    in_lanes(CHUNKS, transfers.begin, transfers.finish, thread)
    for lane in {ident for _, _, ident in transfers.events}:
        events = [(name, start) for name, start, ident in transfers.events if ident == lane]
        begun = [start for name, start in events if name == "begin"]
        for number, start in enumerate(begun[:-1]):
            assert events.index(("begin", begun[number + 1])) < events.index(("finish", start))


@pytest.mark.parametrize("fails_at", [0, 4, 8])
def test_a_chunk_that_fails_ends_all_and_leaves_none_under_way(thread: ThreadPoolExecutor, fails_at: int) -> None:
    transfers = Transfers(fails_at)
    with pytest.raises(PeerUnavailableError, match="the other side is away"):
        in_lanes(CHUNKS, transfers.begin, transfers.finish, thread)
    assert not transfers.under_way
    assert thread.submit(lambda: True).result(), "the other thread has ended what it did"
