"""What complete and keep mean, in plain torch, one row at a time."""

import torch

from oasiskv.kernels.fp8.reference import narrow, widen, write
from oasiskv.kernels.rows import FRESH, Counter, Row, SummaryLayout, stamp_of
from oasiskv.kernels.summarize.reference import summarize


def complete(
    kv_cache: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    slot_ids: torch.Tensor,
    page_ids: torch.Tensor,
    counters: torch.Tensor,
    layout: SummaryLayout,
    num_sinks: int,
    *,
    rounds: bool,
) -> None:
    """Take in finished blocks; see `op.complete`."""
    for row in rows.tolist():
        request, block, source = row[Row.REQUEST], row[Row.NUM_COMPLETE] - 1, row[Row.FINISHED_BLOCK]
        if request < 0 or source < 0:
            continue
        held, last = resident[request], stamp[request]  # [H, K]
        heads = torch.arange(held.shape[0], device=held.device)
        slot = torch.arange(held.shape[1], device=held.device)
        age = (last // 2).long() * held.shape[1] + slot
        victim = torch.where(held < num_sinks, torch.iinfo(torch.int64).max, age).argmin(-1)
        finished = kv_cache[source].clone()  # [H, B, 2D]
        if rounds:
            finished = widen(*narrow(finished), finished.dtype)
        kv_cache[slot_ids[request, victim].long(), heads] = finished
        counters[:, Counter.WASTED] += last[heads, victim] & FRESH
        counters[:, Counter.EVICTED] += 1
        held[heads, victim] = block
        last[heads, victim] = stamp_of(row[Row.STEP])
        # Last, since a new summary page may lie where the finished block lay.
        staged = finished[None]
        index = torch.zeros(1, dtype=torch.int32, device=kv_cache.device)
        summarize(staged, index, kv_cache, page_ids[request], block, layout)


def keep(
    kv_cache: torch.Tensor,
    units: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    host_table: torch.Tensor,
) -> None:
    """Write finished blocks to the host; see `op.keep`."""
    for row in rows.tolist():
        request, block = row[Row.REQUEST], row[Row.NUM_COMPLETE] - 1
        if request < 0 or row[Row.FINISHED_BLOCK] < 0:
            continue
        held = resident[request]  # [H, K]
        heads = torch.arange(held.shape[0], device=held.device)
        slot = (held == block).int().argmax(-1)
        host = host_table[request, block].to(units.device).long()
        write(units, layer, host[None], kv_cache[slot_ids[request, slot].long(), heads][None])
