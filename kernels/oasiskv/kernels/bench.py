"""A decode step of every operation on one GPU, alone and beside attention and matrix products, in CUDA graphs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from oasiskv.core.host_memory import FP8_SCALE_BYTES, fp8_part_bytes
from oasiskv.kernels.complete import kernel as complete_kernel
from oasiskv.kernels.copies import Copy, Limit, Skipped, copies_the_same, copy_engines
from oasiskv.kernels.foreground import Foreground, Model
from oasiskv.kernels.fp8 import kernel as fp8_kernel
from oasiskv.kernels.fp8.reference import write
from oasiskv.kernels.predict import kernel as predict_kernel
from oasiskv.kernels.rows import Counter, SummaryLayout, stamp_of
from oasiskv.kernels.select import kernel as select_kernel
from oasiskv.kernels.summarize import kernel as summarize_kernel
from oasiskv.kernels.timing import (
    Action,
    capture,
    copy_rates,
    measure,
    measure_beside,
    measure_launched,
    measure_together,
    milliseconds,
)
from oasiskv.kernels.transfer import kernel as transfer_kernel

__all__ = [
    "PARTS",
    "Action",
    "Bench",
    "Foreground",
    "Memory",
    "Model",
    "Size",
    "Step",
    "capture",
    "ceilings",
    "measure",
    "measure_beside",
    "measure_together",
    "milliseconds",
]


class Step:
    """The tensors of one batch in every layer, and what a decode step does with them.

    Args:
        model: Sizes.
        memory: The layers' KV caches and the host pool, shared by the batches that are measured.
        num_rows: Requests in the batch.
        num_blocks: Complete blocks of each request.
        kind: Kind of summaries.
        is_fp8: Whether the host holds fp8 units.
        has_fp8_rows: Whether summary rows are fp8.
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
        has_fp8_rows: bool = False,
    ) -> None:
        self.model, self.memory, self.num_rows, self.num_blocks = model, memory, num_rows, num_blocks
        self.units = memory.fp8_units if is_fp8 else memory.units
        self.unit_bytes = model.unit_bytes // 2 + FP8_SCALE_BYTES if is_fp8 else model.unit_bytes
        self.layout = SummaryLayout(
            kind=kind, block_size=model.block_size, head_dim=model.head_dim, is_fp8=has_fp8_rows
        )
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
            torch.randn(num_rows, heads * model.group, model.head_dim, device=device, dtype=model.dtype)
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
        if has_fp8_rows:
            self._fill_pages()

    def _fill_pages(self) -> None:
        """Fill the pages with rows of normal numbers: bytes at random would be numbers of every size, and NaN."""
        layout, caches = self.layout, self.memory.kv_caches
        for pages in self.page_ids.long():
            shape = (len(pages), self.model.num_kv_heads, layout.rows_per_page, layout.width)
            rows = torch.randn(shape, device=pages.device).abs()
            if layout.kind == "minmax":
                rows[..., layout.head_dim :] *= -1
            powers = torch.full(shape[:3], 127, dtype=torch.uint8, device=pages.device)
            content = torch.cat([rows.to(torch.float8_e4m3fn).view(torch.uint8).flatten(2), powers], -1)
            for cache in caches:
                cache.view(torch.uint8).flatten(2)[pages, :, : content.shape[-1]] = content

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
        """Take in the blocks that `rows` says are finished, and write them to the host."""
        kv_cache, resident = self.memory.kv_caches[layer], self.resident[layer]
        complete_kernel.complete(
            kv_cache,
            rows,
            resident,
            self.stamp[layer],
            self.slot_ids,
            self.page_ids,
            self.counters,
            self.layout,
            1,
            rounds=self.units.dtype == torch.uint8,
        )
        place = layer % self.units.shape[1]
        complete_kernel.keep(kv_cache, self.units, place, rows, resident, self.slot_ids, self.host_table)

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
        model, width = self.model, self.layout.width
        row_bytes = width + 1 if self.layout.is_fp8 else width * self.layout.dtype_bytes
        return model.num_layers * self.num_rows * model.num_kv_heads * self.num_blocks * row_bytes

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
        self.model, self.device = model, device
        unit = (model.num_kv_heads, model.block_size, 2 * model.head_dim)
        self.kv_caches = [
            torch.randn(num_blocks, *unit, device=device, dtype=model.dtype) for _ in range(model.num_layers)
        ]
        # A few layers of the pool stand for all: the link does not care, and pinning takes time.
        self.units = torch.empty(
            num_host_blocks, 4, *unit, dtype=model.dtype, pin_memory=device.type == "cuda"
        )  # fmt: skip
        blocks = torch.arange(num_host_blocks, device=device) % num_blocks
        for layer in range(4):
            self.units[:, layer] = self.kv_caches[layer % model.num_layers][blocks].to(self.units.device)
        part_bytes = fp8_part_bytes(model.num_kv_heads, model.block_size, model.head_dim)
        shape = (num_host_blocks, 4, part_bytes)
        self.fp8_units = torch.zeros(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        write(self.fp8_units, 0, torch.zeros(1, dtype=torch.int64), self.units[:1, 0])
        self.fp8_units[:] = self.fp8_units[0, 0].clone()
        self.any_ids = torch.randperm(num_blocks, device=device).int()


def ceilings(memory: Memory) -> dict[str, float]:
    """Return what the memory and the link give to plain copies, in GB/s."""
    return copy_rates(memory.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What an operation is measured at."""

    rows: int
    """Requests."""
    blocks: int
    """Complete blocks of each."""
    kind: Literal["minmax", "mid"] = "minmax"
    """Kind of summaries."""
    has_fp8_rows: bool = False
    """Whether those are fp8."""


SIZES = (
    *(Size(rows=rows, blocks=1024) for rows in (1, 16, 40, 96)),
    Size(rows=96, blocks=256),
    Size(rows=96, blocks=1024, kind="mid"),
    *(Size(rows=rows, blocks=8192) for rows in (1, 8)),
    *(Size(rows=rows, blocks=1024, has_fp8_rows=True) for rows in (1, 40, 96)),
    Size(rows=96, blocks=1024, kind="mid", has_fp8_rows=True),
    *(Size(rows=rows, blocks=8192, has_fp8_rows=True) for rows in (1, 8)),
)

BATCHES = (1, 16, 40, 96)
"""Requests of the batches whose whole step is measured, at 1,024 blocks each."""

PARTS = ("predict", "select", "transfer", "store", "complete", "summarize", "round_blocks", "others", "beside")
"""What can be measured by itself: an operation alone, the copies of others, and all beside a foreground."""


class Bench:
    """One run on the device of a memory.

    Args:
        memory: Made for the largest batch.
        emit: Takes one row of results at a time: `op`, sizes, `ms` of all layers together, `bytes`, `gbps`, and `share`
            of the ceiling that plain copies reached in this run.
        parts: Of `PARTS`.
    """

    def __init__(self, memory: Memory, emit: Callable[[dict[str, object]], None], parts: Sequence[str] = PARTS) -> None:
        self.memory, self.model, self._emit, self._parts = memory, memory.model, emit, parts
        self._ceiling = ceilings(memory)
        emit({"op": "ceilings", **self._ceiling})

    def run(
        self,
        sizes: Iterable[Size] = SIZES,
        batches: Iterable[int] = BATCHES,
        others: Callable[[Step], Iterable[Copy | Skipped]] | None = None,
    ) -> None:
        """Measure.

        Args:
            sizes: Of single operations.
            batches: Requests of whole steps.
            others: Gives what other projects copy a step's plan with.
        """
        for size in sizes:
            self._alone(size)
        batches = list(batches)
        for rows in batches if "beside" in self._parts else ():
            for is_fp8 in (False, True):
                self._beside(self._step(Size(rows=rows, blocks=1024), is_fp8=is_fp8))
        # Last, since a copy that fails may leave the device unusable.
        for rows in batches if "others" in self._parts else ():
            step = self._step(Size(rows=rows, blocks=1024))
            for copy in (*copy_engines(step), *(others(step) if others is not None else ())):
                self._copy(step, copy)

    def _step(self, size: Size, *, is_fp8: bool = False) -> Step:
        sizes = self.model, self.memory, size.rows, size.blocks, size.kind
        return Step(*sizes, is_fp8=is_fp8, has_fp8_rows=size.has_fp8_rows)

    def _say(self, op: str, step: Step, ms: float, num_bytes: int, limit: Limit, **more: object) -> None:
        kind = step.layout.kind + ("-fp8" if step.layout.is_fp8 else "")
        sizes = {"rows": step.num_rows, "blocks": step.num_blocks, "kind": kind}
        gbps = num_bytes / ms / 1e6
        found = {"ms": round(ms, 3), "bytes": num_bytes, "gbps": round(gbps, 1)}
        self._emit({"op": op, **sizes, **found, "share": round(gbps / self._ceiling[limit], 3), **more})

    def _alone(self, size: Size) -> None:
        """Measure operations one by one."""
        step, layers, model = self._step(size), self.model.num_layers, self.model
        if "predict" in self._parts:
            self._say("predict", step, measure([step.predict], layers), step.predict_bytes, "hbm_copy_gbps")
        if "select" in self._parts and not size.has_fp8_rows:
            step.predict(0)
            self._say("select", step, measure([step.select], layers, step.reset), 0, "hbm_copy_gbps")
        if size.rows == 1:
            block_bytes = layers * size.blocks * model.unit_bytes * model.num_kv_heads
            if "summarize" in self._parts:
                ms = measure([step.summarize], layers)
                self._say("summarize", step, ms, block_bytes // 2, "hbm_copy_gbps")
            if "round_blocks" in self._parts:
                ms = measure([step.round_blocks], layers)
                self._say("round_blocks", step, ms, 2 * block_bytes, "hbm_copy_gbps")
        if size.kind == "mid" or size.blocks != 1024 or size.has_fp8_rows:
            return
        for is_fp8 in (False, True):
            one, suffix = self._step(size, is_fp8=is_fp8), "-fp8" if is_fp8 else ""
            finished = len(range(0, size.rows, model.block_size))
            complete = partial(one.complete, rows=one.finished(model.block_size))
            completed_bytes = layers * model.num_kv_heads * one.unit_bytes * finished
            jobs: tuple[tuple[str, Action, int, Limit], ...] = (
                ("transfer", one.transfer, one.transfer_bytes, "host_to_device_gbps"),
                ("store", one.store, one.transfer_bytes, "device_to_host_gbps"),
                ("complete", complete, completed_bytes, "device_to_host_gbps"),
            )
            for name, action, moved, limit in jobs:
                if name in self._parts:
                    self._say(name + suffix, one, measure([action], layers, one.reset), moved, limit)

    def _copy(self, step: Step, copy: Copy | Skipped) -> None:
        """Measure the copies of others, if they copy the right bytes."""
        try:
            reason = copy.reason if isinstance(copy, Skipped) else self._why_not(step, copy)
        except RuntimeError as error:
            reason = f"it failed: {error}"
        if reason is not None:
            self._emit({"op": copy.name, "rows": step.num_rows, "skipped": reason})

    def _why_not(self, step: Step, copy: Copy) -> str | None:
        """Measure a copy, or say why that makes no sense."""
        if not copies_the_same(step, copy):
            return "it copied other bytes"
        if copy.is_captured:
            ms = measure([copy.action], copy.num_layers, repeats=5)
        else:
            ms = measure_launched(copy.action, copy.num_layers)
        more = {"layers": copy.num_layers, "launched": "in a graph" if copy.is_captured else "one by one"}
        self._say(copy.name, step, ms, copy.num_bytes, copy.limit, **more)
        return None

    def _beside(self, step: Step) -> None:
        """Measure a batch's foreground alone, with each background operation, and with all of them.

        Emits `step_ms` of a step with one round of the operation in it, `step_slowdown` by it, and of single operations
        also `slowdown`: of the foreground while they run without a pause; for copies `gbps`, what they reach then. What
        predict costs beyond the time of its bytes is `beyond_share_of_bytes`.
        """
        foreground = Foreground(self.model, step.num_rows, self.memory.device)
        layers, sizes = self.model.num_layers, {"rows": step.num_rows, "blocks": step.num_blocks}
        graph, alone = foreground_graph(foreground)
        is_fp8 = step.units is not step.memory.units
        suffix = "-fp8" if is_fp8 else ""
        self._emit({"op": "foreground", **sizes, "step_ms": round(alone, 3)})
        compute = (step.predict, step.select)
        complete = partial(step.complete, rows=step.finished(self.model.block_size))
        jobs: dict[str, tuple[tuple[Action, ...], tuple[Action, ...]]] = {
            "predict": ((step.predict,), ()),
            "select": ((step.select,), ()),
            "predict+select": (compute, ()),
            "summarize": ((step.summarize,), ()),
            f"complete{suffix}": ((complete,), ()),
            f"transfer{suffix}": ((), (step.transfer,)),
            f"store{suffix}": ((), (step.store,)),
            f"predict+select+transfer{suffix}": (compute, (step.transfer,)),
        }
        share_ms = step.predict_bytes / self._ceiling["hbm_copy_gbps"] / 1e6
        for name, (first, then) in jobs.items():
            if is_fp8 and suffix not in name:
                continue
            ms = measure_together(foreground, first, then, step.reset)
            found = {"step_ms": round(ms, 3), "step_slowdown": round(ms / alone - 1, 3)}
            if "predict" in name and not then:
                found["beyond_share_of_bytes"] = round((ms - alone - share_ms) / alone, 3)
            if not (first and then):
                beside, own = measure_beside(graph, (*first, *then), layers)
                found["slowdown"] = round(beside / alone - 1, 3)
                if then:
                    found["gbps"] = round(step.transfer_bytes / own / 1e6, 1)
            self._emit({"op": f"foreground+{name}", **sizes, **found})


def foreground_graph(foreground: Foreground) -> tuple[torch.cuda.CUDAGraph, float]:
    """Return a graph of a whole step of the foreground, and its milliseconds."""

    def all_layers() -> None:
        for layer in range(foreground.model.num_layers):
            foreground.layer(layer)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = capture(all_layers, stream)
    return graph, milliseconds(graph, stream)
