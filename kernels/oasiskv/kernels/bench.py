"""A decode step of every operation on one GPU, alone and beside attention and matrix products, in CUDA graphs."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from oasiskv.core.host_memory import FP8_SCALE_BYTES, fp8_part_bytes
from oasiskv.kernels.complete import kernel as complete_kernel
from oasiskv.kernels.foreground import Foreground, Model
from oasiskv.kernels.fp8 import kernel as fp8_kernel
from oasiskv.kernels.fp8.reference import write
from oasiskv.kernels.predict import kernel as predict_kernel
from oasiskv.kernels.rows import Counter, SummaryLayout, stamp_of
from oasiskv.kernels.select import kernel as select_kernel
from oasiskv.kernels.summarize import kernel as summarize_kernel
from oasiskv.kernels.transfer import kernel as transfer_kernel

Action = Callable[[int], None]
"""Does one thing for one layer, on the current stream."""


class Step:
    """The tensors of one batch in every layer, and what a decode step does with them.

    Args:
        model: Sizes.
        memory: The layers' KV caches and the host pool, shared by the batches that are measured.
        num_rows: Requests in the batch.
        num_blocks: Complete blocks of each request.
        kind: Kind of summaries.
        is_fp8: Whether the host holds fp8 units.
    """

    def __init__(
        self,
        model: Model,
        memory: "Memory",
        num_rows: int,
        num_blocks: int,
        kind: Literal["minmax", "mid"],
        *,
        is_fp8: bool = False,
    ) -> None:
        self.model, self.memory, self.num_rows, self.num_blocks = model, memory, num_rows, num_blocks
        self.units = memory.fp8_units if is_fp8 else memory.units
        self.unit_bytes = model.unit_bytes // 2 + FP8_SCALE_BYTES if is_fp8 else model.unit_bytes
        self.layout = SummaryLayout(kind=kind, block_size=model.block_size, head_dim=model.head_dim)
        device, heads, budget = memory.device, model.num_kv_heads, model.budget
        num_pages = self.layout.num_pages(num_blocks)
        places = torch.randperm(len(memory.kv_caches[0]), device=device)[: num_rows * (budget + num_pages)].int()
        self.slot_ids = places[: num_rows * budget].view(num_rows, budget).contiguous()
        self.page_ids = places[num_rows * budget :].view(num_rows, num_pages).contiguous()
        self.host_table = torch.randint(
            len(memory.units), (num_rows, num_blocks), device=device, dtype=torch.int32
        )  # fmt: skip
        rows = [[i, num_blocks, 5, -1, model.max_cap] for i in range(num_rows)]
        self.rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.queries = [
            torch.randn(num_rows, heads * model.group, model.head_dim, device=device, dtype=torch.bfloat16)
            for _ in range(model.num_layers)
        ]
        self.blocks = torch.empty(num_rows, heads, budget, dtype=torch.int32, device=device)
        self.scores = torch.empty(num_rows, heads, budget, dtype=torch.float32, device=device)
        self.plan = torch.empty(num_rows, heads, model.max_cap, 2, dtype=torch.int32, device=device)
        self.counters = torch.zeros(heads, len(Counter), dtype=torch.int64, device=device)
        state = (model.num_layers, num_rows, heads, budget)
        drawn = torch.rand(*state[:3], num_blocks, device=device)
        self.resident_at_first = drawn.argsort(-1)[..., :budget].int().contiguous()
        self.resident = self.resident_at_first.clone()
        self.stamp = torch.full(state, stamp_of(4), dtype=torch.int32, device=device)
        block = torch.randint(num_blocks, (model.num_layers, num_rows, heads, model.max_cap), device=device)
        slot = torch.rand(*state, device=device).argsort(-1)[..., : model.max_cap]
        self.full_plans = torch.stack([block, slot], -1).int()

    def reset(self) -> None:
        """Put residency back, so that a repeated step has as much to fetch again."""
        self.resident.copy_(self.resident_at_first)
        self.stamp.fill_(stamp_of(4))

    def predict(self, layer: int, **options: Any) -> None:
        """Score all blocks and find the best."""
        predict_kernel.predict(
            self.queries[layer],
            self.rows,
            self.memory.kv_caches[layer],
            self.page_ids,
            self.blocks,
            self.scores,
            self.layout,
            0.0 if self.layout.kind == "mid" else 0.25,
            "max",
            self.model.head_dim**-0.5,
            1,
            **options,
        )

    def select(self, layer: int, **options: Any) -> None:
        """Plan the admissions."""
        select_kernel.select(
            self.blocks,
            self.scores,
            self.rows,
            self.resident[layer],
            self.stamp[layer],
            self.plan,
            self.counters,
            **options,
        )

    def transfer(self, layer: int, **options: Any) -> None:
        """Fetch a full plan of random blocks."""
        transfer_kernel.transfer(
            self.units,
            layer % self.units.shape[1],
            self.memory.kv_caches[layer],
            self.full_plans[layer],
            self.rows,
            self.host_table,
            self.slot_ids,
            **options,
        )

    def store(self, layer: int, **options: Any) -> None:
        """Write as many units through as a transfer fetches, in whole blocks."""
        count = max(1, self.num_rows * self.model.max_cap)
        transfer_kernel.store(
            self.memory.kv_caches[layer],
            self.slot_ids.flatten()[:count],
            self.units,
            layer % self.units.shape[1],
            self.host_table.flatten()[:count],
            **options,
        )

    def complete(self, layer: int, rows: torch.Tensor) -> None:
        """Take in the blocks that `rows` says are finished."""
        complete_kernel.complete(
            self.memory.kv_caches[layer],
            self.units,
            layer % self.units.shape[1],
            rows,
            self.resident[layer],
            self.stamp[layer],
            self.slot_ids,
            self.page_ids,
            self.host_table,
            self.counters,
            self.layout,
            1,
        )

    def finished(self, every: int) -> torch.Tensor:
        """Rows of which each `every`-th has just finished a block."""
        rows = self.rows.clone()
        rows[::every, 3] = self.slot_ids[::every, 0]
        return rows

    def round_blocks(self, layer: int) -> None:
        """Round one request's prompt to fp8."""
        fp8_kernel.round_blocks(self.memory.kv_caches[layer], self.memory.any_ids[: self.num_blocks])

    def summarize(self, layer: int) -> None:
        """Summarize one request's prompt."""
        cache = self.memory.kv_caches[layer]
        ids = self.memory.any_ids[: self.num_blocks]
        summarize_kernel.summarize(cache, ids, cache, self.page_ids[0], 0, self.layout)

    @property
    def predict_bytes(self) -> int:
        """Summary bytes that predict reads in all layers."""
        model = self.model
        return model.num_layers * self.num_rows * model.num_kv_heads * self.num_blocks * self.layout.width * 2

    @property
    def transfer_bytes(self) -> int:
        """Bytes that a full plan fetches in all layers."""
        model = self.model
        return model.num_layers * self.num_rows * model.num_kv_heads * model.max_cap * self.unit_bytes


