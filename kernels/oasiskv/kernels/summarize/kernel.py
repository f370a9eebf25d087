"""The Triton kernel of summarize."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.fp8.kernel import (
    NO_TOP,
    codes,
    exponent_of,
    finite_bits,
    float_of,
    held_as,
    narrow,
    narrow_outward,
)
from oasiskv.kernels.fp8.reference import LEAST_EXPONENT
from oasiskv.kernels.rows import SummaryLayout

_TILE_BYTES = 16384
"""Keys that one program reads; enough in flight per program, small enough that few blocks still spread over the SMs."""


_LEAST = tl.constexpr(LEAST_EXPONENT)


@triton.jit
def store_fp8_rows(
    keys, inside, page, row, D: tl.constexpr, DIM: tl.constexpr, PER_PAGE: tl.constexpr, MID: tl.constexpr
):  # fmt: skip
    """Write the summaries of blocks as fp8 rows.

    Keys are `float32[TILE, B, DIM]` and `inside` `[TILE, DIM]`, what of them is there; `page` `[TILE]` points to the
    first byte of the page of each block and head, `row` is the block's place in it.
    """
    # The maximum of a GPU passes over NaN.
    is_spoilt = tl.max((keys != keys).to(tl.int32), axis=1) > 0
    keys = tl.where(keys != keys, 0.0, keys)
    upper = tl.where(is_spoilt, float("nan"), tl.max(keys, axis=1))
    lower = tl.where(is_spoilt, float("nan"), tl.min(keys, axis=1))
    WIDTH: tl.constexpr = D if MID else 2 * D
    out = (page + row * WIDTH)[:, None] + tl.arange(0, DIM)[None, :]
    if MID:
        middle = (upper + lower) / 2
        size = finite_bits(middle)
    else:
        size = tl.maximum(finite_bits(upper), finite_bits(lower))
    exponent = exponent_of(tl.max(tl.where(inside, size, 0), axis=1), _LEAST, NO_TOP)
    if MID:
        # Saturation would hide an infinity.
        middle = tl.where((middle.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, middle, float("nan"))
        tl.store(out, narrow(middle, exponent[:, None], NO_TOP, False), mask=inside)
    else:
        tl.store(out, narrow_outward(upper, exponent[:, None], True), mask=inside)
        tl.store(out + D, narrow_outward(lower, exponent[:, None], False), mask=inside)
    is_there = tl.max(inside.to(tl.int32), axis=1) > 0
    tl.store(page + PER_PAGE * WIDTH + row, (exponent + 127).to(tl.uint8), mask=is_there)


@triton.jit(do_not_specialize=["first_block", "num_blocks"], do_not_specialize_on_alignment=["block_ids", "page_ids"])
def _summarize(
    kv_cache,
    block_ids,
    pages,
    page_ids,
    first_block,
    num_blocks,
    H: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PER_PAGE: tl.constexpr,
    MID: tl.constexpr,
    FP8: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    inside = (index < num_blocks)[:, None] & (dim < D)[None, :]
    source = tl.load(block_ids + index, mask=index < num_blocks, other=0).to(tl.int64)
    # [TILE, B, DIM]
    start = ((source * H + head) * (B * 2 * D))[:, None, None]
    at = start + (tl.arange(0, B) * (2 * D))[None, :, None] + dim[None, None, :]
    keys = float_of(tl.load(kv_cache + at, mask=inside[:, None, :], other=0))
    block = first_block + index
    page = tl.load(page_ids + block // PER_PAGE, mask=index < num_blocks, other=0).to(tl.int64)
    page = pages + (page * H + head) * UNIT
    if FP8:
        store_fp8_rows(keys, inside, page, block % PER_PAGE, D, DIM, PER_PAGE, MID)
    else:
        WIDTH: tl.constexpr = D if MID else 2 * D
        out = (page + (block % PER_PAGE) * WIDTH)[:, None] + dim[None, :]
        dtype: tl.constexpr = pages.dtype.element_ty
        upper = tl.max(keys, axis=1)
        lower = tl.min(keys, axis=1)
        if MID:
            tl.store(out, held_as((upper + lower) / 2, dtype), mask=inside)
        else:
            tl.store(out, held_as(upper, dtype), mask=inside)
            tl.store(out + D, held_as(lower, dtype), mask=inside)


def summarize(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    layout: SummaryLayout,
) -> None:
    """Launch it on the current stream; see `op.summarize`."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    num_blocks = len(block_ids)
    if num_blocks == 0:
        return
    head_dim = width // 2
    padded = triton.next_power_of_2(head_dim)
    tile = max(1, min(8, _TILE_BYTES // (block_size * padded * kv_cache.element_size())))
    _summarize[(triton.cdiv(num_blocks, tile), num_kv_heads)](
        codes(kv_cache),
        block_ids,
        pages.view(torch.uint8) if layout.is_fp8 else codes(pages),
        page_ids,
        first_block,
        num_blocks,
        H=num_kv_heads,
        B=block_size,
        D=head_dim,
        DIM=padded,
        PER_PAGE=layout.rows_per_page,
        MID=layout.kind == "mid",
        FP8=layout.is_fp8,
        UNIT=block_size * width * (kv_cache.element_size() if layout.is_fp8 else 1),
        TILE=tile,
    )
