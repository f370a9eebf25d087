"""The Triton kernel of predict: one pass over the summaries, and the selection by whichever program ends last.

Programs share the blocks of a (row, KV head) pair. Each scores its part on the matrix units and leaves its scores, as
integers that sort alike, in scratch memory that stays in L2. The last of them to arrive finds the exact threshold and
writes the best blocks, while other pairs still stream their summaries.
"""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.predict.scratch import scratch
from oasiskv.kernels.rows import Reduction, Row, SummaryLayout

_TILE = 64
"""Blocks per matrix product: one warp group."""
_STAGES = 3
_WARPS = 4
_HELD = 2048
"""Scores that selection keeps in registers; of longer rows it reads them again from L2."""
_PROGRAMS = 1600
"""Programs to divide a batch into, about four waves of three per SM."""
_LOWEST = tl.constexpr(-2147483648)
"""Below every score."""
_INFINITE = tl.constexpr(0x7F800000)
"""What +inf becomes."""


@triton.jit
def _sortable(score):
    """Return an integer that orders as the score does (its own inverse but for the zeros, which become equal)."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(
    query, alpha, G, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, MID: tl.constexpr
):
    """Return what a summary row is multiplied by, `float32[SPAN, COLUMNS]`; column g is query head g % G."""
    at = tl.arange(0, SPAN)
    head = tl.arange(0, COLUMNS) % G
    q = tl.load(query + head[None, :] * D + (at % D)[:, None], mask=(at < WIDTH)[:, None], other=0.0).to(tl.float32)
    if MID:
        return q
    sign = tl.where(at < D, alpha, -alpha)
    return (q + sign[:, None] * tl.abs(q)) / 2


@triton.jit
def _scan(
    query, pages, page_ids, keys, raw, first, last, alpha, num_sinks, stride, head,
    H: tl.constexpr, G: tl.constexpr, B: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    PER_PAGE: tl.constexpr, MID: tl.constexpr, COLUMNS: tl.constexpr, REDUCTION: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Score blocks [first, last) of one pair into `keys`, or for softmax every query head's scores into `raw`."""
    dtype: tl.constexpr = pages.dtype.element_ty
    at = tl.arange(0, SPAN)
    weights = _weights(query, alpha, G, D, WIDTH, COLUMNS, SPAN, MID)
    # In two parts the weights keep float32's accuracy on matrix units that take 16-bit operands.
    upper = weights.to(dtype)
    lower = (weights - upper.to(tl.float32)).to(dtype)
    column = tl.arange(0, COLUMNS)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        block = start + tl.arange(0, TILE)
        is_block = block < last
        page = tl.load(page_ids + block // PER_PAGE, mask=is_block, other=0).to(tl.int64)
        row = (page * H + head) * (B * 2 * D) + (block % PER_PAGE) * WIDTH
        # [TILE, SPAN]
        summary = tl.load(pages + row[:, None] + at[None, :], mask=is_block[:, None] & (at < WIDTH)[None, :], other=0.0)
        # [TILE, COLUMNS]
        score = tl.dot(summary, upper, input_precision="ieee")
        if dtype != tl.float32:
            score = tl.dot(summary, lower, score)
        if REDUCTION == "softmax":
            out = raw + column[None, :] * stride + block[:, None]
            tl.store(out, score, mask=is_block[:, None] & (column < G)[None, :])
        else:
            if REDUCTION == "max":
                best = tl.max(score, axis=1)
            else:
                best = tl.sum(tl.where((column < G)[None, :], score, 0.0), axis=1)
            key = tl.where(block < num_sinks, _INFINITE, _sortable(best))
            tl.store(keys + block, key, mask=is_block)


@triton.jit
def _shares(raw, keys, n, scale, num_sinks, stride, G: tl.constexpr, HELD: tl.constexpr):
    """Turn the scores of all query heads into keys: a block's largest share of any head's softmax over the blocks."""
    o = tl.arange(0, HELD)
    for g in tl.static_range(G):
        peak = float("-inf")
        total = 0.0
        for start in range(0, n, HELD):
            s = tl.load(raw + g * stride + start + o, mask=start + o < n, other=float("-inf")) * scale
            top = tl.maximum(peak, tl.max(s, axis=0))
            total = total * tl.exp(peak - top) + tl.sum(tl.exp(s - top), axis=0)
            peak = top
        for start in range(0, n, HELD):
            block = start + o
            s = tl.load(raw + g * stride + block, mask=block < n, other=float("-inf")) * scale
            share = _sortable(tl.exp(s - peak) / total)
            if g > 0:
                share = tl.maximum(share, tl.load(keys + block, mask=block < n, other=0))
            if g == G - 1:
                share = tl.where(block < num_sinks, _INFINITE, share)
            tl.store(keys + block, share, mask=block < n)
        tl.debug_barrier()


@triton.jit
def _at_least(key, a, b, c):
    """Count the keys that reach each of three pivots, 21 bits apiece."""
    key = key.to(tl.int64)
    one = (key >= a).to(tl.int64) + ((key >= b).to(tl.int64) << 21) + ((key >= c).to(tl.int64) << 42)
    return tl.sum(one, axis=0)


@triton.jit
def _bounds(key, low, high):
    """Widen [low, high] to the keys of blocks that are no sinks."""
    low = tl.minimum(low, tl.min(tl.where(key == _LOWEST, 2147483647, key), axis=0).to(tl.int64))
    high = tl.maximum(high, tl.max(tl.where(key < _INFINITE, key, _LOWEST), axis=0).to(tl.int64))
    return low, high


@triton.jit
def _write(blocks, scores, block, key, threshold, num_above, num_equal, num_wanted, total_above):
    """Write a tile's blocks above the threshold, and those that equal it while there is room, lowest block first."""
    above = key > threshold
    equal = (key == threshold) & (key != _LOWEST)
    # Running counts of both, 16 bits apiece.
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), axis=0)
    rank_above = num_above + (counts & 0xFFFF)
    rank_equal = num_equal + (counts >> 16)
    room = num_wanted - total_above
    is_best = above | (equal & (rank_equal <= room))
    place = rank_above + tl.minimum(rank_equal, room) - 1
    tl.store(blocks + place, block, mask=is_best)
    score = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(scores + place, score, mask=is_best)


