"""What plan means, in plain torch over all rows at once."""

import torch

from oasiskv.kernels.rows import Given, Row


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
    """Plan a step; see `op.plan`."""
    count = len(seq_lens)
    slot, is_sparse = given[Given.SLOT], given[Given.IS_SPARSE] != 0
    index, last_token = slot.long(), query_start_loc[1:] - 1
    complete = (seq_lens - query_start_loc.diff()) // block_size

    newest = (complete - 1).clamp(min=0).long()
    finished = block_table.gather(1, newest[:, None])[:, 0]
    is_finished = is_sparse & (complete > num_complete[index])
    num_complete[index] = torch.where(is_sparse, complete, num_complete[index])
    # A page starts with the block that finishes now; naming it again in later steps changes nothing.
    page = newest // rows_per_page
    position = torch.maximum(budget + page, page * rows_per_page).clamp(max=block_table.shape[1] - 1)
    page_id = block_table.gather(1, position[:, None])[:, 0]
    page_ids[index, page] = torch.where(is_sparse, page_id, page_ids[index, page])

    columns = {
        Row.REQUEST: torch.where(is_sparse, slot, -1),
        Row.NUM_COMPLETE: complete,
        Row.STEP: torch.full_like(slot, step),
        Row.FINISHED_BLOCK: torch.where(is_finished, finished, -1),
        Row.CAP: torch.full_like(slot, cap),
    }
    slots[:count] = slot
    query_rows[:count] = last_token - given[Given.NUM_UNUSABLE]
    drafter_rows[:count] = last_token - given[Given.NUM_DRAFTS]
    rows[:count] = torch.stack([columns[column].int() for column in Row], 1)
    slots[count:] = len(num_complete) - 1
    rows[count:] = torch.tensor([-1, 0, step, -1, cap], dtype=torch.int32, device=rows.device)
    query_rows[count:] = 0
    drafter_rows[count:] = 0
    attended_lens[count:] = 0
    attend_to(rows[:count], seq_lens, block_table, attended_table[:count], attended_lens[:count], budget, block_size)


def attend_to(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    attended_table: torch.Tensor,
    attended_lens: torch.Tensor,
    budget: int,
    block_size: int,
) -> None:
    """Fill in what attention reads: every row's own blocks, then the working sets over those of sparse rows.

    Args:
        rows: `int32[num_rows, len(Row)]`.
        seq_lens: `int32[num_rows]`.
        block_table: `int32[num_rows, max_blocks]`.
        attended_table: Out, `int32[num_rows, >= budget + 2]`.
        attended_lens: Out, `int32[num_rows]`.
        budget: Resident slots.
        block_size: Tokens per block.
    """
    width = min(block_table.shape[1], attended_table.shape[1])
    is_sparse, complete = rows[:, Row.REQUEST, None] >= 0, rows[:, Row.NUM_COMPLETE]
    attended_table[:, :width] = block_table[:, :width]
    # Slots stand first in the positional table; the active blocks move up behind them.
    place = complete[:, None] + torch.arange(2, device=rows.device)
    active = block_table.gather(1, place.clamp(max=block_table.shape[1] - 1).long())
    active = torch.where(place * block_size < seq_lens[:, None], active, 0)
    behind = attended_table[:, budget : budget + 2]
    attended_table[:, budget : budget + 2] = torch.where(is_sparse, active, behind)
    attended_lens[:] = torch.where(is_sparse[:, 0], seq_lens + block_size * (budget - complete), seq_lens)
