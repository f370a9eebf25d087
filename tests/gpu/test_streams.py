"""How captured passes and their background are ordered; stages that count stand for predict, select and transfer."""

from collections.abc import Callable

import pytest
import torch

from oasiskv.core.errors import TransferTimeoutError
from oasiskv.engine.streams import StreamPipeline
from oasiskv.kernels.flags import Flags
from oasiskv.kernels.rows import Counter, Waited

NUM_TARGET_LAYERS = 6
NUM_LAYERS = NUM_TARGET_LAYERS + 1
FETCHED = 5


class Passes:
    """Passes over layers whose background takes longer than they do.

    Every pass of a layer finds as many transfers done as passes were before it, or counts an error.
    """

    def __init__(self, *, flags_from: int | None, hold_layers: int = 2, timeout_s: float = 20.0) -> None:
        self.counters = torch.zeros(NUM_LAYERS, 1, len(Counter), dtype=torch.int64, device="cuda")
        self.pipeline = StreamPipeline(
            torch.device("cuda"), NUM_TARGET_LAYERS, self.counters, flags_from, hold_layers, timeout_s
        )
        self.passes, self.picked, self.done, self.errors = (
            torch.zeros(NUM_LAYERS, dtype=torch.int64, device="cuda") for _ in range(4)
        )
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run_layers(self, layers: range) -> None:
        for layer in layers:
            self.pipeline.wait(layer)
            self.errors[layer] += (self.done[layer] != self.passes[layer]).long()
            self.passes[layer] += 1
            self.pipeline.submit(layer, self.stages(layer))

    def stages(self, layer: int) -> list[Callable[[], None]]:
        def select() -> None:
            # A selection that starts before its layer's attention, or beside an earlier transfer, is an error too.
            self.errors[layer] += (self.picked[layer] + 1 != self.passes[layer]).long()
            self.picked[layer] += 1
            self.counters[layer, 0, Counter.FETCHED] += FETCHED

        def transfer() -> None:
            self.errors[layer] += (self.picked[layer] != self.done[layer] + 1).long()
            self.done[layer] += 1

        return [lambda: None, select, transfer]

    def eagerly(self, num_rows: int) -> None:
        self.pipeline.begin_pass(num_rows)
        self.run_layers(range(NUM_TARGET_LAYERS))
        self.pipeline.end_pass()

    def capture(self, num_rows: int) -> None:
        self.eagerly(num_rows)
        self.pipeline.begin_pass(num_rows)
        self.pipeline.begin_replay()
        torch.cuda.synchronize()
        self.graphs[num_rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graphs[num_rows], stream=self.stream):
            self.run_layers(range(NUM_TARGET_LAYERS))
            self.pipeline.end_pass()

    def capture_drafter(self) -> None:
        self.graphs[-1] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graphs[-1], stream=self.stream):
            self.run_layers(range(NUM_TARGET_LAYERS, NUM_LAYERS))
            self.pipeline.end_pass()

    def replay(self, num_rows: int) -> None:
        self.pipeline.begin_pass(num_rows)
        self.pipeline.begin_replay()
        self.graphs[num_rows].replay()
        self.pipeline.end_pass()

    def replay_drafter(self) -> None:
        self.pipeline.begin_replay()
        self.graphs[-1].replay()
        self.pipeline.end_pass()

    def settled_errors(self) -> int:
        self.pipeline.fence()
        torch.cuda.synchronize()
        self.pipeline.check()
        assert torch.equal(self.done, self.passes)
        return int(self.errors.sum())


@pytest.mark.parametrize("flags_from", [None, 1, 4])
def test_every_pass_finds_the_transfers_of_the_one_before_it_done(flags_from: int | None) -> None:
    passes = Passes(flags_from=flags_from)
    for num_rows in (8, 4, 2):
        passes.capture(num_rows)
    passes.capture_drafter()
    passes.pipeline.capture()
    num_before = int(passes.passes[0])
    # Sizes joined and by flags, with passes outside of graphs between them, and the drafter behind each.
    for step in range(60):
        num_rows = (8, 8, 4, 2, 2, 8, 0)[step % 7]
        if num_rows:
            passes.replay(num_rows)
        else:
            passes.eagerly(8)
        passes.replay_drafter()
    assert passes.settled_errors() == 0
    assert int(passes.passes[0]) - num_before == 60


def test_without_the_wait_a_late_transfer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flags, "await_done", lambda *_: None)
    passes = Passes(flags_from=1, hold_layers=20)
    passes.capture(8)
    for _ in range(10):
        passes.replay(8)
    torch.cuda.synchronize()
    assert int(passes.errors.sum()) > 0


def test_what_the_foreground_waited_for_is_counted() -> None:
    passes = Passes(flags_from=1, hold_layers=20)
    passes.capture(8)
    for _ in range(10):
        passes.replay(8)
    assert passes.settled_errors() == 0
    waited = passes.pipeline.waited()[:NUM_TARGET_LAYERS]
    # Ten transfers of 2 ms each stand before ten passes of the first layer that take next to nothing.
    assert int(waited[0, Waited.PASSES]) >= 8
    assert torch.equal(waited[:, Waited.UNITS], FETCHED * waited[:, Waited.PASSES])
    assert int(waited[0, Waited.NANOSECONDS]) > 1_000_000


def test_a_background_that_never_comes_ends_in_an_error_and_not_in_a_hang() -> None:
    passes = Passes(flags_from=1, timeout_s=0.2)
    passes.capture(8)
    passes.replay(8)
    torch.cuda.synchronize()
    passes.pipeline.check()
    passes.graphs[8].replay()  # nobody starts the graphs beside it
    passes.graphs[8].replay()
    torch.cuda.synchronize()
    with pytest.raises(TransferTimeoutError, match=r"^layer 0: background work not done after 0\.2 s"):
        passes.pipeline.check()
