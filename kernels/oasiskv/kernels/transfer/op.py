"""Doors of transfer (host memory to engine blocks) and store (the other way)."""

import torch

from oasiskv.kernels import check, library
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

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    num_kv_heads, _, _ = check.cache("kv_cache", kv_cache)
    check.units(units, layer, kv_cache)
    device = kv_cache.device
    num_rows = check.rows(rows, device)
    check.tensor("plan", plan, (num_rows, num_kv_heads, None, 2), device=device)
    check.tensor("host_table", host_table, (None, None), device=device, rows_may_be_apart=True)
    check.tensor("slot_ids", slot_ids, (host_table.shape[0], None), device=device, rows_may_be_apart=True)
    _transfer(units, layer, kv_cache, plan, rows, host_table, slot_ids)


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

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    check.cache("kv_cache", kv_cache)
    check.units(units, layer, kv_cache)
    check.tensor("block_ids", block_ids, (None,), device=kv_cache.device)
    check.tensor("host_ids", host_ids, (len(block_ids),), device=kv_cache.device)
    _store(kv_cache, block_ids, units, layer, host_ids)


def _transfer_on_cuda(
    units: torch.Tensor,
    layer: int,
    kv_cache: torch.Tensor,
    plan: torch.Tensor,
    rows: torch.Tensor,
    host_table: torch.Tensor,
    slot_ids: torch.Tensor,
) -> None:
    from oasiskv.kernels.transfer import kernel

    kernel.transfer(units, layer, kv_cache, plan, rows, host_table, slot_ids)


def _store_on_cuda(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, units: torch.Tensor, layer: int, host_ids: torch.Tensor
) -> None:
    from oasiskv.kernels.transfer import kernel

    kernel.store(kv_cache, block_ids, units, layer, host_ids)


_transfer = library.register(
    "transfer(Tensor units, int layer, Tensor(a!) kv_cache, Tensor plan, Tensor rows, Tensor host_table, "
    "Tensor slot_ids) -> ()",
    cpu=reference.transfer,
    cuda=_transfer_on_cuda,
)
_store = library.register(
    "store(Tensor kv_cache, Tensor block_ids, Tensor(a!) units, int layer, Tensor host_ids) -> ()",
    cpu=reference.store,
    cuda=_store_on_cuda,
)
