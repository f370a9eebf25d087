"""Door of predict: checks its arguments and runs it. Its output is what `select` reads."""

from typing import get_args

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.formats import wide_dtypes
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
    Any other score is finite: NaN, of keys that are not finite, counts as the largest number there is.

    Args:
        query: Lookahead queries of one layer, `[num_requests, num_query_heads, head_dim]`, indexed by request slot; of
            the dtype of the cache, or of any but fp8 if the cache is fp8.
        rows: `int32[num_rows, len(Row)]`.
        pages: Where summary pages lie: one layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        page_ids: `int32[num_requests, max_pages]`, each request's pages in order.
        blocks: Out, `int32[num_rows, num_kv_heads, budget]`: block indices in any order; -1 where fewer complete blocks
            exist.
        scores: Out, `float32`, same shape: their scores; -inf beside -1.
        layout: Kind and place of summaries.
        alpha: Weight of a block's half width, see `reference.scores_of`.
        reduction: How query heads of a group combine.
        scale: Softmax scale of attention, times the scales of fp8 keys and queries; only the reduction `softmax` uses
            it, since no factor that all scores share changes their order.
        num_sinks: First blocks that are always predicted.

    Raises:
        ConfigError: An argument differs from the above; nothing is written.
    """
    cache_shape = check.cache("pages", pages)
    check.layout(layout, cache_shape, pages.dtype)
    num_kv_heads, device = cache_shape[0], pages.device
    check.tensor("query", query, (None, None, layout.head_dim), wide_dtypes(pages.dtype), device)
    if query.shape[1] % num_kv_heads:
        raise ConfigError(f"query: expected a multiple of {num_kv_heads} query heads, got {query.shape[1]}")
    num_rows = check.rows(rows, device)
    check.tensor("page_ids", page_ids, (query.shape[0], None), device=device, rows_may_be_apart=True)
    check.tensor("blocks", blocks, (num_rows, num_kv_heads, None), device=device)
    check.tensor("scores", scores, (num_rows, num_kv_heads, blocks.shape[2]), (torch.float32,), device)
    if reduction not in get_args(Reduction):
        raise ConfigError(f"reduction: expected one of {', '.join(get_args(Reduction))}, got {reduction}")
    if layout.kind == "mid" and alpha != 0:
        raise ConfigError(f"alpha: expected 0 with summaries of kind mid, got {alpha}")
    if num_sinks < 0:
        raise ConfigError(f"num_sinks: expected at least 0, got {num_sinks}")
    _operation(
        query, rows, pages, page_ids, blocks, scores, layout.kind == "mid", layout.is_fp8, alpha, reduction, scale,
        num_sinks,
    )  # fmt: skip


def _on_cpu(
    query: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    scores: torch.Tensor,
    is_mid: bool,
    is_fp8: bool,
    alpha: float,
    reduction: Reduction,
    scale: float,
    num_sinks: int,
) -> None:
    layout = library.layout_of(pages, is_mid, is_fp8)
    reference.predict(query, rows, pages, page_ids, blocks, scores, layout, alpha, reduction, scale, num_sinks)


def _on_cuda(
    query: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    scores: torch.Tensor,
    is_mid: bool,
    is_fp8: bool,
    alpha: float,
    reduction: Reduction,
    scale: float,
    num_sinks: int,
) -> None:
    from oasiskv.kernels.predict import kernel

    layout = library.layout_of(pages, is_mid, is_fp8)
    kernel.predict(query, rows, pages, page_ids, blocks, scores, layout, alpha, reduction, scale, num_sinks)


_operation = library.register(
    "predict(Tensor query, Tensor rows, Tensor pages, Tensor page_ids, Tensor(a!) blocks, Tensor(b!) scores, "
    "bool is_mid, bool is_fp8, float alpha, str reduction, float scale, int num_sinks) -> ()",
    cpu=_on_cpu,
    cuda=_on_cuda,
)
