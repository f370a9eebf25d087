"""The Triton kernel of select: one program per row and head."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.rows import FRESH, Counter, Row

_TILE = 32
"""Blocks compared with a whole working set at once."""
_WARPS = 1
"""More warps finish a program no sooner: its steps depend on one another, and barriers between warps cost more."""


@triton.jit
def _select(
    blocks,
    scores,
    rows,
    resident,
    stamp,
    plan,
    counters,
    H: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    ENTRIES: tl.constexpr,
    FRESH: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUEST: tl.constexpr,
    STEP: tl.constexpr,
    CAP: tl.constexpr,
    COUNTERS: tl.constexpr,
    PREDICTED: tl.constexpr,
    HIT: tl.constexpr,
    FETCHED: tl.constexpr,
    DEFERRED: tl.constexpr,
    WASTED: tl.constexpr,
    EVICTED: tl.constexpr,
):
    pair = tl.program_id(0)
    head = pair % H
    row = rows + (pair // H) * COLUMNS
    request = tl.load(row + REQUEST).to(tl.int64)
    entry = tl.arange(0, ENTRIES)
    out = plan + (pair.to(tl.int64) * C + entry) * 2
    block_out = tl.full([ENTRIES], -1, tl.int32)
    slot_out = tl.full([ENTRIES], -1, tl.int32)
    if request >= 0:
        now = 2 * tl.load(row + STEP)
        slot = tl.arange(0, SLOTS)
        candidates = pair.to(tl.int64) * K + slot
        state = (request * H + head) * K + slot
        wanted = tl.load(blocks + candidates, mask=slot < K, other=-1)
        score = tl.load(scores + candidates, mask=slot < K, other=0.0)
        held = tl.load(resident + state, mask=slot < K, other=-1)
        last = tl.load(stamp + state, mask=slot < K, other=0)
        limit = tl.minimum(tl.load(row + CAP), C)

        is_wanted = wanted >= 0
        if TILE == SLOTS:
            same = ((wanted[:, None] == held[None, :]) & is_wanted[:, None]).to(tl.int32)
            is_hit = tl.max(same, axis=1)
            is_kept = tl.max(same, axis=0)
        else:
            is_hit = tl.zeros([SLOTS], tl.int32)
            is_kept = tl.zeros([SLOTS], tl.int32)
            for start in range(0, SLOTS, TILE):
                part = start + tl.arange(0, TILE)
                other = tl.load(resident + (request * H + head) * K + part, mask=part < K, other=-1)
                is_hit |= tl.max((wanted[:, None] == other[None, :]).to(tl.int32), axis=1)
                other = tl.load(blocks + pair.to(tl.int64) * K + part, mask=part < K, other=-1)
                is_kept |= tl.max(((other[:, None] == held[None, :]) & (other >= 0)[:, None]).to(tl.int32), axis=0)
        is_hit = tl.where(is_wanted, is_hit, 0)
        counts = tl.sum(is_wanted.to(tl.int32) + (is_hit << 16), axis=0)
        num_predicted = counts & 0xFFFF
        num_hit = counts >> 16
        num_admitted = tl.maximum(tl.minimum(limit, num_predicted - num_hit), 0)
        last = tl.where(is_kept != 0, now, last)

        # An integer that orders as the score does; -0.0 counts as 0.0.
        bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
        bits ^= (bits >> 31) & 0x7FFFFFFF
        LOWEST: tl.constexpr = -2147483648
        HIGHEST: tl.constexpr = 2147483647
        key = tl.where(is_wanted & (is_hit == 0), bits, LOWEST)
        age = tl.where((is_kept == 0) & (slot < K), last >> 1, HIGHEST)
        is_wasted = tl.zeros([SLOTS], tl.int32)
        # A 32-bit minimum or maximum is one instruction for a warp: ties take a second one, not a wider number.
        for i in range(num_admitted):
            block = tl.min(tl.where(key == tl.max(key, axis=0), wanted, HIGHEST), axis=0)
            victim = tl.min(tl.where(age == tl.min(age, axis=0), slot, HIGHEST), axis=0)
            is_victim = slot == victim
            is_wasted += tl.where(is_victim, last & FRESH, 0)
            held = tl.where(is_victim, block, held)
            last = tl.where(is_victim, now + FRESH, last)
            age = tl.where(is_victim, HIGHEST, age)
            key = tl.where(wanted == block, LOWEST, key)
            block_out = tl.where(entry == i, block, block_out)
            slot_out = tl.where(entry == i, victim, slot_out)
        # The tiles above read what is written here.
        tl.debug_barrier()
        tl.store(resident + state, held, mask=slot < K)
        tl.store(stamp + state, last, mask=slot < K)

        index = tl.arange(0, 8)
        amount = tl.where(index == PREDICTED, num_predicted, 0)
        amount = tl.where(index == HIT, num_hit, amount)
        amount = tl.where((index == FETCHED) | (index == EVICTED), num_admitted, amount)
        amount = tl.where(index == DEFERRED, num_predicted - num_hit - num_admitted, amount)
        amount = tl.where(index == WASTED, tl.sum(is_wasted, axis=0), amount)
        counter = counters + head * COUNTERS + index
        tl.atomic_add(counter, amount.to(tl.int64), mask=(index < COUNTERS) & (amount != 0), sem="relaxed")
    tl.store(out, block_out, mask=entry < C)
    tl.store(out + 1, slot_out, mask=entry < C)


def select(
    blocks: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    plan: torch.Tensor,
    counters: torch.Tensor,
    *,
    tile: int = _TILE,
    num_warps: int = _WARPS,
) -> None:
    """Launch it on the current stream; see `op.select`."""
    num_rows, num_kv_heads, budget = blocks.shape
    if num_rows == 0:
        return
    slots = triton.next_power_of_2(budget)
    max_cap = plan.shape[2]
    _select[(num_rows * num_kv_heads,)](
        blocks,
        scores,
        rows,
        resident,
        stamp,
        plan,
        counters,
        H=num_kv_heads,
        K=budget,
        SLOTS=slots,
        TILE=min(slots, tile),
        C=max_cap,
        ENTRIES=triton.next_power_of_2(max_cap),
        FRESH=FRESH,
        COLUMNS=len(Row),
        REQUEST=Row.REQUEST,
        STEP=Row.STEP,
        CAP=Row.CAP,
        COUNTERS=len(Counter),
        PREDICTED=Counter.PREDICTED,
        HIT=Counter.HIT,
        FETCHED=Counter.FETCHED,
        DEFERRED=Counter.DEFERRED,
        WASTED=Counter.WASTED,
        EVICTED=Counter.EVICTED,
        num_warps=num_warps,
    )
