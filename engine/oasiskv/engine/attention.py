"""Paged attention in plain torch: the CPU path's kernel, right before fast."""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows with the same number of query tokens, padded to the longest of them.

    Attributes:
        tokens: `int64[num_rows, num_queries]`: their tokens in the batch.
        block_table: `int64[num_rows, width]`: their blocks, 0 where a row has fewer.
        mask: `bool[num_rows, num_queries, width * block_size]`: which keys a query sees.
    """

    tokens: torch.Tensor
    block_table: torch.Tensor
    mask: torch.Tensor


AttentionGroups = list[RowGroup]

SHORT_QUERY = 8
"""Rows with at most so many query tokens are attended together; longer ones, prefill chunks, one by one."""


def group_rows(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> AttentionGroups:
    """Put the rows of a batch into groups that one attention call serves.

    Args:
        query_start_loc: `int32[num_rows + 1]`.
        seq_lens: `int32[num_rows]`: tokens in the row's blocks; its queries are the last of them.
        block_table: `int32[num_rows, max_width]`.
        block_size: Tokens per block.
    """
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    members: dict[tuple[int, int], list[int]] = {}
    for row in range(len(lens)):
        num_queries = starts[row + 1] - starts[row]
        if num_queries:
            key = (num_queries, 0) if num_queries <= SHORT_QUERY else (num_queries, row + 1)
            members.setdefault(key, []).append(row)
    return [
        _group(rows, num_queries, starts, lens, block_table, block_size) for (num_queries, _), rows in members.items()
    ]


def _group(
    rows: list[int], num_queries: int, starts: list[int], lens: list[int], block_table: torch.Tensor, block_size: int
) -> RowGroup:
    width = max(-(-lens[row] // block_size) for row in rows)
    length = torch.tensor([lens[row] for row in rows])
    column = torch.arange(width)
    table = torch.where(column * block_size < length[:, None], block_table[rows, :width], 0)
    last_seen = length[:, None] - num_queries + torch.arange(num_queries)
    return RowGroup(
        tokens=torch.tensor([[starts[row] + i for i in range(num_queries)] for row in rows]),
        block_table=table.long(),
        mask=torch.arange(width * block_size) <= last_seen[..., None],
    )


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    groups: AttentionGroups,
    scale: float,
    output: torch.Tensor,
    *,
    value_scale: float = 1.0,
) -> None:
    """Causal attention of every group over its blocks.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`.
        kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`, K in the first half; of the dtype of `query`,
            or fp8.
        groups: Of `group_rows`.
        scale: Softmax scale, times that of fp8 keys.
        output: Out, the shape of `query`.
        value_scale: Of fp8 values.
    """
    num_kv_heads, head_dim = kv_cache.shape[1], query.shape[-1]
    for group in groups:
        num_rows, num_queries = group.tokens.shape
        held = kv_cache[group.block_table].transpose(1, 2).flatten(2, 3).to(query.dtype)  # [rows, H, keys, 2D]
        # Query heads of a KV head become further queries of it: [rows, H, G * queries, D]
        grouped = query[group.tokens].view(num_rows, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        num_heads_per_kv = grouped.shape[2]
        mask = group.mask[:, None].repeat(1, 1, num_heads_per_kv, 1)
        result = functional.scaled_dot_product_attention(
            grouped.flatten(2, 3), held[..., :head_dim], held[..., head_dim:], attn_mask=mask, scale=scale
        )
        result = result.view(num_rows, num_kv_heads, num_heads_per_kv, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        result = result.reshape(num_rows, num_queries, -1, head_dim)
        output[group.tokens] = result if value_scale == 1 else result * value_scale