class Memory:
    """KV caches and host pool, filled with random numbers: zeros would run faster than real data.

    Args:
        model: Sizes.
        num_blocks: Engine blocks of each layer.
        num_host_blocks: Host blocks.
        device: Where the caches lie.
    """

    def __init__(self, model: Model, num_blocks: int, num_host_blocks: int, device: torch.device) -> None:
        self.device = device
        unit = (model.num_kv_heads, model.block_size, 2 * model.head_dim)
        self.kv_caches = [
            torch.randn(num_blocks, *unit, device=device, dtype=torch.bfloat16) for _ in range(model.num_layers)
        ]
        # A few layers of the pool stand for all: the link does not care, and pinning takes time.
        self.units = torch.empty(
            num_host_blocks, 4, *unit, dtype=torch.bfloat16, pin_memory=device.type == "cuda"
        )  # fmt: skip
        self.units.copy_(self.kv_caches[0][0])
        part_bytes = fp8_part_bytes(model.num_kv_heads, model.block_size, model.head_dim)
        shape = (num_host_blocks, 4, part_bytes)
        self.fp8_units = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        write(self.fp8_units, 0, torch.zeros(1, dtype=torch.int64), self.units[:1, 0])
        self.fp8_units[:] = self.fp8_units[0, 0].clone()
        self.any_ids = torch.randperm(num_blocks, device=device).int()


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


def ceilings(memory: Memory) -> dict[str, float]:
    """Return what the memory and the link give to plain copies, in GB/s."""
    big, other = (torch.randn(2**31, device=memory.device, dtype=torch.bfloat16) for _ in range(2))
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


SIZES: tuple[tuple[int, int, Literal["minmax", "mid"]], ...] = (
    (1, 1024, "minmax"),
    (16, 1024, "minmax"),
    (40, 1024, "minmax"),
    (96, 256, "minmax"),
    (96, 1024, "minmax"),
    (96, 1024, "mid"),
    (8, 8192, "minmax"),
    (1, 8192, "minmax"),
)
"""(requests, complete blocks of each, kind of summaries) to measure each operation at."""

FOREGROUNDS = (1, 16, 40, 96)
"""Requests of the batches whose whole step is measured, at 1,024 blocks each."""


