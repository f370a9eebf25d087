"""The Triton kernel that asks the host for blocks: one warp, so that all of it sees the same answer at the same time.

The host's memory is read past the caches, and what is written there is on its way before the number of the question is.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from oasiskv.kernels.rows import Row

_LANES = 512
"""Words that the warp looks at or copies at once."""

PLAIN = ["layer", "num_rows", "num_entries", "table_stride", "slot_stride", "timeout_ns"]
POINTERS = ["plan", "rows", "table", "resident", "slot_ids", "asked_rows", "asked_plan", "asked_resident"]
POINTERS += ["updates", "bounced", "units"]


@triton.jit
def _copy(source, target, count, LANES: tl.constexpr):
    for start in range(0, count, LANES):
        at = start + tl.arange(0, LANES)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def _absent(plan, rows, table, table_stride, entry, num_entries, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
            REQUEST: tl.constexpr):  # fmt: skip
    """Return which entries of a plan name a block that is not on this host."""
    block = tl.load(plan + entry * 2, mask=entry < num_entries, other=-1)
    request = tl.load(rows + entry // PAIRS * COLUMNS + REQUEST, mask=block >= 0, other=-1).to(tl.int64)
    is_planned = (block >= 0) & (request >= 0)
    return tl.load(table + request * table_stride + block, mask=is_planned, other=0) < 0


@triton.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=POINTERS)
def _ask(
    plan, rows, table, table_stride, resident, slot_ids, slot_stride, kv_cache, asked, answered, asked_num_rows, sizes,
    asked_rows, asked_plan, asked_resident, updates, bounced, units, counts, failed, told, layer, num_rows, num_entries,
    timeout_ns, H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PAIR_SPAN: tl.constexpr, WORDS: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, REQUEST: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    count = tl.zeros([], tl.int32)
    for start in range(0, num_entries, LANES):
        is_absent = _absent(
            plan, rows, table, table_stride, start + tl.arange(0, LANES), num_entries, H * C, COLUMNS, REQUEST
        )
        count += tl.sum(is_absent.to(tl.int32), axis=0)
    if count > 0:
        _copy(plan, asked_plan, num_entries * 2, LANES)
        _copy(rows, asked_rows, num_rows * COLUMNS, LANES)
        for row in range(0, num_rows):
            lane = tl.arange(0, PAIR_SPAN)
            entry = tl.where(lane < H * C, row * (H * C) + lane, num_entries)
            is_absent = _absent(plan, rows, table, table_stride, entry, num_entries, H * C, COLUMNS, REQUEST)
            if tl.sum(is_absent.to(tl.int32), axis=0) > 0:
                request = tl.load(rows + row * COLUMNS + REQUEST).to(tl.int64)
                _copy(resident + request * (H * K), asked_resident + row * (H * K), H * K, LANES)
        tl.store(asked_num_rows + layer, num_rows)
        tl.debug_barrier()
        # Orders everything above, for all who see memory, before what follows.
        number = tl.atomic_add(counts + layer, 1, sem="acq_rel", scope="sys") + 1
        tl.store(asked + layer, number)
        if NATIVE:
            started = globaltimer()
        seen = tl.load(answered + layer, volatile=True)
        given_up = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu")
        while (seen < number) & (given_up == 0):
            seen = tl.load(answered + layer, volatile=True)
            if NATIVE:
                took = globaltimer() - started
                if took > timeout_ns:
                    tl.store(told, layer + 1)
                    tl.atomic_xchg(failed, 1, sem="relaxed", scope="gpu")
            given_up = tl.atomic_add(failed, 0, sem="relaxed", scope="gpu")
        tl.atomic_add(counts + layer, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        if given_up == 0:
            num_updates = tl.load(sizes + layer * 2, volatile=True)
            num_bounced = tl.load(sizes + layer * 2 + 1, volatile=True)
            for start in range(0, num_updates, LANES):
                at = start + tl.arange(0, LANES)
                place = tl.load(updates + at * 2, mask=at < num_updates, other=0, volatile=True)
                value = tl.load(updates + at * 2 + 1, mask=at < num_updates, other=0, volatile=True)
                tl.store(table + place, value, mask=at < num_updates)
            word = tl.arange(0, SPAN)
            for i in range(0, num_bounced):
                entry = tl.load(bounced + i, volatile=True)
                request = tl.load(rows + entry // (H * C) * COLUMNS + REQUEST).to(tl.int64)
                slot = tl.load(plan + entry * 2 + 1)
                engine = tl.load(slot_ids + request * slot_stride + slot).to(tl.int64)
                content = tl.load(units + i * WORDS + word, mask=word < WORDS, volatile=True)
                tl.store(kv_cache + (engine * H + entry // C % H) * WORDS + word, content, mask=word < WORDS)
        tl.debug_barrier()
        for start in range(0, num_entries, LANES):
            entry = start + tl.arange(0, LANES)
            is_absent = _absent(plan, rows, table, table_stride, entry, num_entries, H * C, COLUMNS, REQUEST)
            tl.store(plan + entry * 2, -1, mask=is_absent)
            tl.store(plan + entry * 2 + 1, -1, mask=is_absent)


def ask(
    plan: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    kv_cache: torch.Tensor,
    asked: torch.Tensor,
    answered: torch.Tensor,
    asked_num_rows: torch.Tensor,
    sizes: torch.Tensor,
    asked_rows: torch.Tensor,
    asked_plan: torch.Tensor,
    asked_resident: torch.Tensor,
    updates: torch.Tensor,
    bounced: torch.Tensor,
    units: torch.Tensor,
    counts: torch.Tensor,
    failed: torch.Tensor,
    told: torch.Tensor,
    layer: int,
    timeout_s: float,
) -> None:
    """Launch it on the current stream; see `op.ask`."""
    num_rows, num_kv_heads, max_cap, _ = plan.shape
    if num_rows == 0:
        return
    words = units[0].nbytes // 8
    _ask[(1,)](
        plan,
        rows,
        table,
        table.stride(0),
        resident,
        slot_ids,
        slot_ids.stride(0),
        kv_cache.view(torch.int64),
        asked,
        answered,
        asked_num_rows,
        sizes,
        asked_rows,
        asked_plan,
        asked_resident,
        updates,
        bounced,
        units.view(torch.int64),
        counts,
        failed,
        told,
        layer,
        num_rows,
        num_rows * num_kv_heads * max_cap,
        int(timeout_s * 1e9),
        H=num_kv_heads,
        C=max_cap,
        K=resident.shape[-1],
        PAIR_SPAN=triton.next_power_of_2(num_kv_heads * max_cap),
        WORDS=words,
        SPAN=triton.next_power_of_2(words),
        LANES=_LANES,
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        NATIVE=kv_cache.is_cuda,
        num_warps=1,
    )
