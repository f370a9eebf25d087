"""The device counters as of work that is over, in host memory: what may be read while the next work runs."""

import torch

from oasiskv.engine.counters import RuntimeCounters
from oasiskv.engine.pipeline import Pipeline
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.kernels.rows import Waited


class SettledCounters:
    """Copies of the device counters.

    On a CPU each layer's are copied when its background was waited for. On a GPU all are copied every few steps, and
    read when the copy is over, so that nothing waits for them.

    Args:
        sets: The working sets, which hold the counters.
        shape: This process's KV cache.
        pipeline: Runs the background.
        own: What the host counts beside.

    Attributes:
        step: Last step that a copy under way covers; None when it was taken.
    """

    def __init__(self, sets: WorkingSets, shape: CacheShape, pipeline: Pipeline, own: RuntimeCounters) -> None:
        """Allocate the host memory."""
        self._sets, self._shape, self._pipeline, self._own = sets, shape, pipeline, own
        is_cuda = sets.counters.is_cuda
        self._counters = torch.zeros(sets.counters.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._waits = torch.zeros(shape.num_layers, len(Waited), dtype=torch.int64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.step: int | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether the counters themselves are in host memory."""
        return self._event is None

    def note(self, layer: int) -> None:
        """Take a layer's counters, whose background was just waited for; on a CPU."""
        if self._event is None:
            self._counters[layer] = self._sets.counters[layer]

    def settle(self, step: int) -> None:
        """Start a copy that covers everything up to a step."""
        self.step = step
        self._pipeline.settle(self._copy)

    def has_arrived(self) -> bool:
        """Say whether the last copy is over; asks nothing of the device."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, step: int) -> None:
        """Copy what a GPU counted up to a step, and wait for it."""
        if self._event is not None:
            self.settle(step)
            self._event.synchronize()

    def snapshot(self) -> dict[str, float]:
        """Return everything counted; the last copy is over."""
        if self._pipeline.waited() is not None:
            self._own.take_waits(self._waits)
        return self._own.snapshot(self._counters, self._shape)

    def _copy(self) -> None:
        self._counters.copy_(self._sets.counters, non_blocking=True)
        if (waited := self._pipeline.waited()) is not None:
            self._waits.copy_(waited, non_blocking=True)
        if self._event is not None:
            self._event.record()
