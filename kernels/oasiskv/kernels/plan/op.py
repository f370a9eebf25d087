"""Door of plan: checks its arguments and runs it. Its rows are what all other operations of a step read."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.plan import reference
from oasiskv.kernels.rows import Given


def plan(
    given: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_complete: torch.Tensor,
    page_ids: torch.Tensor,
    *,
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
    """Work out what every row of a batch is in this step, and what attention reads for it.

    The outputs are longer than the batch; the rows behind it become padding. Entries of `attended_table` behind a row's
    last attended block have no meaning.

    Args:
        given: `int32[len(Given), num_rows]`: what the host knows.
        query_start_loc: `int32[num_rows + 1]`: first token of each row.
        seq_lens: `int32[num_rows]`: tokens of the request when the step ends, drafts included.
        block_table: `int32[num_rows, max_blocks]`: positional.
        num_complete: In and out, `int32[num_slots]`: complete blocks of sparse requests; the last slot is nobody's.
        page_ids: In and out, `int32[num_slots, max_pages]`: the page of the newest complete block is named.
        slots: Out, `int32[max_rows]`: request slot; the last slot for padding.
        query_rows: Out, `int32[max_rows]`: token whose query looks ahead.
        drafter_rows: Out, `int32[max_rows]`: the same in the drafter's pass.
        rows: Out, `int32[max_rows, len(Row)]`; REQUEST is -1 for dense and padding rows.
        attended_table: Out, `int32[max_rows, >= budget + 2]`: a sparse row's slots, then its active blocks.
        attended_lens: Out, `int32[max_rows]`: tokens in those blocks, 0 for padding.
        budget: Resident slots.
        rows_per_page: Blocks summarized by one page.
        block_size: Tokens per block.
        step: Number of the step.
        cap: Most blocks that a KV head may fetch in it.

    Raises:
        ConfigError: An argument differs from the above; nothing is written.
    """
    device, count = seq_lens.device, len(seq_lens)
    max_rows = check.rows(rows, device)
    if max_rows < count:
        raise ConfigError(f"rows: expected at least {count}, got {max_rows}")
    check.tensor("given", given, (len(Given), count), device=device)
    check.tensor("query_start_loc", query_start_loc, (count + 1,), device=device)
    check.tensor("seq_lens", seq_lens, (count,))
    check.tensor("block_table", block_table, (count, None), device=device, rows_may_be_apart=True)
    check.tensor("num_complete", num_complete, (None,), device=device)
    check.tensor("page_ids", page_ids, (len(num_complete), None), device=device)
    for name, value in (("slots", slots), ("query_rows", query_rows), ("drafter_rows", drafter_rows)):
        check.tensor(name, value, (max_rows,), device=device)
    check.tensor("attended_table", attended_table, (max_rows, None), device=device)
    check.tensor("attended_lens", attended_lens, (max_rows,), device=device)
    if attended_table.shape[1] < max(budget + 2, block_table.shape[1]):
        raise ConfigError(
            f"attended_table: expected at least {max(budget + 2, block_table.shape[1])} columns, "
            f"got {attended_table.shape[1]}"
        )
    _plan(
        given,
        query_start_loc,
        seq_lens,
        block_table,
        num_complete,
        page_ids,
        slots,
        query_rows,
        drafter_rows,
        rows,
        attended_table,
        attended_lens,
        budget,
        rows_per_page,
        block_size,
        step,
        cap,
    )


def _on_cuda(
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
    from oasiskv.kernels.plan import kernel

    kernel.plan(
        given,
        query_start_loc,
        seq_lens,
        block_table,
        num_complete,
        page_ids,
        slots,
        query_rows,
        drafter_rows,
        rows,
        attended_table,
        attended_lens,
        budget,
        rows_per_page,
        block_size,
        step,
        cap,
    )


_plan = library.register(
    "plan(Tensor given, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor(a!) num_complete, "
    "Tensor(b!) page_ids, Tensor(c!) slots, Tensor(d!) query_rows, Tensor(e!) drafter_rows, Tensor(f!) rows, "
    "Tensor(g!) attended_table, Tensor(h!) attended_lens, "
    "int budget, int rows_per_page, int block_size, int step, int cap) -> ()",
    cpu=reference.plan,
    cuda=_on_cuda,
)
