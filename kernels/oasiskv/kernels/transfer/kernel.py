"""The Triton kernels of transfer and store.

The host link is fast but far away: what matters is that enough bytes are on the way at any time, and that few SMs are
taken from attention and matrix products. So a program first looks up where the units of its share lie, then streams
them through a ring in shared memory, where a unit is asked for as soon as the oldest has left. The shapes that were
tried are in docs/design/0002-kernels.md.
"""

import torch
import triton
import triton.language as tl

from oasiskv.core.errors import UnsupportedError
from oasiskv.kernels.fp8 import kernel as fp8
from oasiskv.kernels.fp8.kernel import exponent_of, finite_bits, narrow, power_of_two, widen
from oasiskv.kernels.rows import Row
from oasiskv.kernels.scratch import scratch

TRANSFER_PROGRAMS = 4
"""Programs that fetch for a layer; each occupies at most one SM. Two layers may be fetched for at the same time."""
FP8_TRANSFER_PROGRAMS = 8
"""Programs that fetch fp8 units, which they widen: a few cannot keep up with the link."""
TRANSFER_BYTES = 98304
"""Of the ring of a fetching program: 12 units of 8 KiB, 24 of 4 KiB."""
TRANSFER_WARPS = 4
STORE_PROGRAMS = 4
"""Programs that write through."""
STORE_BYTES = 32768
"""Bytes that a storing program writes at once."""
STORE_WARPS = 8
_RING_BYTES = 196608
"""Shared memory that a ring may take, of 227 KiB on Hopper."""
_LANES = 256
"""Plan entries that a program looks up at once."""


