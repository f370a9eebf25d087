"""What summarize means, in plain torch."""

import torch

from oasiskv.kernels.rows import SummaryLayout


def summary_rows(keys: torch.Tensor, layout: SummaryLayout) -> torch.Tensor:
    """Summarize blocks of keys.

    Args:
        keys: `[..., block_size, head_dim]`.
        layout: Kind of summary.

    Returns:
        `[..., width]` in the dtype of `keys`: `[max | min]`, or `(max + min) / 2` computed in float32.
    """
    upper, lower = keys.amax(-2), keys.amin(-2)
    if layout.kind == "minmax":
        return torch.cat([upper, lower], -1)
    return ((upper.float() + lower.float()) / 2).to(keys.dtype)


def summarize(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    layout: SummaryLayout,
) -> None:
    """Write the summaries of consecutive blocks of one request; see `op.summarize`."""
    head_dim = layout.head_dim
    rows = summary_rows(kv_cache[block_ids.long(), :, :, :head_dim], layout)  # [n, H, width]
    index = torch.arange(first_block, first_block + len(block_ids), device=rows.device)
    page = page_ids[index // layout.rows_per_page].long()
    view = pages.view(pages.shape[0], pages.shape[1], layout.rows_per_page, layout.width)
    view[page, :, index % layout.rows_per_page] = rows
