"""Doors of complete and keep: check their arguments and run them."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.complete import reference
from oasiskv.kernels.rows import Counter, SummaryLayout


def complete(
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    counters: torch.Tensor,
    *,
    layout: SummaryLayout,
    num_sinks: int,
    rounds: bool,
) -> None:
    """Take the block that became final in this step into each head's working set and its summary page.

    In each head it replaces the least recently selected resident (ties to the lower slot, never a sink block), so that
    it is invisible in no step. Its engine block may be a new summary page of the request: the content is read first.
    The host gets it by `keep`, before a selection may choose it as a victim.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; read and written.
        rows: `int32[num_rows, len(Row)]`; rows with FINISHED_BLOCK -1 are skipped.
        resident: In and out, `int32[num_requests, num_kv_heads, budget]` of one layer.
        stamp: In and out, same shape.
        slot_ids: `int32[num_requests, budget]`: slot to engine block.
        page_ids: `int32[num_requests, max_pages]`: each request's summary pages, the page of the finished block
            included.
        counters: In and out, `int64[num_kv_heads, len(Counter)]` of this layer.
        layout: Kind and place of summaries.
        num_sinks: First blocks that are never victims.
        rounds: Round the block to fp8, since host memory will hold it so.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    cache_shape = check.cache("kv_cache", kv_cache)
    check.layout(layout, cache_shape, kv_cache.dtype)
    num_kv_heads, device = cache_shape[0], kv_cache.device
    check.rows(rows, device)
    check.tensor("resident", resident, (None, num_kv_heads, None), device=device)
    check.tensor("stamp", stamp, tuple(resident.shape), device=device)
    num_requests, _, budget = resident.shape
    check.tensor("slot_ids", slot_ids, (num_requests, budget), device=device, rows_may_be_apart=True)
    check.tensor("page_ids", page_ids, (num_requests, None), device=device, rows_may_be_apart=True)
    check.tensor("counters", counters, (num_kv_heads, len(Counter)), (torch.int64,), device)
    if num_sinks < 0:
        raise ConfigError(f"num_sinks: expected at least 0, got {num_sinks}")
    _complete(
        kv_cache, rows, resident, stamp, slot_ids, page_ids, counters, layout.kind == "mid", layout.is_fp8, num_sinks,
        rounds,
    )  # fmt: skip


def keep(
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    host_table: torch.Tensor,
) -> None:
    """Write to host memory the blocks that `complete` took in for the same rows; in the background of the step.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        units: Host pool, `[num_host_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]`; written.
        layer: Index into the second dimension of `units`.
        rows: `int32[num_rows, len(Row)]`; rows with FINISHED_BLOCK -1 are skipped.
        resident: `int32[num_requests, num_kv_heads, budget]` of one layer, as `complete` left it.
        slot_ids: `int32[num_requests, budget]`: slot to engine block.
        host_table: `int32[num_requests, max_blocks]`: block index to host block.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    num_kv_heads, _, _ = check.cache("kv_cache", kv_cache)
    check.units(units, layer, kv_cache)
    device = kv_cache.device
    check.rows(rows, device)
    check.tensor("resident", resident, (None, num_kv_heads, None), device=device)
    num_requests, _, budget = resident.shape
    check.tensor("slot_ids", slot_ids, (num_requests, budget), device=device, rows_may_be_apart=True)
    check.tensor("host_table", host_table, (num_requests, None), device=device, rows_may_be_apart=True)
    _keep(kv_cache, units, layer, rows, resident, slot_ids, host_table)


def _complete_on_cpu(
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    counters: torch.Tensor,
    is_mid: bool,
    is_fp8: bool,
    num_sinks: int,
    rounds: bool,
) -> None:
    layout = library.layout_of(kv_cache, is_mid, is_fp8)
    reference.complete(
        kv_cache, rows, resident, stamp, slot_ids, page_ids, counters, layout, num_sinks, rounds=rounds
    )  # fmt: skip


def _complete_on_cuda(
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    counters: torch.Tensor,
    is_mid: bool,
    is_fp8: bool,
    num_sinks: int,
    rounds: bool,
) -> None:
    from oasiskv.kernels.complete import kernel

    layout = library.layout_of(kv_cache, is_mid, is_fp8)
    kernel.complete(kv_cache, rows, resident, stamp, slot_ids, page_ids, counters, layout, num_sinks, rounds=rounds)


def _keep_on_cuda(
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    host_table: torch.Tensor,
) -> None:
    from oasiskv.kernels.complete import kernel

    kernel.keep(kv_cache, units, layer, rows, resident, slot_ids, host_table)


_complete = library.register(
    "complete(Tensor(a!) kv_cache, Tensor rows, Tensor(b!) resident, Tensor(c!) stamp, Tensor slot_ids, "
    "Tensor page_ids, Tensor(d!) counters, bool is_mid, bool is_fp8, int num_sinks, bool rounds) -> ()",
    cpu=_complete_on_cpu,
    cuda=_complete_on_cuda,
)
_keep = library.register(
    "keep(Tensor kv_cache, Tensor(a!) units, int layer, Tensor rows, Tensor resident, Tensor slot_ids, "
    "Tensor host_table) -> ()",
    cpu=reference.keep,
    cuda=_keep_on_cuda,
)
