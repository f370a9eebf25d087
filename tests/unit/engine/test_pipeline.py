"""How background work is ordered; events stand for transfers, so that no test depends on speed."""

import threading
from collections.abc import Iterator

import pytest

from oasiskv.core.errors import OasisError, TransferTimeoutError
from oasiskv.engine import pipeline as module
from oasiskv.engine.pipeline import InlinePipeline, Stage, ThreadPipeline

NUM_LAYERS = 4
WAIT_S = 30.0
"""Far more than anything here takes; only a fault waits so long."""


class Log:
    """Stages that note when they ran, the last of them gated where wanted."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.gates: dict[tuple[int, int], threading.Event] = {}
        self.reached: dict[tuple[int, int], threading.Event] = {}

    def gate(self, layer: int, stage: int) -> threading.Event:
        """Make a stage wait for the returned event."""
        self.reached[layer, stage] = threading.Event()
        self.gates[layer, stage] = threading.Event()
        return self.gates[layer, stage]

    def stages(self, layer: int, count: int = 3) -> list[Stage]:
        def run(stage: int) -> None:
            if (layer, stage) in self.gates:
                self.reached[layer, stage].set()
                assert self.gates[layer, stage].wait(WAIT_S)
            with self.lock:
                self.entries.append((layer, stage))

        return [lambda stage=stage: run(stage) for stage in range(count)]  # type: ignore[misc]

    def of(self, layer: int) -> list[int]:
        with self.lock:
            return [stage for entry, stage in self.entries if entry == layer]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def pipeline() -> Iterator[ThreadPipeline]:
    pipeline = ThreadPipeline(NUM_LAYERS)
    yield pipeline
    pipeline.close()
    assert not any(thread.is_alive() for thread in pipeline._threads)


def fail() -> None:
    raise ValueError("the copy engine is on fire")


def nothing() -> None:
    return None


def test_stages_of_a_layer_run_in_order(pipeline: ThreadPipeline, log: Log) -> None:
    for _ in range(20):
        for layer in range(NUM_LAYERS):
            pipeline.wait(layer)
            pipeline.submit(layer, log.stages(layer))
    pipeline.fence()
    for layer in range(NUM_LAYERS):
        assert log.of(layer) == [0, 1, 2] * 20


def test_each_stage_takes_layers_in_the_order_of_submission(pipeline: ThreadPipeline, log: Log) -> None:
    for layer in (2, 0, 3, 1):
        pipeline.submit(layer, log.stages(layer))
    pipeline.fence()
    for stage in range(3):
        assert [layer for layer, entry in log.entries if entry == stage] == [2, 0, 3, 1]


def test_a_layer_predicts_while_the_one_before_it_transfers(pipeline: ThreadPipeline, log: Log) -> None:
    transfer = log.gate(0, 2)
    pipeline.submit(0, log.stages(0))
    assert log.reached[0, 2].wait(WAIT_S)
    predict = log.gate(1, 1)
    pipeline.submit(1, log.stages(1))
    assert log.reached[1, 1].wait(WAIT_S)  # stage 0 of layer 1 ran, stage 2 of layer 0 still does
    assert log.entries == [(0, 0), (0, 1), (1, 0)]
    predict.set()
    transfer.set()
    pipeline.fence()


def test_a_wait_is_late_exactly_when_the_work_was_not_done(pipeline: ThreadPipeline, log: Log) -> None:
    assert pipeline.wait(0) is False  # nothing was ever submitted
    gate = log.gate(0, 2)
    pipeline.submit(0, log.stages(0))
    assert log.reached[0, 2].wait(WAIT_S)
    threading.Timer(0.05, gate.set).start()
    assert pipeline.wait(0) is True
    assert log.of(0) == [0, 1, 2]
    assert pipeline.wait(0) is False

    pipeline.submit(1, log.stages(1))
    pipeline.fence()
    assert pipeline.wait(1) is False


def test_waiting_for_one_layer_waits_for_no_later_one(pipeline: ThreadPipeline, log: Log) -> None:
    gate = log.gate(1, 2)
    pipeline.submit(0, log.stages(0))
    pipeline.submit(1, log.stages(1))
    pipeline.wait(0)
    assert log.of(0) == [0, 1, 2]
    assert 2 not in log.of(1)
    gate.set()


def test_a_layer_is_not_submitted_again_without_a_wait(pipeline: ThreadPipeline, log: Log) -> None:
    gate = log.gate(0, 2)
    pipeline.submit(0, log.stages(0))
    with pytest.raises(AssertionError, match="layer 0 was submitted without a wait"):
        pipeline.submit(0, log.stages(0))
    gate.set()


@pytest.mark.parametrize("hold_layers", [0, 1, 2, 3])
def test_a_transfer_is_held_until_that_many_more_layers_were_submitted(hold_layers: int, log: Log) -> None:
    pipeline = ThreadPipeline(NUM_LAYERS, hold_layers=hold_layers)
    done = {layer: threading.Event() for layer in range(NUM_LAYERS)}
    for layer in range(NUM_LAYERS):
        first, second, _ = log.stages(layer)
        pipeline.submit(layer, [first, second, done[layer].set])
        if layer >= hold_layers:
            assert done[layer - hold_layers].wait(WAIT_S)
        # What is held stays held: no event of it can come before its turn, however long one waits.
        assert not any(done[later].is_set() for later in range(max(0, layer - hold_layers + 1), layer + 1))
    pipeline.close()
    assert all(event.is_set() for event in done.values())


def test_a_reader_gets_a_held_layer_and_all_before_it(log: Log) -> None:
    pipeline = ThreadPipeline(NUM_LAYERS, hold_layers=5)
    for layer in range(NUM_LAYERS):
        pipeline.submit(layer, log.stages(layer))
    assert pipeline.wait(1) is True
    assert [log.of(0), log.of(1)] == [[0, 1, 2]] * 2
    assert 2 not in log.of(2) + log.of(3)
    assert pipeline.wait(0) is False
    pipeline.fence()
    assert log.of(3) == [0, 1, 2]
    pipeline.close()


@pytest.mark.parametrize("hold_layers", [None, 0, 1, 3, 5])
def test_step_after_step_never_stops(hold_layers: int | None, log: Log) -> None:
    pipeline = ThreadPipeline(NUM_LAYERS, hold_layers=hold_layers)
    for step in range(30):
        for layer in range(NUM_LAYERS):
            late = pipeline.wait(layer)
            # Held longer than a step has layers, it is late whenever it is asked for.
            assert hold_layers is None or hold_layers < NUM_LAYERS or late is (step > 0)
            pipeline.submit(layer, log.stages(layer))
        if step % 7 == 0:
            pipeline.fence()
            assert not any(pipeline.wait(layer) for layer in range(NUM_LAYERS))
            for layer in range(NUM_LAYERS):
                pipeline.submit(layer, log.stages(layer))
    pipeline.close()
    assert len(log.entries) == 3 * NUM_LAYERS * 35


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("hold_layers", [None, 2])
def test_a_failed_stage_surfaces_at_every_later_call_and_nothing_after_it_runs(
    stage: int, hold_layers: int | None, log: Log
) -> None:
    pipeline = ThreadPipeline(NUM_LAYERS, hold_layers=hold_layers)
    stages = log.stages(0)
    stages[stage] = fail
    pipeline.submit(0, stages)
    with pytest.raises(OasisError, match=r"background work failed: ValueError.*on fire") as caught:
        pipeline.wait(0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(OasisError, match="on fire"):
        pipeline.fence()
    with pytest.raises(OasisError, match="on fire"):
        pipeline.submit(1, log.stages(1))
    with pytest.raises(OasisError, match="on fire"):
        pipeline.wait(3)
    pipeline.close()
    assert log.entries == [(0, earlier) for earlier in range(stage)]


def test_a_failure_wakes_whoever_waits_for_a_later_layer(pipeline: ThreadPipeline, log: Log) -> None:
    gate = log.gate(0, 0)
    stages = log.stages(0)
    stages[1] = fail
    pipeline.submit(0, stages)
    pipeline.submit(1, log.stages(1))
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(OasisError, match="on fire"):
        pipeline.wait(1)


@pytest.mark.parametrize("hold_layers", [None, 5])
def test_close_finishes_what_was_submitted(hold_layers: int | None, log: Log) -> None:
    pipeline = ThreadPipeline(NUM_LAYERS, hold_layers=hold_layers)
    gate = log.gate(0, 1)
    for layer in range(NUM_LAYERS):
        pipeline.submit(layer, log.stages(layer))
    threading.Timer(0.05, gate.set).start()
    pipeline.close()
    assert all(log.of(layer) == [0, 1, 2] for layer in range(NUM_LAYERS))
    assert not any(thread.is_alive() for thread in pipeline._threads)


def test_work_that_never_ends_is_reported_and_said_to_be_still_writing(
    monkeypatch: pytest.MonkeyPatch, pipeline: ThreadPipeline, log: Log
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    gate = log.gate(0, 2)
    pipeline.submit(0, log.stages(0))
    with pytest.raises(TransferTimeoutError, match=r"^layer 0: .*may still write"):
        pipeline.wait(0)
    with pytest.raises(TransferTimeoutError, match=r"^all layers: .*may still write"):
        pipeline.fence()
    gate.set()


def test_the_inline_pipeline_runs_everything_at_once_and_is_never_late(log: Log) -> None:
    pipeline = InlinePipeline()
    pipeline.submit(1, log.stages(1))
    pipeline.submit(0, log.stages(0))
    assert log.entries == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    assert pipeline.wait(1) is False
    with pytest.raises(ValueError, match="on fire"):
        pipeline.submit(0, [nothing, fail])
    pipeline.fence()
    pipeline.close()
