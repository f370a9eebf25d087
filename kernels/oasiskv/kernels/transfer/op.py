"""Doors of transfer (host memory to engine blocks) and store (the other way)."""

import torch

from oasiskv.kernels.transfer import reference


def transfer(
    units: torch.Tensor,
    layer: int,
    kv_cache: torch.Tensor,
    plan: torch.Tensor,
    rows: torch.Tensor,
    host_table: torch.Tensor,
    slot_ids: torch.Tensor,
) -> None:
    """Copy every planned unit from host memory into its slot.

    Args:
        units: Host pool, `[num_host_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]`, in host memory.
        layer: Index into the second dimension of `units`.
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; written.
        plan: `int32[num_rows, num_kv_heads, max_cap, 2]` of `select`.
        rows: `int32[num_rows, len(Row)]`.
        host_table: `int32[num_requests, max_blocks]`: block index to host block.
        slot_ids: `int32[num_requests, budget]`: slot to engine block.
    """
    reference.transfer(units, layer, kv_cache, plan, rows, host_table, slot_ids)


def store(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, units: torch.Tensor, layer: int, host_ids: torch.Tensor
) -> None:
    """Copy whole blocks (all heads) of one layer to host memory.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        block_ids: `int32[n]`, engine blocks to read.
        units: Host pool, `[num_host_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]`; written.
        layer: Index into the second dimension of `units`.
        host_ids: `int32[n]`, host blocks to write.
    """
    reference.store(kv_cache, block_ids, units, layer, host_ids)
