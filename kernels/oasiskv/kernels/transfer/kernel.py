"""The Triton kernels of transfer and store.

The host link is fast but far away, so a program keeps two batches of units on the way at any time: it asks for the next
before it stores the one at hand. Batches are large and programs few, because each program takes room on an SM from
attention and matrix products: see docs/design/0002-kernels.md for the shapes tried.
"""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.rows import Row

TRANSFER_PROGRAMS = 8
"""Programs that fetch; each occupies at most one SM."""
TRANSFER_BYTES = 32768
"""Bytes that a fetching program asks for at once."""
STORE_PROGRAMS = 8
"""Programs that write through."""
STORE_BYTES = 32768
"""Bytes that a storing program writes at once."""
_WARPS = 8


@triton.jit
def _find(
    batch,
    plan,
    rows,
    host_table,
    host_stride,
    slot_ids,
    slot_stride,
    layer,
    num_layers,
    num_pairs,
    num_entries,
    H: tl.constexpr,
    C: tl.constexpr,
    WORDS: tl.constexpr,
    BATCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUEST: tl.constexpr,
):
    """Return (is planned, first word in units, first word in the cache) of each entry of a batch."""
    entry = batch * BATCH + tl.arange(0, BATCH)
    # First candidates of all heads first: a plan that is not full then leaves whole batches empty, not holes in each.
    pair = entry % num_pairs
    at = (pair * C + entry // num_pairs).to(tl.int64) * 2
    block = tl.load(plan + at, mask=entry < num_entries, other=-1)
    is_planned = block >= 0
    slot = tl.load(plan + at + 1, mask=is_planned, other=0)
    request = tl.load(rows + (pair // H) * COLUMNS + REQUEST, mask=is_planned, other=0).to(tl.int64)
    head = pair % H
    host = tl.load(host_table + request * host_stride + block, mask=is_planned, other=0).to(tl.int64)
    engine = tl.load(slot_ids + request * slot_stride + slot, mask=is_planned, other=0).to(tl.int64)
    return is_planned, ((host * num_layers + layer) * H + head) * WORDS, (engine * H + head) * WORDS


@triton.jit
def _transfer(
    units,
    kv_cache,
    plan,
    rows,
    host_table,
    host_stride,
    slot_ids,
    slot_stride,
    layer,
    num_layers,
    num_pairs,
    num_entries,
    H: tl.constexpr,
    C: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUEST: tl.constexpr,
):
    word = tl.arange(0, SPAN)[None, :]
    inside = word < WORDS
    batch = tl.program_id(0)
    is_planned, source, target = _find(
        batch, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs, num_entries,
        H, C, WORDS, BATCH, COLUMNS, REQUEST,
    )  # fmt: skip
    # [BATCH, SPAN]
    mask = is_planned[:, None] & inside
    content = tl.load(units + source[:, None] + word, mask=mask)
    next_planned, next_source, next_target = _find(
        batch + PROGRAMS, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs,
        num_entries, H, C, WORDS, BATCH, COLUMNS, REQUEST,
    )  # fmt: skip
    while batch * BATCH < num_entries:
        next_mask = next_planned[:, None] & inside
        next_content = tl.load(units + next_source[:, None] + word, mask=next_mask)
        after_planned, after_source, after_target = _find(
            batch + 2 * PROGRAMS, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers,
            num_pairs, num_entries, H, C, WORDS, BATCH, COLUMNS, REQUEST,
        )  # fmt: skip
        tl.store(kv_cache + target[:, None] + word, content, mask=mask)
        content = next_content
        mask = next_mask
        target = next_target
        next_planned = after_planned
        next_source = after_source
        next_target = after_target
        batch += PROGRAMS


@triton.jit
def _transfer_ring(
    units, kv_cache, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs,
    num_entries,
    H: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr, SPAN: tl.constexpr, BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr, REQUEST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, SPAN)[None, :]
    for batch in tl.range(tl.program_id(0), tl.cdiv(num_entries, BATCH), PROGRAMS, num_stages=STAGES):
        is_planned, source, target = _find(
            batch, plan, rows, host_table, host_stride, slot_ids, slot_stride, layer, num_layers, num_pairs,
            num_entries, H, C, WORDS, BATCH, COLUMNS, REQUEST,
        )  # fmt: skip
        # [BATCH, SPAN]
        mask = is_planned[:, None] & (word < WORDS)
        content = tl.load(units + source[:, None] + word, mask=mask)
        tl.store(kv_cache + target[:, None] + word, content, mask=mask)


@triton.jit
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
    num_programs: int = TRANSFER_PROGRAMS,
    batch_bytes: int = TRANSFER_BYTES,
    num_warps: int = _WARPS,
    num_stages: int = 0,
) -> None:
    """Launch it on the current stream; see `op.transfer`."""
    num_rows, num_kv_heads, max_cap, _ = plan.shape
    num_entries = num_rows * num_kv_heads * max_cap
    if num_entries == 0:
        return
    words = _words(kv_cache)
    span = triton.next_power_of_2(words)
    batch = max(1, batch_bytes // (8 * span))
    programs = min(num_programs, triton.cdiv(num_entries, batch))
    kernel, ring = (_transfer_ring, {"STAGES": num_stages}) if num_stages else (_transfer, {})
    kernel[(programs,)](
        units.view(torch.int64),
        kv_cache.view(torch.int64),
        plan,
        rows,
        host_table,
        host_table.stride(0),
        slot_ids,
        slot_ids.stride(0),
        layer,
        units.shape[1],
        num_rows * num_kv_heads,
        num_entries,
        H=num_kv_heads,
        C=max_cap,
        WORDS=words,
        SPAN=span,
        BATCH=batch,
        PROGRAMS=programs,
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        num_warps=num_warps,
        **ring,
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
    num_warps: int = _WARPS,
) -> None:
    """Launch it on the current stream; see `op.store`."""
    num_kv_heads = kv_cache.shape[1]
    num_entries = len(block_ids) * num_kv_heads
    if num_entries == 0:
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