def run(emit: Callable[[dict[str, object]], None]) -> None:
    """Measure everything on the current CUDA device.

    Args:
        emit: Takes one row of results at a time: `op`, sizes, `ms` of all layers together, `bytes`, `gbps`, and `share`
            of the ceiling that plain copies reached in this run.
    """
    model, device = Model(), torch.device("cuda")
    memory = Memory(model, 19000, 8192, device)
    ceiling = ceilings(memory)
    emit({"op": "ceilings", **ceiling})

    def say(op: str, step: Step, ms: float, num_bytes: int, limit: str) -> None:
        sizes = {"rows": step.num_rows, "blocks": step.num_blocks, "kind": step.layout.kind}
        gbps = num_bytes / ms / 1e6
        share = round(gbps / ceiling[limit], 3)
        emit({"op": op, **sizes, "ms": round(ms, 3), "bytes": num_bytes, "gbps": round(gbps, 1), "share": share})

    for rows, blocks, kind in SIZES:
        step = Step(model, memory, rows, blocks, kind)
        layers, unit = model.num_layers, model.unit_bytes * model.num_kv_heads
        copied = [("", step), ("-fp8", Step(model, memory, rows, blocks, kind, is_fp8=True))]
        say("predict", step, measure([step.predict], layers), step.predict_bytes, "hbm_copy_gbps")
        step.predict(0)
        say("select", step, measure([step.select], layers, step.reset), 0, "hbm_copy_gbps")
        for name, one in copied if kind == "minmax" and blocks == 1024 else ():
            say(f"transfer{name}", one, measure([one.transfer], layers), one.transfer_bytes, "host_to_device_gbps")
            say(f"store{name}", one, measure([one.store], layers), one.transfer_bytes, "device_to_host_gbps")
            some = one.finished(model.block_size)
            finished = layers * model.num_kv_heads * one.unit_bytes * len(range(0, rows, model.block_size))
            ms = measure([partial(one.complete, rows=some)], layers, one.reset)
            say(f"complete{name}", one, ms, finished, "device_to_host_gbps")
        if rows == 1:
            ms = measure([step.summarize], layers)
            say("summarize", step, ms, layers * blocks * unit // 2, "hbm_copy_gbps")
            say("round_blocks", step, measure([step.round_blocks], layers), layers * blocks * unit * 2, "hbm_copy_gbps")

    for rows in FOREGROUNDS:
        for is_fp8 in (False, True):
            run_beside(Step(model, memory, rows, 1024, "minmax", is_fp8=is_fp8), ceiling, emit)


def run_beside(step: Step, ceiling: dict[str, float], emit: Callable[[dict[str, object]], None]) -> None:
    """Measure a batch's foreground alone and with each background operation, and the whole step.

    Args:
        step: The batch.
        ceiling: What `ceilings` returned.
        emit: Takes one row of results at a time: `step_ms` of a step with one round of the background in it; for the
            copies `slowdown` of the foreground while they run without a pause, and the `gbps` they reach then.
    """
    foreground = Foreground(step.model, step.num_rows, step.memory.device)
    layers, stream = step.model.num_layers, _stream()

    def all_layers() -> None:
        for layer in range(layers):
            foreground.layer(layer)

    graph = capture(all_layers, stream)
    alone = milliseconds(graph, stream)
    sizes = {"rows": step.num_rows, "blocks": step.num_blocks}
    emit({"op": "foreground", **sizes, "step_ms": round(alone, 3)})
    share_ms = step.predict_bytes / ceiling["hbm_copy_gbps"] / 1e6
    compute = (step.predict, step.select)
    ms = measure_together(foreground, compute, (), step.reset)
    beyond = round((ms - alone - share_ms) / alone, 3)
    emit({"op": "foreground+predict+select", **sizes, "step_ms": round(ms, 3), "beyond_share_of_bytes": beyond})
    suffix = "" if step.units is step.memory.units else "-fp8"
    for name, action in ((f"transfer{suffix}", step.transfer), (f"store{suffix}", step.store)):
        ms = measure_together(foreground, (), (action,))
        beside, own = measure_beside(graph, (action,), layers)
        found = {
            "step_ms": round(ms, 3),
            "slowdown": round(beside / alone - 1, 3),
            "gbps": round(step.transfer_bytes / own / 1e6, 1),
        }
        emit({"op": f"foreground+{name}", **sizes, **found})
    ms = measure_together(foreground, compute, (step.transfer,), step.reset)
    emit({"op": f"foreground+predict+select+transfer{suffix}", **sizes, "step_ms": round(ms, 3)})
