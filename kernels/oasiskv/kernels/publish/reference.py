"""What publish means, in plain torch."""

import torch


def publish(
    query: torch.Tensor,
    query_rows: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    published_query: torch.Tensor,
    published_rows: torch.Tensor,
) -> None:
    """Copy queries and rows; see `op.publish`."""
    published_query[slots.long()] = query[query_rows.long()].to(published_query.dtype)
    published_rows[: len(rows)] = rows
