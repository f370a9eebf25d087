"""Door of publish: checks its arguments and runs it. `predict` and the switch read what it writes."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.formats import wide_dtypes
from oasiskv.kernels.publish import reference


def publish(
    query: torch.Tensor,
    query_rows: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    published_query: torch.Tensor,
    published_rows: torch.Tensor,
) -> None:
    """Copy a layer's lookahead queries and its step metadata to where the next step does not overwrite them.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]` of one layer.
        query_rows: `int32[num_rows]`: token of each row whose query looks ahead.
        slots: `int32[num_rows]`: request slot of each row; padding rows name a slot that nobody reads.
        rows: `int32[num_rows, len(Row)]`.
        published_query: Out, `[num_requests, num_query_heads, head_dim]`, the queries by request slot; of
            the dtype of `query`, or of any but fp8 if that is fp8: its numbers without their scale.
        published_rows: Out, `int32[>= num_rows, len(Row)]`; its first rows are written.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    device = query.device
    num_rows = check.rows(rows, device)
    check.tensor("query_rows", query_rows, (num_rows,), device=device)
    check.tensor("slots", slots, (num_rows,), device=device)
    if query.dim() != 3 or query.stride(-1) != 1 or query.stride(1) != query.shape[2]:
        raise ConfigError(
            "query: expected [num_tokens, num_query_heads, head_dim] with adjacent heads, "
            f"got shape {tuple(query.shape)} and strides {query.stride()}"
        )
    shape = (None, *query.shape[1:])
    check.tensor("published_query", published_query, shape, wide_dtypes(query.dtype), device)
    if check.rows(published_rows, device) < num_rows:
        raise ConfigError(f"published_rows: expected at least {num_rows} rows, got {len(published_rows)}")
    _publish(query, query_rows, slots, rows, published_query, published_rows)


def _on_cuda(
    query: torch.Tensor,
    query_rows: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    published_query: torch.Tensor,
    published_rows: torch.Tensor,
) -> None:
    from oasiskv.kernels.publish import kernel

    kernel.publish(query, query_rows, slots, rows, published_query, published_rows)


_publish = library.register(
    "publish(Tensor query, Tensor query_rows, Tensor slots, Tensor rows, "
    "Tensor(a!) published_query, Tensor(b!) published_rows) -> ()",
    cpu=reference.publish,
    cuda=_on_cuda,
)
