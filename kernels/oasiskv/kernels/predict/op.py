"""Door of predict: checks its arguments and runs it. Its output is what `select` reads."""

import torch

from oasiskv.kernels.predict import reference
from oasiskv.kernels.rows import Reduction, SummaryLayout


def predict(
    query: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    scores: torch.Tensor,
    *,
    layout: SummaryLayout,
    alpha: float,
    reduction: Reduction,
    scale: float,
    num_sinks: int,
) -> None:
    """Find the best blocks of every row and KV head: an exact top-K over the summaries.

    The first `num_sinks` blocks have score +inf, so they are always among the best. Equal scores go to the lower block.

    Args:
        query: Lookahead queries of one layer, `[num_requests, num_query_heads, head_dim]`, indexed by request slot.
        rows: `int32[num_rows, len(Row)]`.
        pages: Where summary pages lie: one layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        page_ids: `int32[num_requests, max_pages]`, each request's pages in order.
        blocks: Out, `int32[num_rows, num_kv_heads, budget]`: block indices in any order; -1 where fewer complete blocks
            exist.
        scores: Out, `float32`, same shape: their scores; -inf beside -1.
        layout: Kind and place of summaries.
        alpha: Weight of a block's half width, see `reference.scores_of`.
        reduction: How query heads of a group combine.
        scale: Softmax scale of attention; only the reduction `softmax` uses it.
        num_sinks: First blocks that are always predicted.
    """
    reference.predict(query, rows, pages, page_ids, blocks, scores, layout, alpha, reduction, scale, num_sinks)
