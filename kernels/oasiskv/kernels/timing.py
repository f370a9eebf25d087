"""How long work on a GPU takes: replays of CUDA graphs between events, alone and beside a foreground."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch

from oasiskv.kernels.foreground import Foreground

Action = Callable[[int], object]
"""Does one thing for one layer, on the current stream."""


def _stream(priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture(action: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture work into a graph after a warm-up that compiles its kernels."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        action()
    return graph


def milliseconds(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, before: Callable[[], None] | None = None, repeats: int = 12
) -> float:
    """Return the median time of a replay; `before` runs untimed ahead of each."""
    times = []
    with torch.cuda.stream(stream):
        for i in range(repeats + 3):
            if before is not None:
                before()
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 3:
                times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def measure(
    actions: Sequence[Action], num_layers: int, before: Callable[[], None] | None = None, repeats: int = 12
) -> float:
    """Return the milliseconds that actions take in all layers, one after the other, in one graph."""

    def all_layers() -> None:
        for layer in range(num_layers):
            for action in actions:
                action(layer)

    stream = _stream()
    return milliseconds(capture(all_layers, stream), stream, before, repeats)


def measure_launched(action: Action, num_layers: int, repeats: int = 5) -> float:
    """Return the milliseconds of an action in all layers, launched one by one: for what no graph can hold."""
    stream, times = _stream(), []
    with torch.cuda.stream(stream):
        for _ in range(repeats + 1):
            start, end = _event(), _event()
            start.record()
            for layer in range(num_layers):
                action(layer)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return float(statistics.median(times[1:]))


def measure_together(
    foreground: Foreground,
    compute: Sequence[Action],
    copies: Sequence[Action],
    before: Callable[[], None] | None = None,
) -> float:
    """Return the milliseconds of a step: each layer of the foreground starts its background on two other streams.

    `compute` comes before `copies` within a layer, each on a stream of its own; the step ends when all have ended.
    """
    main, side, link = _stream(), _stream(), _stream(priority=-1)

    def step() -> None:
        for layer in range(foreground.model.num_layers):
            foreground.layer(layer)
            if compute:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    for action in compute:
                        action(layer)
            if copies:
                link.wait_stream(side if compute else main)
                with torch.cuda.stream(link):
                    for action in copies:
                        action(layer)
        for stream in (side, link) if compute and copies else (side,) if compute else (link,) if copies else ():
            main.wait_stream(stream)

    return milliseconds(capture(step, main), main, before)


def measure_beside(
    foreground: torch.cuda.CUDAGraph, background: Sequence[Action], num_layers: int
) -> tuple[float, float]:
    """Return the milliseconds of a foreground step beside a background that never pauses, and of a background step."""
    main, side = _stream(), _stream(priority=-1)

    def all_layers() -> None:
        for layer in range(num_layers):
            for action in background:
                action(layer)

    graph = capture(all_layers, side)
    alone = milliseconds(graph, side, repeats=4)
    own = milliseconds(foreground, main, repeats=4)
    torch.cuda.synchronize()
    steps = 8
    marks = [_event() for _ in range(steps + 1)]
    turns = [_event() for _ in range(int(2.5 * steps * own / alone) + 3)]
    with torch.cuda.stream(side):
        for turn in turns:
            turn.record()
            graph.replay()
    with torch.cuda.stream(main):
        for mark in marks[:-1]:
            mark.record()
            foreground.replay()
        marks[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:])]
    during = [a.elapsed_time(b) for a, b in itertools.pairwise(turns[1:])][: max(1, len(turns) // 3)]
    return statistics.median(times), statistics.median(during)


def copy_rates(device: torch.device) -> dict[str, float]:
    """Return what the memory and the link give to plain copies of gigabytes, in GB/s."""
    big, other = (torch.randn(2**31, device=device, dtype=torch.bfloat16) for _ in range(2))
    host = torch.empty(2**29, dtype=torch.bfloat16, pin_memory=True)
    part = big[: 2**29]
    size, link = big.numel() * 2, host.numel() * 2

    def rate(action: Callable[[], object], num_bytes: int) -> float:
        stream = _stream()
        times = []
        with torch.cuda.stream(stream):
            for _ in range(6):
                start, end = _event(), _event()
                start.record()
                action()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        return num_bytes / float(statistics.median(times[1:])) / 1e6

    found = {
        "hbm_copy_gbps": rate(lambda: other.copy_(big), 2 * size),
        "host_to_device_gbps": rate(lambda: part.copy_(host, non_blocking=True), link),
        "device_to_host_gbps": rate(lambda: host.copy_(part, non_blocking=True), link),
    }
    return found
