"""What predict means, in plain torch, one row at a time."""

import torch

from oasiskv.kernels.rows import Reduction, Row, SummaryLayout
from oasiskv.kernels.summarize.reference import read_rows

LARGEST = torch.finfo(torch.float32).max
"""The greatest score of a block that is no sink; of one that nothing bounds too, whose score is NaN."""


def _finite(scores: torch.Tensor) -> torch.Tensor:
    return scores.nan_to_num(LARGEST, LARGEST, -LARGEST)


def scores_of(
    query: torch.Tensor,
    summaries: torch.Tensor,
    layout: SummaryLayout,
    alpha: float,
    reduction: Reduction,
    scale: float,
) -> torch.Tensor:
    """Score every block of one request for every KV head.

    The score of a block is `q.mid + alpha * |q|.half` with `mid = (max + min) / 2` and `half = (max - min) / 2`,
    reduced over the query heads of the group. `alpha = 1` bounds every `q.k` of the block from above; 0 needs the
    midpoint alone.

    Args:
        query: `[num_query_heads, head_dim]`, query heads of one KV head adjacent.
        summaries: `[num_kv_heads, n, width]`.
        layout: Kind of the summaries.
        alpha: Weight of the half width.
        reduction: `max`, `sum`, or `softmax` (largest share of a query head's softmax over the blocks).
        scale: Softmax scale of attention; only `softmax` uses it.

    Returns:
        `float32[num_kv_heads, n]`.
    """
    num_kv_heads, _, width = summaries.shape
    q = query.float().view(num_kv_heads, -1, layout.head_dim)  # [H, G, D]
    rows = summaries.float()
    if layout.kind == "minmax":
        q = torch.cat([(q + alpha * q.abs()) / 2, (q - alpha * q.abs()) / 2], -1)
    assert q.shape[-1] == width
    scores = _finite(torch.einsum("hgd,hnd->hgn", q, rows))
    if reduction == "max":
        return scores.amax(1)
    if reduction == "sum":
        return _finite(scores.sum(1))
    return torch.softmax(scores * scale, -1).amax(1)


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
) -> None:
    """Fill `blocks` and `scores`; see `op.predict`."""
    budget = blocks.shape[-1]
    blocks.fill_(-1)
    scores.fill_(float("-inf"))
    for i, row in enumerate(rows.tolist()):
        request, num_complete = row[Row.REQUEST], row[Row.NUM_COMPLETE]
        if request < 0 or num_complete == 0:
            continue
        summaries = read_rows(pages, page_ids[request], num_complete, layout)
        score = scores_of(query[request], summaries, layout, alpha, reduction, scale)
        score[:, :num_sinks] = float("inf")
        # A stable sort keeps the lower block first among equals.
        order = torch.sort(score, dim=-1, descending=True, stable=True)
        count = min(budget, num_complete)
        blocks[i, :, :count] = order.indices[:, :count].int()
        scores[i, :, :count] = order.values[:, :count]
