"""How a request becomes sparse in one layer: from everything resident to a full working set and summary pages."""

from collections.abc import Sequence

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.upload import upload
from oasiskv.kernels.fp8 import round_blocks
from oasiskv.kernels.predict import predict
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.summarize import summarize


def switch_layer(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    row: torch.Tensor,
    page_ids: torch.Tensor,
    query: torch.Tensor,
    staging: torch.Tensor,
    resident: torch.Tensor,
    *,
    layout: SummaryLayout,
    config: LookaheadConfig,
    scale: float,
) -> None:
    """Select the first working set with the request's last query and lay it out in place.

    Predicted blocks that lie in the first `budget` places stay there; the others are copied, inside the cache, into the
    places of blocks that were not predicted, lowest first. Then the summary pages take their places, which may have
    held predicted blocks.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; written.
        block_ids: `int32[num_complete]`: the request's complete blocks, all present.
        row: `int32[1, len(Row)]`: request 0 with `num_complete` blocks, of which none finished just now.
        page_ids: `int32[num_pages]`: where its summary pages go.
        query: `[num_query_heads, head_dim]`.
        staging: `[max_pages, num_kv_heads, block_size, 2 * head_dim]`: scratch for the summary pages.
        resident: Out, `int32[num_kv_heads, budget]`: block index in each slot.
        layout: Kind and place of summaries.
        config: How to score.
        scale: What the layer's scores are multiplied by to be logits of attention.
    """
    device = kv_cache.device
    num_heads, budget = resident.shape
    # As many pages as the longest request has: predict is compiled for their number.
    pages = torch.arange(len(staging), dtype=torch.int32, device=device)
    summarize(kv_cache, block_ids, staging, pages, 0, layout)
    blocks = torch.empty(1, num_heads, budget, dtype=torch.int32, device=device)
    scores = torch.empty(1, num_heads, budget, dtype=torch.float32, device=device)
    predict(
        query[None],
        row,
        staging,
        pages[None],
        blocks,
        scores,
        layout=layout,
        alpha=config.score_alpha,
        reduction=config.group_reduction,
        scale=scale,
        num_sinks=config.sink_blocks,
    )
    resident.copy_(seat(blocks[0]))
    # Every slot is written, those that keep their block with itself, so that the device need not be asked which move.
    head, slot = torch.arange(num_heads, device=device)[:, None], torch.arange(budget, device=device)
    source = block_ids[torch.where(resident < budget, slot, resident).long()].long()
    kv_cache[block_ids[slot].long()[None], head] = kv_cache[source, head]
    kv_cache[page_ids.long()] = staging[: len(page_ids)]


def switch_request(
    config: LookaheadConfig,
    shape: CacheShape,
    sets: WorkingSets,
    kv_caches: Sequence[torch.Tensor],
    slot: int,
    table: torch.Tensor,
    num_complete: int,
    stamp: int,
) -> None:
    """Make a request sparse in every layer.

    Args:
        config: How to score.
        shape: This process's KV cache.
        sets: The working sets.
        kv_caches: One tensor per layer.
        slot: The request's slot.
        table: `int32[n]`: its block table, whose first `num_complete` blocks are complete.
        num_complete: Blocks to choose from.
        stamp: Of the step.
    """
    num_pages = sets.seat(slot, table, num_complete)
    row = upload([[0, num_complete, 0, -1, 0]], table.device)
    for layer, kv_cache in enumerate(kv_caches):
        if shape.is_fp8:
            # What the host holds is rounded; from here on so is what is resident, and its summaries.
            round_blocks(kv_cache, table[:num_complete])
        switch_layer(
            kv_cache,
            table[:num_complete],
            row,
            sets.page_ids[slot, :num_pages],
            sets.query[layer, slot],
            sets.switch_pages,
            sets.resident[layer, slot],
            layout=sets.summaries,
            config=config,
            scale=shape.score_scale(layer),
        )
        sets.stamp[layer, slot] = stamp


def seat(blocks: torch.Tensor) -> torch.Tensor:
    """Give every chosen block a slot: block b slot b where there is one, the others the free slots in order.

    Args:
        blocks: `int32[num_kv_heads, budget]`: distinct block indices of each head.

    Returns:
        `int32[num_kv_heads, budget]`: block index in each slot.
    """
    budget = blocks.shape[1]
    ordered = blocks.sort(-1).values
    stays = ordered < budget
    taken = torch.zeros_like(ordered, dtype=torch.bool)
    taken.scatter_(1, torch.where(stays, ordered, 0).long(), stays)
    # Scatter may hit entry 0 twice with both values; block 0 decides it.
    taken[:, 0] = (ordered == 0).any(-1)
    free = torch.argsort(taken.int(), dim=1, stable=True)  # free slots first, ascending
    rank = (~stays).cumsum(-1) - 1
    slot = torch.where(stays, ordered.long(), free.gather(1, rank.clamp(min=0)))
    return torch.empty_like(ordered).scatter_(1, slot, ordered)
