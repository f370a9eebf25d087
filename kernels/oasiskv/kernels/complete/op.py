"""Door of complete: checks its arguments and runs it."""

import torch

from oasiskv.kernels.complete import reference
from oasiskv.kernels.rows import SummaryLayout


def complete(
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    host_table: torch.Tensor,
    counters: torch.Tensor,
    *,
    layout: SummaryLayout,
    num_sinks: int,
) -> None:
    """Take the block that became final in this step into each head's working set, its summary page and host memory.

    In each head it replaces the least recently selected resident (ties to the lower slot, never a sink block), so that
    it is invisible in no step. Its engine block may be a new summary page of the request: the content is read first.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; read and written.
        units: Host pool, `[num_host_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]`; written.
        layer: Index into the second dimension of `units`.
        rows: `int32[num_rows, len(Row)]`; rows with FINISHED_BLOCK -1 are skipped.
        resident: In and out, `int32[num_requests, num_kv_heads, budget]` of one layer.
        stamp: In and out, same shape.
        slot_ids: `int32[num_requests, budget]`: slot to engine block.
        page_ids: `int32[num_requests, max_pages]`: each request's summary pages, the page of the finished block
            included.
        host_table: `int32[num_requests, max_blocks]`: block index to host block.
        counters: In and out, `int64[num_kv_heads, len(Counter)]` of this layer.
        layout: Kind and place of summaries.
        num_sinks: First blocks that are never victims.
    """
    reference.complete(
        kv_cache, units, layer, rows, resident, stamp, slot_ids, page_ids, host_table, counters, layout, num_sinks
    )