@triton.jit
def _narrow(low, high, count, a, b, c, counts, num_wanted):
    """Return the interval between two pivots in which the threshold lies, and how many keys reach its lower end."""
    count_a = counts & 0x1FFFFF
    count_b = (counts >> 21) & 0x1FFFFF
    count_c = counts >> 42
    if count_c >= num_wanted:
        low = c
        count = count_c
    elif count_b >= num_wanted:
        low = b
        high = c - 1
        count = count_b
    elif count_a >= num_wanted:
        low = a
        high = b - 1
        count = count_a
    else:
        high = a - 1
    return low, high, count


@triton.jit
def _select_best(
    keys, blocks, scores, n, num_sinks, K: tl.constexpr, PLACES: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """Write the best `min(K, n)` of n blocks: search the threshold among three pivots a round, then collect."""
    num_wanted = tl.minimum(n, K)
    place = tl.arange(0, PLACES)
    tl.store(blocks + place, -1, mask=(place >= num_wanted) & (place < K))
    tl.store(scores + place, float("-inf"), mask=(place >= num_wanted) & (place < K))
    o = tl.arange(0, HELD)
    low = tl.full([], 2147483647, tl.int64)
    high = tl.full([], -2147483648, tl.int64)
    count = n.to(tl.int64)
    if n <= HELD:
        key = tl.load(keys + o, mask=o < n, other=_LOWEST, cache_modifier=".cg")
        low, high = _bounds(key, low, high)
        if num_sinks >= num_wanted:
            low = tl.full([], _INFINITE, tl.int64)
            count = num_wanted.to(tl.int64)
        while (low < high) & (count > num_wanted):
            step = (high - low + 3) // 4
            a = low + step
            b = tl.minimum(a + step, high)
            c = tl.minimum(b + step, high)
            counts = _at_least(key, a, b, c)
            low, high, count = _narrow(low, high, count, a, b, c, counts, num_wanted)
        threshold = low.to(tl.int32)
        total_above = tl.sum((key > threshold).to(tl.int32), axis=0)
        _write(blocks, scores, o, key, threshold, 0, 0, num_wanted, total_above)
    else:
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            low, high = _bounds(key, low, high)
        if num_sinks >= num_wanted:
            low = tl.full([], _INFINITE, tl.int64)
            count = num_wanted.to(tl.int64)
        while (low < high) & (count > num_wanted):
            step = (high - low + 3) // 4
            a = low + step
            b = tl.minimum(a + step, high)
            c = tl.minimum(b + step, high)
            counts = tl.zeros([], tl.int64)
            for start in range(0, n, HELD):
                key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
                counts += _at_least(key, a, b, c)
            low, high, count = _narrow(low, high, count, a, b, c, counts, num_wanted)
        threshold = low.to(tl.int32)
        total_above = tl.zeros([], tl.int32)
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            total_above += tl.sum((key > threshold).to(tl.int32), axis=0)
        num_above = tl.zeros([], tl.int32)
        num_equal = tl.zeros([], tl.int32)
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            _write(blocks, scores, start + o, key, threshold, num_above, num_equal, num_wanted, total_above)
            num_above += tl.sum((key > threshold).to(tl.int32), axis=0)
            num_equal += tl.sum(((key == threshold) & (key != _LOWEST)).to(tl.int32), axis=0)


@triton.jit
def _predict(
    query, rows, pages, page_ids, page_stride, blocks, scores, arrivals, keys, alpha, scale, num_sinks, stride,
    H: tl.constexpr, G: tl.constexpr, B: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    PER_PAGE: tl.constexpr, MID: tl.constexpr, COLUMNS: tl.constexpr, REDUCTION: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr, STAGES: tl.constexpr,
    ROW: tl.constexpr, REQUEST: tl.constexpr, NUM_COMPLETE: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    head = pair % H
    row = rows + (pair // H) * ROW
    request = tl.load(row + REQUEST).to(tl.int64)
    n = tl.where(request < 0, 0, tl.load(row + NUM_COMPLETE))
    length = tl.cdiv(tl.cdiv(n, tl.num_programs(0)), TILE) * TILE
    first = share * length
    if (first < n) | (share == 0):
        key_row = keys + pair * stride
        # Softmax needs the scores of every query head first; they lie behind the keys of all pairs.
        raw = keys.to(tl.pointer_type(tl.float32), bitcast=True) + (tl.num_programs(1) + pair * G) * stride
        if n > 0:
            _scan(
                query + (request * H + head) * (G * D), pages, page_ids + request * page_stride, key_row, raw, first,
                tl.minimum(first + length, n), alpha, num_sinks, stride, head,
                H, G, B, D, WIDTH, SPAN, PER_PAGE, MID, COLUMNS, REDUCTION, TILE, STAGES,
            )  # fmt: skip
        # The program's scores are written before it counts as arrived.
        tl.debug_barrier()
        is_last = length >= n
        if length < n:
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu") + 1
            is_last = arrived == tl.cdiv(n, length)
            if is_last:
                tl.store(arrivals + pair, 0)
        if is_last:
            if REDUCTION == "softmax":
                _shares(raw, key_row, n, scale, num_sinks, stride, G, HELD)
            _select_best(key_row, blocks + pair * K, scores + pair * K, n, num_sinks, K, PLACES, HELD)


def predict(
    query: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    scores: torch.Tensor,
    layout: SummaryLayout,
    alpha: float,
    reduction: Reduction,
    scale: float,
    num_sinks: int,
    *,
    tile: int = _TILE,
    num_stages: int = _STAGES,
    num_warps: int = _WARPS,
    num_programs: int = _PROGRAMS,
    held: int = _HELD,
) -> None:
    """Launch it on the current stream; see `op.predict`."""
    num_rows, num_kv_heads, budget = blocks.shape
    num_pairs = num_rows * num_kv_heads
    if num_pairs == 0:
        return
    num_query_heads, head_dim = query.shape[1:]
    group = num_query_heads // num_kv_heads
    max_blocks = page_ids.shape[1] * layout.rows_per_page
    stride = -(-max_blocks // 32) * 32
    lanes = 1 + group if reduction == "softmax" else 1
    arrivals, keys = scratch(query.device, num_pairs, num_pairs * stride * lanes)
    num_shares = max(1, min(num_programs // num_pairs, -(-max_blocks // tile)))
    _predict[(num_shares, num_pairs)](
        query,
        rows,
        pages,
        page_ids,
        page_ids.stride(0),
        blocks,
        scores,
        arrivals,
        keys,
        alpha,
        scale,
        num_sinks,
        stride,
        H=num_kv_heads,
        G=group,
        B=layout.block_size,
        D=head_dim,
        WIDTH=layout.width,
        SPAN=max(16, triton.next_power_of_2(layout.width)),
        PER_PAGE=layout.rows_per_page,
        MID=layout.kind == "mid",
        COLUMNS=max(16, triton.next_power_of_2(group)),
        REDUCTION=reduction,
        K=budget,
        PLACES=triton.next_power_of_2(budget),
        TILE=tile,
        HELD=min(held, triton.next_power_of_2(max_blocks)),
        STAGES=num_stages,
        ROW=len(Row),
        REQUEST=Row.REQUEST,
        NUM_COMPLETE=Row.NUM_COMPLETE,
        num_warps=num_warps,
    )
