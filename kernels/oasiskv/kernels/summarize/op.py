"""Door of summarize: checks its arguments and runs it. Its output is what `predict` scores."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
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

    Raises:
        ConfigError: A tensor differs from the above, or `page_ids` is too short; nothing is written.
    """
    cache_shape = check.cache("kv_cache", kv_cache)
    check.layout(layout, cache_shape, kv_cache.dtype)
    device = kv_cache.device
    check.tensor("block_ids", block_ids, (None,), device=device)
    check.tensor("pages", pages, (None, *cache_shape), (kv_cache.dtype,), device)
    check.tensor("page_ids", page_ids, (None,), device=device)
    if first_block < 0:
        raise ConfigError(f"first_block: expected at least 0, got {first_block}")
    num_pages = layout.num_pages(first_block + len(block_ids))
    if len(block_ids) and len(page_ids) < num_pages:
        raise ConfigError(f"page_ids: expected at least {num_pages} pages, got {len(page_ids)}")
    _operation(kv_cache, block_ids, pages, page_ids, first_block, layout.kind == "mid", layout.is_fp8)


def _on_cpu(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    is_mid: bool,
    is_fp8: bool,
) -> None:
    reference.summarize(kv_cache, block_ids, pages, page_ids, first_block, library.layout_of(kv_cache, is_mid, is_fp8))


def _on_cuda(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    is_mid: bool,
    is_fp8: bool,
) -> None:
    from oasiskv.kernels.summarize import kernel

    kernel.summarize(kv_cache, block_ids, pages, page_ids, first_block, library.layout_of(kv_cache, is_mid, is_fp8))


_operation = library.register(
    "summarize(Tensor kv_cache, Tensor block_ids, Tensor(a!) pages, Tensor page_ids, int first_block, "
    "bool is_mid, bool is_fp8) -> ()",
    cpu=_on_cpu,
    cuda=_on_cuda,
)
