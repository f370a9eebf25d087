"""The background on CUDA streams beside full graphs of decode steps: in the step's graph, or in graphs of its own."""

from collections.abc import Callable

import torch

from oasiskv.core.errors import TransferTimeoutError
from oasiskv.engine.pipeline import Stage
from oasiskv.kernels.flags import Clock, Flags

TIMEOUT_S = 30.0
"""Longest wait of one layer on the device: far above any step, so that reaching it means that the background died."""

TRANSFER_LANES = 2
"""Streams that transfers take turns on: a layer's first copies start while the last ones of the layer before arrive, so
that the link never runs dry between two layers."""

HOLD_CYCLES = 200_000
"""Clock cycles, about 0.1 ms, that a held transfer waits per layer of `debug_hold_layers`."""


class StreamPipeline:
    """Predict and select on one stream, transfers on others, each layer behind the foreground's attention in it.

    Small batches fork both from the foreground and join them at the end of the pass, all in one graph: no wait stands
    in a layer, and the next pass finds every transfer done. In captured passes of `flags_from` rows and more the
    target's background is two graphs of its own, started behind the foreground's, and `Flags` order them layer by
    layer: the foreground's next pass runs while the last transfers of this one do. The drafter's layers and passes
    outside of graphs are always joined.

    Whatever a launch depends on was launched before it, so that no order of execution can lock up.

    Args:
        device: The GPU.
        num_target_layers: Layers of the target model, the first ones.
        counters: `int64[num_layers, num_kv_heads, len(Counter)]`, the device counters.
        flags_from: Fewest rows of a captured pass that `Flags` order; None joins every pass.
        hold_layers: Hold every transfer back for so many tenths of a millisecond. None never holds. For tests.
        timeout_s: Longest wait of one layer.
        is_timed: Measure how long transfers take and joins wait; in captured passes by flags, waits always are.
        num_lanes: Streams that transfers take turns on.
    """

    def __init__(
        self,
        device: torch.device,
        num_target_layers: int,
        counters: torch.Tensor,
        flags_from: int | None,
        hold_layers: int | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        is_timed: bool = False,
        num_lanes: int = TRANSFER_LANES,
    ) -> None:
        """Make the streams; transfers go first where both have work."""
        # Launches on one stream share scratch memory, so what may run at the same time has streams of its own.
        self._joined = _Streams(device, num_lanes)
        self._beside = _Streams(device, num_lanes)
        self._num_target_layers = num_target_layers
        self._counters = counters
        self._flags = Flags(device, len(counters), timeout_s)
        self._clock = Clock(self._flags.waited) if is_timed else None
        self._flags_from = flags_from
        self._timeout_s = timeout_s
        self._hold_cycles = HOLD_CYCLES * (hold_layers or 0)
        self._is_fork_captured = False
        # What was captured by flags: per number of rows each layer's stages, then the graphs made of them.
        self._stages: dict[int, dict[int, list[Stage]]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        # The pass that was announced last: its rows, whether a graph of it ran, whether its layers ran one by one.
        self._num_rows = 0
        self._is_replay = False
        self._has_layers = False

    def begin_pass(self, num_rows: int) -> None:
        """Prepare for a pass of the target over so many rows, padding included."""
        self._start_if_replayed()  # a pass that nobody ended
        self._num_rows, self._is_replay, self._has_layers = num_rows, False, False
        if num_rows not in self._stages:
            self._beside.join()

    def begin_replay(self) -> None:
        """Note that a graph of the pass, or of a piece of it, is captured or replayed next."""
        self._is_replay = True

    def submit(self, layer: int, stages: list[Stage]) -> None:
        """Fork a layer's work from the current stream, or leave it to the graphs beside."""
        if self._is_by_flags(layer):
            self._flags.publish(layer)
            self._stages.setdefault(self._num_rows, {})[layer] = stages
            return
        scores, copies = self._joined.scores, self._joined.lane(layer)
        scores.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(scores):
            for stage in stages[:-1]:
                stage()
        copies.wait_stream(scores)
        with torch.cuda.stream(copies):
            self._transfer(layer, stages[-1])
        self._joined.busy |= {scores, copies}
        self._is_fork_captured = torch.cuda.is_current_stream_capturing()

    def wait(self, layer: int) -> bool:
        """Order the current stream after the layer's last transfer; False, since the device counts late layers."""
        self._has_layers = True
        if self._is_by_flags(layer):
            self._flags.await_done(layer, self._counters)
        elif not torch.cuda.is_current_stream_capturing():
            self._beside.join()
        return False

    def end_pass(self) -> None:
        """Order the current stream after what this pass forked; start the graphs beside one that was replayed.

        A capture does nothing about work forked outside it, as when a piece of a pass is captured between layers.
        """
        is_capturing = torch.cuda.is_current_stream_capturing()
        if self._is_fork_captured == is_capturing:
            self._join()
        if not is_capturing:
            self._start_if_replayed()
            self._num_rows = 0

    def capture(self) -> None:
        """Make the graphs beside those captured so far, so that no step has to."""
        for num_rows in self._stages.keys() - self._graphs.keys():
            self._graphs[num_rows] = self._capture_beside(self._stages[num_rows])

    def settle(self, action: Callable[[], None]) -> None:
        """Run something, such as a copy of the device counters, where no selection runs at the same time."""
        self._beside.scores.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside.scores):
            action()
        self._beside.busy.add(self._beside.scores)

    def waited(self) -> torch.Tensor:
        """Return `int64[num_layers, len(Waited)]` on the device: what the foreground waited for."""
        return self._flags.waited

    def check(self) -> None:
        """Check that no wait was given up.

        Raises:
            TransferTimeoutError: One was: what the device computed since then is not to be used.
        """
        if (layer := self._flags.failed_layer()) is not None:
            raise TransferTimeoutError(
                f"layer {layer}: background work not done after {self._timeout_s:g} s; it may still write into the "
                "working set"
            )

    def fence(self) -> None:
        """Order the current stream after everything forked and everything beside."""
        self.end_pass()
        self._beside.join()

    def close(self) -> None:
        """Wait for the streams."""
        self._joined.synchronize()
        self._beside.synchronize()

    def _is_by_flags(self, layer: int) -> bool:
        return (
            self._flags_from is not None
            and self._num_rows >= self._flags_from
            and layer < self._num_target_layers
            and torch.cuda.is_current_stream_capturing()
        )

    def _start_if_replayed(self) -> None:
        """Start the graphs beside if one graph of the whole pass was replayed: then no layer ran one by one."""
        num_rows = self._num_rows
        if not self._is_replay or self._has_layers or num_rows not in self._stages:
            return
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._capture_beside(self._stages[num_rows])
        selection, transfer = self._graphs[num_rows]
        with torch.cuda.stream(self._beside.scores):
            selection.replay()
        with torch.cuda.stream(self._beside.lanes[0]):
            transfer.replay()
        self._beside.busy |= {self._beside.scores, self._beside.lanes[0]}

    def _capture_beside(self, stages: dict[int, list[Stage]]) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        flags = self._flags

        def select() -> None:
            for layer in sorted(stages):
                flags.await_ready(layer)
                for stage in stages[layer][:-1]:
                    stage()
                flags.pick(layer)

        def transfer() -> None:
            first, *others = self._beside.lanes
            for lane in others:
                lane.wait_stream(first)
            for layer in sorted(stages):
                with torch.cuda.stream(self._beside.lane(layer)):
                    flags.await_picked(layer)
                    self._transfer(layer, stages[layer][-1])
                    flags.finish(layer)
            for lane in others:
                first.wait_stream(lane)

        return _captured(select, self._beside.scores), _captured(transfer, self._beside.lanes[0])

    def _join(self) -> None:
        """Order the current stream after what was forked from it; what it waits is the last layer's."""
        clock = self._clock if self._joined.busy else None
        if clock is not None:
            clock.begin_wait()
        self._joined.join()
        if clock is not None:
            clock.end_wait(self._num_target_layers - 1)

    def _transfer(self, layer: int, stage: Stage) -> None:
        """Run a layer's transfer on the current stream."""
        if self._clock is not None:
            self._clock.begin(layer)
        self._hold()
        stage()
        if self._clock is not None:
            self._clock.end(layer)

    def _hold(self) -> None:
        if self._hold_cycles:
            torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]


class _Streams:
    """One stream for predict and select, and lanes for transfers, which take turns by layer."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        self.scores = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(num_lanes)]  # type: ignore[no-untyped-call]
        # Those that may have work which nobody has waited for.
        self.busy = set[torch.cuda.Stream]()

    def lane(self, layer: int) -> torch.cuda.Stream:
        """Return the stream of a layer's transfers."""
        return self.lanes[layer % len(self.lanes)]

    def join(self) -> None:
        """Order the current stream after all that may still have work."""
        current = torch.cuda.current_stream()
        for stream in self.busy:
            current.wait_stream(stream)
        self.busy.clear()

    def synchronize(self) -> None:
        for stream in (self.scores, *self.lanes):
            stream.synchronize()


def _captured(action: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Other threads, as the one that waits for sampled tokens, go on calling CUDA meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        action()
    return graph
