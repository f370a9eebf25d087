"""Door of summarize: checks its arguments and runs it. Its output is what `predict` scores."""

import torch

from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.summarize import reference


def summarize(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    layout: SummaryLayout,
) -> None:
    """Write the summaries of consecutive blocks of one request and layer into its summary pages.

    Args:
        kv_cache: One layer, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`, contiguous; K in the first half.
        block_ids: `int32[n]`, where blocks `first_block ...` of the request lie in `kv_cache`.
        pages: Tensor of the shape of `kv_cache` that holds the pages; it may be `kv_cache` itself, if no page is also a
            source.
        page_ids: `int32[num_pages]`, where the request's pages lie in `pages`.
        first_block: `block_index` of the first of the blocks.
        layout: Kind and place of summaries.
    """
    reference.summarize(kv_cache, block_ids, pages, page_ids, first_block, layout)