@triton.jit
def _find(
    entry, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs, num_entries,
    H: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, REQUEST: tl.constexpr,
):  # fmt: skip
    """Return (is planned, unit of the host pool, unit of the cache) of plan entries."""
    # First candidates of all heads first: a plan that is not full then has its gaps at the end.
    pair = entry % num_pairs
    at = (pair * C + entry // num_pairs).to(tl.int64) * 2
    block = tl.load(plan + at, mask=entry < num_entries, other=-1)
    is_planned = block >= 0
    slot = tl.load(plan + at + 1, mask=is_planned, other=0)
    request = tl.load(rows + (pair // H) * COLUMNS + REQUEST, mask=is_planned, other=0).to(tl.int64)
    host = tl.load(host_table + request * host_stride + block, mask=is_planned, other=0)
    engine = tl.load(slot_ids + request * slot_stride + slot, mask=is_planned, other=0)
    return is_planned, (host * num_layers + layer) * H + pair % H, engine * H + pair % H


@triton.jit(do_not_specialize=["layer", "num_pairs", "num_entries"])
def _transfer(
    units, scales, kv_cache, plan, rows, host_table, host_stride, slot_ids, slot_stride, found, layer, num_layers,
    num_pairs, num_entries, H: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, REQUEST: tl.constexpr, FP8: tl.constexpr,
    PART: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    share = tl.cdiv(num_entries, num_programs)
    mine = found + program.to(tl.int64) * share
    count = tl.zeros([], tl.int32)
    for start in range(0, share, LANES):
        entry = (start + tl.arange(0, LANES)) * num_programs + program
        is_planned, source, target = _find(
            entry, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs,
            num_entries, H, C, COLUMNS, REQUEST,
        )  # fmt: skip
        place = count + tl.cumsum(is_planned.to(tl.int32), axis=0) - 1
        tl.store(mine + place, (source.to(tl.int64) << 32) | target.to(tl.int64), mask=is_planned)
        count += tl.sum(is_planned.to(tl.int32), axis=0)
    tl.debug_barrier()

    if FP8:
        _widen_all(units, scales, kv_cache, mine, count, H, DEPTH, PART, B, D, DIM, NATIVE)
    else:
        # [1, SPAN]
        word = tl.arange(0, SPAN)[None, :]
        inside = word < WORDS
        for i in tl.range(0, count, num_stages=DEPTH):
            # A vector of one, since vectors are loaded through the ring: a plain load would return only after the host
            # memory that was asked for before it.
            unit = tl.load(mine + i + tl.arange(0, 1))[:, None]
            content = tl.load(units + (unit >> 32) * WORDS + word, mask=inside)
            tl.store(kv_cache + (unit & 0x7FFFFFFF) * WORDS + word, content, mask=inside)


@triton.jit
def _widen_all(
    units, scales, kv_cache, mine, count, H: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, B: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Stream fp8 units through the ring and widen each on its way out."""
    # [2 * B, DIM]: K and V of each token.
    row, dim = tl.arange(0, 2 * B)[:, None], tl.arange(0, DIM)[None, :]
    inside = dim < D
    UNIT: tl.constexpr = B * 2 * D
    for i in tl.range(0, count, num_stages=DEPTH):
        unit = tl.load(mine + i + tl.arange(0, 1))[:, None]
        part, head = (unit >> 32) // H, (unit >> 32) % H
        numbers = tl.load(units + (part * PART + head * UNIT) + (row * D + dim), mask=inside)
        # The scales of K and of V in one word.
        pair = tl.load(scales + part * (PART // 8) + (H * UNIT // 8 + head))
        bits = tl.where(row % 2 == 0, pair, pair >> 32).to(tl.int32)
        content = widen(numbers, bits.to(tl.float32, bitcast=True), kv_cache.dtype.element_ty, NATIVE)
        tl.store(kv_cache + (unit & 0x7FFFFFFF) * UNIT + (row * D + dim), content, mask=inside)


@triton.jit(do_not_specialize=["layer", "num_entries"], do_not_specialize_on_alignment=["block_ids", "host_ids"])
def _store(
    kv_cache,
    block_ids,
    units,
    host_ids,
    layer,
    num_layers,
    num_entries,
    H: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    word = tl.arange(0, SPAN)[None, :]
    for batch in range(tl.program_id(0), tl.cdiv(num_entries, BATCH), PROGRAMS):
        entry = batch * BATCH + tl.arange(0, BATCH)
        is_entry = entry < num_entries
        head = entry % H
        engine = tl.load(block_ids + entry // H, mask=is_entry, other=0).to(tl.int64)
        host = tl.load(host_ids + entry // H, mask=is_entry, other=0).to(tl.int64)
        source = (engine * H + head) * WORDS
        target = ((host * num_layers + layer) * H + head) * WORDS
        mask = is_entry[:, None] & (word < WORDS)
        content = tl.load(kv_cache + source[:, None] + word, mask=mask)
        tl.store(units + target[:, None] + word, content, mask=mask)


@triton.jit(do_not_specialize=["layer", "num_entries"], do_not_specialize_on_alignment=["block_ids", "host_ids"])
def _store_fp8(
    kv_cache, block_ids, units, scales, host_ids, layer, num_layers, num_entries, H: tl.constexpr, B: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, BATCH: tl.constexpr, PROGRAMS: tl.constexpr,
    LEAST: tl.constexpr, TOP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    # [2 * BATCH, B, DIM]: K and V of each unit.
    half = tl.arange(0, 2 * BATCH)
    token, dim = tl.arange(0, B)[None, :, None], tl.arange(0, DIM)[None, None, :]
    UNIT: tl.constexpr = B * 2 * D
    at = (half % 2 * D)[:, None, None] + (token * (2 * D) + dim)
    for batch in range(tl.program_id(0), tl.cdiv(num_entries, BATCH), PROGRAMS):
        entry = batch * BATCH + half // 2
        is_entry = entry < num_entries
        head = entry % H
        engine = tl.load(block_ids + entry // H, mask=is_entry, other=0).to(tl.int64)
        host = tl.load(host_ids + entry // H, mask=is_entry, other=0).to(tl.int64)
        mask = is_entry[:, None, None] & (dim < D)
        source = (engine * H + head) * UNIT
        content = tl.load(kv_cache + source[:, None, None] + at, mask=mask, other=0).to(tl.float32)
        exponent = exponent_of(tl.max(tl.max(finite_bits(content), axis=2), axis=1), LEAST, TOP)
        part = (host * num_layers + layer) * PART
        target = part + head * UNIT
        tl.store(units + target[:, None, None] + at, narrow(content, exponent[:, None, None], TOP, NATIVE), mask=mask)
        tl.store(scales + (part + H * UNIT) // 4 + (head * 2 + half % 2), power_of_two(exponent), mask=is_entry)


def _words(kv_cache: torch.Tensor) -> int:
    """Return the 8-byte words of one unit: wide accesses, whatever the dtype."""
    return kv_cache.shape[2] * kv_cache.shape[3] * kv_cache.element_size() // 8


def transfer(
    units: torch.Tensor,
    layer: int,
    kv_cache: torch.Tensor,
    plan: torch.Tensor,
    rows: torch.Tensor,
    host_table: torch.Tensor,
    slot_ids: torch.Tensor,
    *,
    num_programs: int | None = None,
    depth: int | None = None,
    num_warps: int = TRANSFER_WARPS,
) -> None:
    """Launch it on the current stream; see `op.transfer`."""
    is_fp8 = units.dtype == torch.uint8
    num_programs = num_programs or (FP8_TRANSFER_PROGRAMS if is_fp8 else TRANSFER_PROGRAMS)
    num_rows, num_kv_heads, max_cap, _ = plan.shape
    num_entries = num_rows * num_kv_heads * max_cap
    if num_entries == 0:
        return
    num_units = max(units.shape[0] * units.shape[1], kv_cache.shape[0]) * num_kv_heads
    if num_units > 2**31 - 1:
        raise UnsupportedError(f"units: expected at most {2**31 - 1} of one KV head's blocks, got {num_units}")
    words = _words(kv_cache)
    span = triton.next_power_of_2(words)
    block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
    dim = triton.next_power_of_2(head_dim)
    unit_bytes = block_size * 2 * dim if is_fp8 else 8 * span
    programs = min(num_programs, num_entries)
    found, _ = scratch(kv_cache.device, 2 * (num_entries + 2 * programs))
    _transfer[(programs,)](
        units if is_fp8 else units.view(torch.int64),
        units.view(torch.int64),
        kv_cache if is_fp8 else kv_cache.view(torch.int64),
        plan,
        rows,
        host_table,
        host_table.stride(0),
        slot_ids,
        slot_ids.stride(0),
        found.view(torch.int64),
        layer,
        units.shape[1],
        num_rows * num_kv_heads,
        num_entries,
        H=num_kv_heads,
        C=max_cap,
        WORDS=words,
        SPAN=span,
        LANES=_LANES,
        DEPTH=max(2, min(depth or TRANSFER_BYTES // unit_bytes, 1 + _RING_BYTES // unit_bytes)),
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        FP8=is_fp8,
        PART=units.shape[-1] if is_fp8 else 0,
        B=block_size,
        D=head_dim,
        DIM=dim,
        NATIVE=kv_cache.is_cuda,
        num_warps=num_warps,
    )


def store(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    host_ids: torch.Tensor,
    *,
    num_programs: int = STORE_PROGRAMS,
    batch_bytes: int = STORE_BYTES,
    num_warps: int = STORE_WARPS,
) -> None:
    """Launch it on the current stream; see `op.store`."""
    num_kv_heads = kv_cache.shape[1]
    num_entries = len(block_ids) * num_kv_heads
    if num_entries == 0:
        return
    if units.dtype == torch.uint8:
        block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3] // 2
        dim = triton.next_power_of_2(head_dim)
        _store_fp8[(num_programs,)](
            kv_cache,
            block_ids,
            units,
            units.view(torch.float32),
            host_ids,
            layer,
            units.shape[1],
            num_entries,
            H=num_kv_heads,
            B=block_size,
            D=head_dim,
            DIM=dim,
            PART=units.shape[-1],
            BATCH=max(1, batch_bytes // (block_size * 2 * dim * kv_cache.element_size())),
            PROGRAMS=num_programs,
            NATIVE=kv_cache.is_cuda,
            **fp8.constants(kv_cache),
            num_warps=num_warps,
        )
        return
    words = _words(kv_cache)
    span = triton.next_power_of_2(words)
    _store[(num_programs,)](
        kv_cache.view(torch.int64),
        block_ids,
        units.view(torch.int64),
        host_ids,
        layer,
        units.shape[1],
        num_entries,
        H=num_kv_heads,
        WORDS=words,
        SPAN=span,
        BATCH=max(1, batch_bytes // (8 * span)),
        PROGRAMS=num_programs,
        num_warps=num_warps,
    )
