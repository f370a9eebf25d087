"""The clock of the device, by Triton's interpreter and a time that the test sets; on a GPU by its own time."""

import pytest
import torch
import triton
import triton.language as tl

from oasiskv.kernels.flags import kernel
from oasiskv.kernels.flags.clock import LEAST_WAIT_NS, Clock
from oasiskv.kernels.rows import Waited


class Timer:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> tl.tensor:
        return tl.full([], self.now, tl.int64)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(kernel, "globaltimer", timer)
    return timer


needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a GPU has a time of its own")


@needs_interpreter
def test_transfers_are_added_up_layer_by_layer_and_nothing_else_is(timer: Timer) -> None:
    waited = torch.full((3, len(Waited)), 7)
    clock = Clock(waited)
    assert not waited.any()
    for start, layer, took in [(100, 0, 5), (200, 2, 11), (300, 0, 6)]:
        timer.now = start
        clock.begin(layer)
        timer.now = start + took
        clock.end(layer)
    assert waited[:, Waited.TRANSFER_NANOSECONDS].tolist() == [11, 0, 11]
    assert not waited[:, : Waited.TRANSFER_NANOSECONDS].any()


@needs_interpreter
def test_time_in_which_two_transfers_are_under_way_counts_once(timer: Timer) -> None:
    waited = torch.zeros(3, len(Waited), dtype=torch.int64)
    clock = Clock(waited)
    # Layer 0 from 100 to 110, 1 from 103 to 115, 2 within the time of 1.
    for timer.now, call, layer in [
        (100, clock.begin, 0),
        (103, clock.begin, 1),
        (110, clock.end, 0),
        (111, clock.begin, 2),
        (115, clock.end, 1),
        (115, clock.end, 2),
    ]:
        call(layer)
    assert waited[:, Waited.TRANSFER_NANOSECONDS].tolist() == [10, 5, 0]


@needs_interpreter
def test_a_join_that_takes_no_longer_than_the_clock_is_no_wait(timer: Timer) -> None:
    waited = torch.zeros(2, len(Waited), dtype=torch.int64)
    clock = Clock(waited)
    for took in (LEAST_WAIT_NS - 1, LEAST_WAIT_NS, 70_000):
        clock.begin_wait()
        timer.now += took
        clock.end_wait(1)
    assert waited[1].tolist() == [2, 0, LEAST_WAIT_NS + 70_000, 0]
    assert not waited[0].any()
