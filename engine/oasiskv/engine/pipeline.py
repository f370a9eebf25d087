"""The background of a step: predict -> select -> transfer per layer, in order within a layer, beside the foreground.

`runtime` submits a layer after its attention and waits for it before the layer's next use; nothing else is waited for.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from oasiskv.core.errors import OasisError, TransferTimeoutError

Stage = Callable[[], None]

TIMEOUT_S = 120.0
"""Longest wait for one layer: far above any transfer, so that reaching it means that the background died."""


class Pipeline(Protocol):
    """How a layer's background work is ordered against its next use; the `Signal` of the design."""

    def begin_pass(self, num_rows: int) -> None:
        """Prepare for a pass of the target over so many rows, padding included."""

    def begin_replay(self) -> None:
        """Note that a graph is captured or replayed next."""

    def submit(self, layer: int, stages: list[Stage]) -> None:
        """Start a layer's stages, each after the one before it; its earlier work was waited for."""

    def wait(self, layer: int) -> bool:
        """Order the caller after the layer's last work; say whether it was late: had to be waited for."""

    def end_pass(self) -> None:
        """Note that a forward pass is over."""

    def capture(self) -> None:
        """Note that the engine has captured its graphs."""

    def check(self) -> None:
        """Raise what went wrong in the background since, if something did."""

    def settle(self, action: Callable[[], None]) -> None:
        """Run something, such as a copy of the device counters, where no selection runs at the same time."""

    def waited(self) -> torch.Tensor | None:
        """Return `int64[num_layers, len(Waited)]`, what a device waited for; None where the host waits."""

    def fence(self) -> None:
        """Order the caller after every layer."""

    def close(self) -> None:
        """Finish what was submitted and release what the pipeline holds."""


class _GraphlessPipeline:
    """What a pipeline without graphs does about them."""

    def begin_pass(self, num_rows: int) -> None:
        """Do nothing."""

    def begin_replay(self) -> None:
        """Do nothing."""

    def end_pass(self) -> None:
        """Do nothing: the next pass waits layer by layer."""

    def capture(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing: a wait or the next submission raises."""

    def settle(self, action: Callable[[], None]) -> None:
        """Run it: whoever asks has waited."""
        action()

    def waited(self) -> None:
        """Return None: the host waits."""


class InlinePipeline(_GraphlessPipeline):
    """Run the stages at once in the caller, in order: right everywhere, overlapping nothing."""

    def submit(self, layer: int, stages: list[Stage]) -> None:
        """Run the stages."""
        for stage in stages:
            stage()

    def wait(self, layer: int) -> bool:
        """Return False: nothing is ever outstanding."""
        return False

    def fence(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ThreadPipeline(_GraphlessPipeline):
    """One thread per stage, each taking layers in the order of submission: what three streams are on a GPU.

    Args:
        num_layers: Layers of the model.
        num_stages: Stages per layer.
        hold_layers: Hold the last stage of every layer back until this many more layers were submitted, or the layer
            or a later one is waited for: so that transfers come late, the same way in each run. None never holds.
    """

    def __init__(self, num_layers: int, num_stages: int = 3, hold_layers: int | None = None) -> None:
        """Start the threads."""
        self._hold_layers = hold_layers
        self._lock = threading.Condition()
        # Submissions are numbered; each layer knows the number of its last one submitted and its last one done.
        self._last = 0
        self._submitted = [0] * num_layers
        self._done = [0] * num_layers
        self._demanded = 0
        self._failure: BaseException | None = None
        self._queues: list[queue.SimpleQueue[tuple[int, int, list[Stage]] | None]] = [
            queue.SimpleQueue() for _ in range(num_stages)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(stage,), name=f"oasiskv-stage-{stage}", daemon=True)
            for stage in range(num_stages)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, layer: int, stages: list[Stage]) -> None:
        """Hand a layer to the first thread."""
        assert len(stages) == len(self._queues)
        with self._lock:
            self._raise_failure()
            assert self._done[layer] == self._submitted[layer], f"layer {layer} was submitted without a wait"
            self._last += 1
            self._submitted[layer] = number = self._last
            self._lock.notify_all()
        self._queues[0].put((layer, number, stages))

    def wait(self, layer: int) -> bool:
        """Block until the layer's work is done; True if it was not when asked."""
        with self._lock:
            self._raise_failure()
            if self._done[layer] == self._submitted[layer]:
                return False
            self._demand(self._submitted[layer])
            self._wait_for(lambda: self._done[layer] == self._submitted[layer], f"layer {layer}")
            return True

    def fence(self) -> None:
        """Block until every layer's work is done."""
        with self._lock:
            self._demand(self._last)
            self._wait_for(lambda: self._done == self._submitted, "all layers")

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        with self._lock:
            self._demand(self._last)
        for stage, thread in zip(self._queues, self._threads, strict=True):
            stage.put(None)
            thread.join()

    def _run(self, stage: int) -> None:
        source, is_last = self._queues[stage], stage + 1 == len(self._queues)
        while (item := source.get()) is not None:
            layer, number, stages = item
            try:
                if is_last:
                    self._hold(number)
                if self._failure is None:
                    stages[stage]()
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                    self._lock.notify_all()
            if is_last:
                with self._lock:
                    self._done[layer] = number
                    self._lock.notify_all()
            else:
                self._queues[stage + 1].put(item)

    def _hold(self, number: int) -> None:
        if self._hold_layers is None:
            return
        hold = self._hold_layers
        with self._lock:
            self._lock.wait_for(lambda: max(self._last - hold, self._demanded) >= number, TIMEOUT_S)

    def _demand(self, number: int) -> None:
        """Let go of everything up to this submission: its reader waits."""
        self._demanded = max(self._demanded, number)
        self._lock.notify_all()

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not self._lock.wait_for(lambda: self._failure is not None or condition(), TIMEOUT_S):
            raise TransferTimeoutError(
                f"{what}: background work not done after {TIMEOUT_S:.0f} s; it may still write into the working set"
            )
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OasisError(f"background work failed: {self._failure!r}") from self._failure
