"""The Triton kernels of complete and keep."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.fp8 import kernel as fp8
from oasiskv.kernels.fp8.kernel import codes, exponent_of, finite_bits, float_of, held_as, narrow, power_of_two, widen
from oasiskv.kernels.rows import FRESH, Counter, Row, SummaryLayout
from oasiskv.kernels.summarize.kernel import store_fp8_rows


@triton.jit
def _exponent(wide, inside, LEAST: tl.constexpr, TOP: tl.constexpr):
    """Return the exponent of the scale of the K or the V of a unit."""
    return exponent_of(tl.max(tl.max(tl.where(inside, finite_bits(wide), 0), axis=1), axis=0), LEAST, TOP)


@triton.jit
def _rounded(content, inside, LEAST: tl.constexpr, TOP: tl.constexpr):
    """Return the K or the V of a unit as the host will hold it."""
    wide = content.to(tl.float32)
    exponent = _exponent(wide, inside, LEAST, TOP)
    return widen(narrow(wide, exponent, TOP, False), power_of_two(exponent), content.dtype, False)


@triton.jit
def _write_fp8(content, inside, out, out_scale, LEAST: tl.constexpr, TOP: tl.constexpr):
    """Write the K or the V of a unit as fp8, which it was rounded to."""
    wide = content.to(tl.float32)
    exponent = _exponent(wide, inside, LEAST, TOP)
    tl.store(out, narrow(wide, exponent, TOP, False), mask=inside)
    tl.store(out_scale, power_of_two(exponent))


@triton.jit
def _complete(
    kv_cache,
    pages,
    rows,
    resident,
    stamp,
    slot_ids,
    slot_stride,
    page_ids,
    page_stride,
    counters,
    num_sinks,
    H: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PER_PAGE: tl.constexpr,
    MID: tl.constexpr,
    FRESH: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUEST: tl.constexpr,
    NUM_COMPLETE: tl.constexpr,
    STEP: tl.constexpr,
    FINISHED: tl.constexpr,
    COUNTERS: tl.constexpr,
    WASTED: tl.constexpr,
    EVICTED: tl.constexpr,
    FP8_ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    ROUNDS: tl.constexpr,
    LEAST: tl.constexpr,
    TOP: tl.constexpr,
):
    row = rows + tl.program_id(0) * COLUMNS
    head = tl.program_id(1)
    request = tl.load(row + REQUEST).to(tl.int64)
    source = tl.load(row + FINISHED).to(tl.int64)
    if (request >= 0) & (source >= 0):
        block = tl.load(row + NUM_COMPLETE) - 1
        step = tl.load(row + STEP)
        dim = tl.arange(0, DIM)
        # [B, DIM]
        at = (tl.arange(0, B) * (2 * D))[:, None] + dim[None, :]
        inside = (dim < D)[None, :]
        unit: tl.constexpr = B * 2 * D
        keys = tl.load(kv_cache + (source * H + head) * unit + at, mask=inside)
        values = tl.load(kv_cache + (source * H + head) * unit + D + at, mask=inside)
        page = tl.load(page_ids + request * page_stride + block // PER_PAGE).to(tl.int64)

        slot = tl.arange(0, SLOTS)
        state = (request * H + head) * K + slot
        held = tl.load(resident + state, mask=slot < K, other=-1)
        last = tl.load(stamp + state, mask=slot < K, other=0)
        age = tl.where((slot < K) & (held >= num_sinks), last >> 1, 2147483647)
        victim = tl.argmin(age, axis=0, tie_break_left=True)
        engine = tl.load(slot_ids + request * slot_stride + victim).to(tl.int64)
        wasted = tl.sum(tl.where(slot == victim, last & FRESH, 0), axis=0)
        # All of this head's reads come before its writes: the summary page may be the block that was read.
        tl.debug_barrier()

        if ROUNDS:
            keys = _rounded(keys, inside, LEAST, TOP)
            values = _rounded(values, inside, LEAST, TOP)
        target = kv_cache + (engine * H + head) * unit + at
        tl.store(target, keys, mask=inside)
        tl.store(target + D, values, mask=inside)
        tl.store(resident + state, block, mask=slot == victim)
        tl.store(stamp + state, 2 * step, mask=slot == victim)

        page = pages + (page * H + head) * PAGE
        if FP8_ROWS:
            one = tl.zeros([1], tl.int32)
            all_keys = float_of(keys)[None, :, :]
            store_fp8_rows(all_keys, inside, page + one, block % PER_PAGE + one, D, DIM, PER_PAGE, MID)
        else:
            upper = tl.max(float_of(keys), axis=0)
            lower = tl.min(float_of(keys), axis=0)
            WIDTH: tl.constexpr = D if MID else 2 * D
            summary = page + (block % PER_PAGE) * WIDTH + dim
            dtype: tl.constexpr = kv_cache.dtype.element_ty
            if MID:
                tl.store(summary, held_as((upper + lower) / 2, dtype), mask=dim < D)
            else:
                tl.store(summary, held_as(upper, dtype), mask=dim < D)
                tl.store(summary + D, held_as(lower, dtype), mask=dim < D)
        counter = counters + head * COUNTERS
        tl.atomic_add(counter + WASTED, wasted.to(tl.int64), sem="relaxed")
        tl.atomic_add(counter + EVICTED, tl.full([], 1, tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["layer"])
def _keep(
    kv_cache, units, scales, rows, resident, slot_ids, slot_stride, host_table, host_stride, layer, num_layers,
    H: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr, REQUEST: tl.constexpr, NUM_COMPLETE: tl.constexpr, FINISHED: tl.constexpr,
    FP8: tl.constexpr, PART: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0) * COLUMNS
    head = tl.program_id(1)
    request = tl.load(row + REQUEST).to(tl.int64)
    if (request >= 0) & (tl.load(row + FINISHED) >= 0):
        block = tl.load(row + NUM_COMPLETE) - 1
        slot = tl.arange(0, SLOTS)
        held = tl.load(resident + (request * H + head) * K + slot, mask=slot < K, other=-1)
        place = tl.argmax((held == block).to(tl.int32), axis=0, tie_break_left=True)
        engine = tl.load(slot_ids + request * slot_stride + place).to(tl.int64)
        host = tl.load(host_table + request * host_stride + block).to(tl.int64)
        dim = tl.arange(0, DIM)
        # [B, DIM]
        at = (tl.arange(0, B) * (2 * D))[:, None] + dim[None, :]
        inside = (dim < D)[None, :]
        unit: tl.constexpr = B * 2 * D
        keys = tl.load(kv_cache + (engine * H + head) * unit + at, mask=inside)
        values = tl.load(kv_cache + (engine * H + head) * unit + D + at, mask=inside)
        if FP8:
            part = (host * num_layers + layer) * PART
            out = units + part + head * unit + at
            out_scales = scales + (part + H * unit) // 4 + 2 * head
            _write_fp8(keys, inside, out, out_scales, LEAST, TOP)
            _write_fp8(values, inside, out + D, out_scales + 1, LEAST, TOP)
        else:
            out = units + ((host * num_layers + layer) * H + head) * unit + at
            tl.store(out, keys, mask=inside)
            tl.store(out + D, values, mask=inside)


def complete(
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    counters: torch.Tensor,
    layout: SummaryLayout,
    num_sinks: int,
    *,
    rounds: bool,
) -> None:
    """Launch it on the current stream; see `op.complete`."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    if len(rows) == 0:
        return
    budget = resident.shape[-1]
    _complete[(len(rows), num_kv_heads)](
        codes(kv_cache),
        kv_cache.view(torch.uint8) if layout.is_fp8 else codes(kv_cache),
        rows,
        resident,
        stamp,
        slot_ids,
        slot_ids.stride(0),
        page_ids,
        page_ids.stride(0),
        counters,
        num_sinks,
        H=num_kv_heads,
        B=block_size,
        D=width // 2,
        DIM=triton.next_power_of_2(width // 2),
        K=budget,
        SLOTS=triton.next_power_of_2(budget),
        PER_PAGE=layout.rows_per_page,
        MID=layout.kind == "mid",
        FRESH=FRESH,
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        NUM_COMPLETE=Row.NUM_COMPLETE,
        STEP=Row.STEP,
        FINISHED=Row.FINISHED_BLOCK,
        COUNTERS=len(Counter),
        WASTED=Counter.WASTED,
        EVICTED=Counter.EVICTED,
        FP8_ROWS=layout.is_fp8,
        PAGE=block_size * width * (kv_cache.element_size() if layout.is_fp8 else 1),
        ROUNDS=rounds,
        **fp8.constants(kv_cache),
        num_warps=4 if block_size * width <= 8192 else 8,
    )


def keep(
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    host_table: torch.Tensor,
) -> None:
    """Launch it on the current stream; see `op.keep`."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    if len(rows) == 0:
        return
    budget = resident.shape[-1]
    is_fp8 = units.dtype == torch.uint8
    _keep[(len(rows), num_kv_heads)](
        codes(kv_cache),
        codes(units),
        units.view(torch.float32),
        rows,
        resident,
        slot_ids,
        slot_ids.stride(0),
        host_table,
        host_table.stride(0),
        layer,
        units.shape[1],
        H=num_kv_heads,
        B=block_size,
        D=width // 2,
        DIM=triton.next_power_of_2(width // 2),
        K=budget,
        SLOTS=triton.next_power_of_2(budget),
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        NUM_COMPLETE=Row.NUM_COMPLETE,
        FINISHED=Row.FINISHED_BLOCK,
        FP8=is_fp8,
        PART=units.shape[-1] if is_fp8 else 0,
        **fp8.constants(kv_cache),
        num_warps=4 if block_size * width <= 8192 else 8,
    )
