"""What the debug settings do: compare working sets with the host, and make an early reader of a slot stand out."""

import torch

from oasiskv.core.errors import CorruptBlockError
from oasiskv.engine.state import WorkingSets
from oasiskv.kernels.fp8.reference import read
from oasiskv.kernels.rows import Row


def poison(sets: WorkingSets, kv_cache: torch.Tensor, layer: int, rows: torch.Tensor) -> None:
    """Overwrite the slots that a selection planned to fetch into: K 0 and V huge, but finite, pass every softmax.

    Args:
        sets: The working sets; the layer's selection just ran.
        kv_cache: The layer's, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        layer: The layer.
        rows: `int32[n, len(Row)]` of the selection.
    """
    num_heads, head_dim, dtype, device = kv_cache.shape[1], kv_cache.shape[3] // 2, kv_cache.dtype, kv_cache.device
    found, slot = sets.plan[layer, : len(rows)].long().unbind(-1)  # [rows, heads, cap] each
    request = rows[:, Row.REQUEST].long()[:, None, None]
    # Entries without a unit write the null block as it is, so that the device need not be asked which they are.
    is_fetched = (found >= 0) & (request >= 0)
    block = torch.where(is_fetched, sets.slot_ids[request.clamp(min=0), slot.clamp(min=0)].long(), 0)
    head = torch.arange(num_heads, device=device)[None, :, None]
    huge = torch.zeros(2 * head_dim, dtype=dtype, device=device)
    huge[head_dim:] = min(1e4, torch.finfo(dtype).max)
    # As bytes: torch has few operations on fp8.
    held = kv_cache.view(torch.uint8)
    held[block, head] = torch.where(is_fetched[..., None, None], huge.view(torch.uint8), held[block, head])


def check_working_set(
    sets: WorkingSets,
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    slot: int,
    num_sinks: int,
    host_ids: torch.Tensor,
    absent: torch.Tensor,
) -> None:
    """Check what is resident of a sparse request in one layer, with none of the layer's transfers in flight.

    Args:
        sets: The working sets.
        kv_cache: The layer's.
        units: The host pool.
        layer: The layer.
        slot: The request's.
        num_sinks: First blocks that are always resident.
        host_ids: `int32[max_blocks]`: the request's host block by block index, in this layer.
        absent: `bool[max_blocks]` on the CPU: what the host lacks, so that nothing is compared with it.

    Raises:
        CorruptBlockError: a head names a block twice or one that is not complete, or differs from the host.
    """
    resident, num_complete = sets.resident[layer, slot], int(sets.num_complete[slot])
    where = f"layer {layer}, request slot {slot}"
    for head, blocks in enumerate(resident.tolist()):
        if len(set(blocks)) != len(blocks):
            raise CorruptBlockError(f"resident: expected each block once, got {blocks} ({where}, head {head})")
        if min(blocks) < 0 or max(blocks) >= num_complete:
            raise CorruptBlockError(
                f"resident: expected blocks below {num_complete}, got {blocks} ({where}, head {head})"
            )
        if not set(range(num_sinks)) <= set(blocks):
            raise CorruptBlockError(f"resident: expected the sink blocks, got {blocks} ({where}, head {head})")
    heads = torch.arange(resident.shape[0], device=resident.device)[:, None]
    held = kv_cache[sets.slot_ids[slot].long()[None], heads].cpu()
    host = read(units, layer, host_ids[resident.long()].long().cpu(), heads.cpu(), kv_cache)
    if units.dtype != kv_cache.dtype:  # fp8: bits of a widened NaN depend on the device
        held, host = (torch.where(one.isnan(), torch.nan, one) for one in (held, host))
    is_absent = absent[resident.long().cpu()]
    held[is_absent] = host[is_absent]
    if not torch.equal(held.view(torch.uint8), host.view(torch.uint8)):
        bad = (held != host).flatten(2).any(-1).nonzero().tolist()
        raise CorruptBlockError(f"resident: bytes differ from host memory at (head, slot) {bad[:8]} ({where})")
