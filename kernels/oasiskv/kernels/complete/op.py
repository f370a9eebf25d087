"""Door of complete: checks its arguments and runs it."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.complete import reference
from oasiskv.kernels.rows import Counter, SummaryLayout


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

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    cache_shape = check.cache("kv_cache", kv_cache)
    check.layout(layout, cache_shape, kv_cache.dtype)
    check.units(units, layer, kv_cache)
    num_kv_heads, device = cache_shape[0], kv_cache.device
    check.rows(rows, device)
    check.tensor("resident", resident, (None, num_kv_heads, None), device=device)
    check.tensor("stamp", stamp, tuple(resident.shape), device=device)
    num_requests, _, budget = resident.shape
    check.tensor("slot_ids", slot_ids, (num_requests, budget), device=device, rows_may_be_apart=True)
    check.tensor("page_ids", page_ids, (num_requests, None), device=device, rows_may_be_apart=True)
    check.tensor("host_table", host_table, (num_requests, None), device=device, rows_may_be_apart=True)
    check.tensor("counters", counters, (num_kv_heads, len(Counter)), (torch.int64,), device)
    if num_sinks < 0:
        raise ConfigError(f"num_sinks: expected at least 0, got {num_sinks}")
    _operation(
        kv_cache, units, layer, rows, resident, stamp, slot_ids, page_ids, host_table, counters,
        layout.kind == "mid", layout.is_fp8, num_sinks,
    )  # fmt: skip


def _on_cpu(
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
    is_mid: bool,
    is_fp8: bool,
    num_sinks: int,
) -> None:
    layout = library.layout_of(kv_cache, is_mid, is_fp8)
    reference.complete(
        kv_cache, units, layer, rows, resident, stamp, slot_ids, page_ids, host_table, counters, layout, num_sinks
    )


def _on_cuda(
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
    is_mid: bool,
    is_fp8: bool,
    num_sinks: int,
) -> None:
    from oasiskv.kernels.complete import kernel

    layout = library.layout_of(kv_cache, is_mid, is_fp8)
    kernel.complete(
        kv_cache, units, layer, rows, resident, stamp, slot_ids, page_ids, host_table, counters, layout, num_sinks
    )


_operation = library.register(
    "complete(Tensor(a!) kv_cache, Tensor(b!) units, int layer, Tensor rows, Tensor(c!) resident, Tensor(d!) stamp, "
    "Tensor slot_ids, Tensor page_ids, Tensor host_table, Tensor(e!) counters, bool is_mid, bool is_fp8, "
    "int num_sinks) -> ()",
    cpu=_on_cpu,
    cuda=_on_cuda,
)
