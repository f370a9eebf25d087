"""What transfer and store mean, in plain torch."""

import torch

from oasiskv.kernels.fp8.reference import read, write
from oasiskv.kernels.rows import Row


def transfer(
    units: torch.Tensor,
    layer: int,
    kv_cache: torch.Tensor,
    plan: torch.Tensor,
    rows: torch.Tensor,
    host_table: torch.Tensor,
    slot_ids: torch.Tensor,
) -> None:
    """Carry out a plan; see `op.transfer`."""
    row, head, entry = torch.nonzero(plan[..., 0] >= 0, as_tuple=True)
    request = rows[row, Row.REQUEST].long()
    block, slot = plan[row, head, entry].long().unbind(-1)
    source = host_table[request, block].to(units.device).long()
    content = read(units, layer, source, head.to(units.device), kv_cache)
    kv_cache[slot_ids[request, slot].long(), head] = content.to(kv_cache.device)


def store(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, units: torch.Tensor, layer: int, host_ids: torch.Tensor
) -> None:
    """Write blocks through to host memory; see `op.store`."""
    write(units, layer, host_ids.to(units.device).long(), kv_cache[block_ids.long()])
