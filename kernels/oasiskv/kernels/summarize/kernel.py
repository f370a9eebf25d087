"""The Triton kernel of summarize."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.rows import SummaryLayout

_TILE_BYTES = 16384
"""Keys that one program reads; enough in flight per program, small enough that few blocks still spread over the SMs."""


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
    keys = tl.load(kv_cache + at, mask=inside[:, None, :], other=0.0).to(tl.float32)
    upper = tl.max(keys, axis=1)
    lower = tl.min(keys, axis=1)

    block = first_block + index
    page = tl.load(page_ids + block // PER_PAGE, mask=index < num_blocks, other=0).to(tl.int64)
    WIDTH: tl.constexpr = D if MID else 2 * D
    row = (page * H + head) * (B * 2 * D) + (block % PER_PAGE) * WIDTH
    out = pages + row[:, None] + dim[None, :]
    dtype: tl.constexpr = pages.dtype.element_ty
    if MID:
        tl.store(out, ((upper + lower) / 2).to(dtype), mask=inside)
    else:
        tl.store(out, upper.to(dtype), mask=inside)
        tl.store(out + D, lower.to(dtype), mask=inside)


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
        kv_cache,
        block_ids,
        pages,
        page_ids,
        first_block,
        num_blocks,
        H=num_kv_heads,
        B=block_size,
        D=head_dim,
        DIM=padded,
        PER_PAGE=layout.rows_per_page,
        MID=layout.kind == "mid",
        TILE=tile,
    )
