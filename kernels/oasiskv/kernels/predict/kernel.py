"""The Triton kernel of predict: one pass over the summaries, and the selection by whichever program ends last.

Programs share the blocks of a (row, KV head) pair. Each scores its part on the matrix units and leaves its scores, as
integers that sort alike, in scratch memory that stays in L2. The last of them to arrive finds the exact threshold and
writes the best blocks, while other pairs still stream their summaries.
"""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.fp8.kernel import codes, number_of
from oasiskv.kernels.rows import Reduction, Row, SummaryLayout
from oasiskv.kernels.scratch import scratch

_TILE = 64
"""Blocks per matrix product, what a warp group of Hopper's matrix units takes; float32, which has none, takes fewer."""
_WARPS = 4
_HELD = 2048
"""Scores that selection keeps in registers; of longer rows it reads them again from L2."""
_PROGRAMS = 640
"""Programs to divide a small batch into; a large one gets one per pair, since each costs some microseconds."""
_LOWEST = tl.constexpr(-2147483648)
"""Below every score."""
_INFINITE = tl.constexpr(0x7F800000)
"""What +inf becomes, the score of sink blocks alone: selection counts on it."""
_LARGEST = tl.constexpr(3.4028234663852886e38)
"""The greatest score of other blocks."""


@triton.jit
def _sortable(score):
    """Return an integer that orders as the score does (its own inverse but for the zeros, which become equal)."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _finite(score):
    """Return scores between the finite ones; NaN counts as the greatest, for nothing bounds such a block."""
    return tl.where(score < _LARGEST, tl.maximum(score, -_LARGEST), _LARGEST)


@triton.jit
def _weights(
    query, alpha, G, D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, MID: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return what summary rows are multiplied by, `[SPAN, COLUMNS]`, two columns for each query head.

    The first half of the columns holds the weights rounded to the summaries' dtype, the second half what rounding left:
    with both, matrix units of 16-bit operands keep float32's accuracy, and those columns would be idle otherwise.
    """
    at = tl.arange(0, SPAN)
    column = tl.arange(0, COLUMNS)
    head = column % (COLUMNS // 2) % G
    q = tl.load(query + head[:, None] * D + (at % D)[None, :], mask=(at < WIDTH)[None, :], other=0.0).to(tl.float32)
    weights = q if MID else (q + tl.where(at < D, alpha, -alpha)[None, :] * tl.abs(q)) / 2
    rounded = weights.to(dtype).to(tl.float32)
    return tl.trans(tl.where((column < COLUMNS // 2)[:, None], rounded, weights - rounded).to(dtype))


@triton.jit
def _scan(
    query, pages, page_ids, keys, raw, first, last, alpha, num_sinks, stride, head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    PER_PAGE: tl.constexpr, UNIT: tl.constexpr, MID: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    COLUMNS: tl.constexpr, REDUCTION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score blocks [first, last) of one pair into `keys`, or for softmax every query head's scores into `raw`."""
    at = tl.arange(0, SPAN)
    block = first + tl.arange(0, TILE)
    # Pages are looked up one tile ahead, so that the pipeline's loads wait for no other load.
    page = tl.load(page_ids + block // PER_PAGE, mask=block < last, other=0)
    dtype: tl.constexpr = query.dtype.element_ty
    weights = _weights(query, alpha, G, D, WIDTH, COLUMNS, SPAN, MID, dtype)
    HEADS: tl.constexpr = COLUMNS // 2
    column = tl.arange(0, HEADS)
    for start in range(first, last, TILE):
        block = start + tl.arange(0, TILE)
        is_block = block < last
        held = (page.to(tl.int64) * H + head) * UNIT
        row = held + (block % PER_PAGE) * WIDTH
        # [TILE, SPAN]
        summary = tl.load(pages + row[:, None] + at[None, :], mask=is_block[:, None] & (at < WIDTH)[None, :], other=0)
        if FP8:
            exponent = tl.load(pages + held + PER_PAGE * WIDTH + block % PER_PAGE, mask=is_block, other=0)
        if pages.dtype.element_ty == tl.uint8:
            summary = number_of(summary, dtype, NATIVE)
        page = tl.load(page_ids + (block + TILE) // PER_PAGE, mask=block + TILE < last, other=0)
        products = tl.dot(summary, weights, input_precision="ieee")
        # [TILE, HEADS]
        score = tl.sum(tl.reshape(products, [TILE, 2, HEADS]), axis=1)
        if FP8:
            score *= (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
        score = _finite(score)
        if REDUCTION == "softmax":
            out = raw + column[None, :] * stride + block[:, None]
            tl.store(out, score, mask=is_block[:, None] & (column < G)[None, :])
        else:
            if REDUCTION == "max":
                best = tl.max(score, axis=1)
            else:
                best = tl.sum(tl.where((column < G)[None, :], score, 0.0), axis=1)
            key = tl.where(block < num_sinks, _INFINITE, _sortable(_finite(best)))
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
def _at_least(key, a, b):
    """Count the keys that reach each of two pivots, 16 bits apiece."""
    return tl.sum((key >= a).to(tl.int32) + ((key >= b).to(tl.int32) << 16), axis=0)


@triton.jit
def _bounds(key, low, high):
    """Widen [low, high] to the keys of blocks that are no sinks."""
    low = tl.minimum(low, tl.min(tl.where(key == _LOWEST, 2147483647, key), axis=0))
    high = tl.maximum(high, tl.max(tl.where(key < _INFINITE, key, _LOWEST), axis=0))
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
def _pivots(low, high):
    """Return two pivots that cut (low, high] in three; 64 bits, since the distance may not fit in 32."""
    step = (high.to(tl.int64) - low + 2) // 3
    a = low + step
    return a.to(tl.int32), tl.minimum(a + step, high).to(tl.int32)


@triton.jit
def _narrow(low, high, count, a, b, count_a, count_b, num_wanted):
    """Return the interval between two pivots in which the threshold lies, and how many keys reach its lower end."""
    if count_b >= num_wanted:
        low = b
        count = count_b
    elif count_a >= num_wanted:
        low = a
        high = b - 1
        count = count_a
    else:
        high = a - 1
    return low, high, count


@triton.jit
def _select_best(keys, blocks, scores, n, num_sinks, K: tl.constexpr, PLACES: tl.constexpr, HELD: tl.constexpr):
    """Write the best `min(K, n)` of n blocks: search the threshold between two pivots a round, then collect."""
    num_wanted = tl.minimum(n, K)
    place = tl.arange(0, PLACES)
    tl.store(blocks + place, -1, mask=(place >= num_wanted) & (place < K))
    tl.store(scores + place, float("-inf"), mask=(place >= num_wanted) & (place < K))
    o = tl.arange(0, HELD)
    low = tl.full([], 2147483647, tl.int32)
    high = tl.full([], -2147483648, tl.int32)
    count = n
    if n <= HELD:
        key = tl.load(keys + o, mask=o < n, other=_LOWEST, cache_modifier=".cg")
        low, high = _bounds(key, low, high)
        if num_sinks >= num_wanted:
            low = tl.full([], _INFINITE, tl.int32)
            count = num_wanted
        # Any threshold that exactly the wanted number of keys reaches will do.
        while (low < high) & (count > num_wanted):
            a, b = _pivots(low, high)
            counts = _at_least(key, a, b)
            low, high, count = _narrow(low, high, count, a, b, counts & 0xFFFF, counts >> 16, num_wanted)
        total_above = tl.sum((key > low).to(tl.int32), axis=0)
        _write(blocks, scores, o, key, low, 0, 0, num_wanted, total_above)
    else:
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            low, high = _bounds(key, low, high)
        if num_sinks >= num_wanted:
            low = tl.full([], _INFINITE, tl.int32)
            count = num_wanted
        while (low < high) & (count > num_wanted):
            a, b = _pivots(low, high)
            count_a = tl.zeros([], tl.int32)
            count_b = tl.zeros([], tl.int32)
            for start in range(0, n, HELD):
                key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
                counts = _at_least(key, a, b)
                count_a += counts & 0xFFFF
                count_b += counts >> 16
            low, high, count = _narrow(low, high, count, a, b, count_a, count_b, num_wanted)
        total_above = tl.zeros([], tl.int32)
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            total_above += tl.sum((key > low).to(tl.int32), axis=0)
        num_above = tl.zeros([], tl.int32)
        num_equal = tl.zeros([], tl.int32)
        for start in range(0, n, HELD):
            key = tl.load(keys + start + o, mask=start + o < n, other=_LOWEST)
            _write(blocks, scores, start + o, key, low, num_above, num_equal, num_wanted, total_above)
            num_above += tl.sum((key > low).to(tl.int32), axis=0)
            num_equal += tl.sum(((key == low) & (key != _LOWEST)).to(tl.int32), axis=0)


@triton.jit
def _predict(
    query, rows, pages, page_ids, page_stride, blocks, scores, arrivals, keys, alpha, scale, num_sinks, stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    PER_PAGE: tl.constexpr, UNIT: tl.constexpr, MID: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    COLUMNS: tl.constexpr, REDUCTION: tl.constexpr, K: tl.constexpr,
    PLACES: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
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
                H, G, D, WIDTH, SPAN, PER_PAGE, UNIT, MID, FP8, NATIVE, COLUMNS, REDUCTION, TILE,
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
    tile: int | None = None,
    num_stages: int | None = None,
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
    keys, arrivals = scratch(query.device, num_pairs * stride * lanes, num_pairs)
    span = max(16, triton.next_power_of_2(layout.width))
    if tile is None:
        tile = _TILE if query.element_size() == 2 else 16
    unit = pages.shape[2] * pages.shape[3]
    if layout.is_fp8:
        unit, pages = unit * pages.element_size(), pages.view(torch.uint8)
    if num_stages is None:
        # Wide rows fill shared memory sooner, and programs beside one another hide more than depth in each.
        num_stages = 3 if span * pages.element_size() <= 256 else 2
    num_shares = max(1, min(num_programs // num_pairs, -(-max_blocks // tile)))
    _predict[(num_shares, num_pairs)](
        query,
        rows,
        codes(pages),
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
        D=head_dim,
        WIDTH=layout.width,
        SPAN=span,
        PER_PAGE=layout.rows_per_page,
        UNIT=unit,
        MID=layout.kind == "mid",
        FP8=layout.is_fp8,
        NATIVE=pages.is_cuda,
        COLUMNS=max(16, 2 * triton.next_power_of_2(group)),
        REDUCTION=reduction,
        K=budget,
        PLACES=triton.next_power_of_2(budget),
        TILE=tile,
        HELD=min(held, triton.next_power_of_2(max_blocks)),
        ROW=len(Row),
        REQUEST=Row.REQUEST,
        NUM_COMPLETE=Row.NUM_COMPLETE,
        num_warps=num_warps,
        num_stages=num_stages,
    )
