"""How plan runs on a GPU: one program per row of the outputs."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.rows import Given, Row


@triton.jit(do_not_specialize=["count", "step", "cap"])
def _plan(
    given,
    query_start_loc,
    seq_lens,
    block_table,
    table_stride,
    num_complete,
    page_ids,
    pages_stride,
    slots,
    query_rows,
    drafter_rows,
    rows,
    attended_table,
    attended_stride,
    attended_lens,
    count,
    spare_slot,
    step,
    cap,
    BUDGET: tl.constexpr,
    PER_PAGE: tl.constexpr,
    B: tl.constexpr,
    SLOT: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    NUM_UNUSABLE: tl.constexpr,
    IS_SPARSE: tl.constexpr,
    REQUEST: tl.constexpr,
    NUM_COMPLETE: tl.constexpr,
    STEP: tl.constexpr,
    CAP: tl.constexpr,
    FINISHED_BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = rows + i * ROW
    tl.store(row + STEP, step)
    tl.store(row + CAP, cap)
    if i >= count:
        tl.store(slots + i, spare_slot)
        tl.store(query_rows + i, 0)
        tl.store(drafter_rows + i, 0)
        tl.store(attended_lens + i, 0)
        tl.store(row + REQUEST, -1)
        tl.store(row + NUM_COMPLETE, 0)
        tl.store(row + FINISHED_BLOCK, -1)
    else:
        slot = tl.load(given + SLOT * count + i)
        sparse = tl.load(given + IS_SPARSE * count + i) != 0
        first = tl.load(query_start_loc + i)
        end = tl.load(query_start_loc + i + 1)
        length = tl.load(seq_lens + i)
        complete = (length - (end - first)) // B
        table = block_table + i * table_stride
        attended = attended_table + i * attended_stride
        finished = -1
        if sparse:
            newest = tl.maximum(complete - 1, 0)
            before = tl.load(num_complete + slot)
            if complete > before:
                finished = tl.load(table + newest)
            tl.store(num_complete + slot, complete)
            page = newest // PER_PAGE
            place = tl.maximum(BUDGET + page, page * PER_PAGE)
            # int64: the pages of all requests may be many
            tl.store(page_ids + slot.to(tl.int64) * pages_stride + page, tl.load(table + place))
        tl.store(slots + i, slot)
        tl.store(query_rows + i, end - 1 - tl.load(given + NUM_UNUSABLE * count + i))
        tl.store(drafter_rows + i, end - 1 - tl.load(given + NUM_DRAFTS * count + i))
        tl.store(row + REQUEST, tl.where(sparse, slot, -1))
        tl.store(row + NUM_COMPLETE, complete)
        tl.store(row + FINISHED_BLOCK, finished)

        last = (length + B - 1) // B
        num_active = last - complete
        num_attended = tl.where(sparse, BUDGET + num_active, last)
        for start in range(0, num_attended, TILE):
            column = start + tl.arange(0, TILE)
            # [TILE]: slots stand first in the positional table, active blocks move up behind them
            source = tl.where(sparse & (column >= BUDGET), complete + column - BUDGET, column)
            mask = column < num_attended
            tl.store(attended + column, tl.load(table + source, mask=mask), mask=mask)
        tl.store(attended_lens + i, tl.where(sparse, length + B * (BUDGET - complete), length))


def plan(
    given: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_complete: torch.Tensor,
    page_ids: torch.Tensor,
    slots: torch.Tensor,
    query_rows: torch.Tensor,
    drafter_rows: torch.Tensor,
    rows: torch.Tensor,
    attended_table: torch.Tensor,
    attended_lens: torch.Tensor,
    budget: int,
    rows_per_page: int,
    block_size: int,
    step: int,
    cap: int,
) -> None:
    """Launch it on the current stream; see `op.plan`."""
    _plan[(len(rows),)](
        given,
        query_start_loc,
        seq_lens,
        block_table,
        block_table.stride(0),
        num_complete,
        page_ids,
        page_ids.stride(0),
        slots,
        query_rows,
        drafter_rows,
        rows,
        attended_table,
        attended_table.stride(0),
        attended_lens,
        len(seq_lens),
        len(num_complete) - 1,
        step,
        cap,
        BUDGET=budget,
        PER_PAGE=rows_per_page,
        B=block_size,
        SLOT=Given.SLOT,
        NUM_DRAFTS=Given.NUM_DRAFTS,
        NUM_UNUSABLE=Given.NUM_UNUSABLE,
        IS_SPARSE=Given.IS_SPARSE,
        REQUEST=Row.REQUEST,
        NUM_COMPLETE=Row.NUM_COMPLETE,
        STEP=Row.STEP,
        CAP=Row.CAP,
        FINISHED_BLOCK=Row.FINISHED_BLOCK,
        ROW=len(Row),
        TILE=256,
        num_warps=4,
    )
