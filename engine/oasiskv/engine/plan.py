"""What all layers of a step share, in tensors that stay in place, so that a captured graph reads each step's values."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.upload import upload
from oasiskv.kernels.plan import plan
from oasiskv.kernels.plan.reference import attend_to
from oasiskv.kernels.rows import Given, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows that one forward pass computes, as the engine lays them out.

    Attributes:
        request_ids: One per row.
        query_start_loc: `int32[num_rows + 1]`, on the device: first token of each row.
        seq_lens: `int32[num_rows]`, on the device: tokens of the request when the step ends, the draft token included.
        block_table: `int32[num_rows, max_blocks]`, on the device: positional, entry i for block i.
        num_drafts: Draft tokens at the end of each row.
        has_usable_draft: Whether the row's last token is a real draft, not a placeholder.
    """

    request_ids: Sequence[str]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_drafts: Sequence[int]
    has_usable_draft: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Views of a step's rows, one per batch row, padding rows included.

    Attributes:
        num_sparse: Sparse rows among them.
        num_rows: Rows with a request behind them.
        budget_blocks: Slots at the start of a sparse row's block table.
        slots: `int32[n]`: request slot of each row; the spare slot for padding rows.
        rows: `int32[n, len(Row)]`: sparse rows; REQUEST is -1 for dense and padding rows.
        query_rows: `int32[n]`: token whose query looks ahead.
        drafter_rows: `int32[n]`: the same in the drafter's pass.
        block_table: `int32[n, max_blocks]`: what attention reads; a sparse row lists its slots, then its active blocks.
        seq_lens: `int32[n]`: tokens in those blocks; the row's queries are the last of them.
    """

    num_sparse: int
    num_rows: int
    budget_blocks: int
    slots: torch.Tensor
    rows: torch.Tensor
    query_rows: torch.Tensor
    drafter_rows: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


class StepPlanner:
    """Owner of the step's tensors.

    Args:
        config: The backend's settings.
        shape: This process's KV cache.
        sets: The working sets; their count of complete blocks and their pages grow with the plans.
        max_requests: Most rows of a batch.
    """

    def __init__(self, config: LookaheadConfig, shape: CacheShape, sets: WorkingSets, max_requests: int) -> None:
        """Allocate everything that does not grow with the length of requests."""
        self._budget = config.budget_blocks
        self._uses_drafts = config.prediction not in ("previous", "on-demand")
        self._block_size = shape.block_size
        self._sets = sets
        self._device = sets.resident.device

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        self._slots, self._query_rows, self._drafter_rows = ints(max_requests), ints(max_requests), ints(max_requests)
        self._rows = ints(max_requests, len(Row))
        self._block_table, self._seq_lens = sets.attended_table[:max_requests], ints(max_requests)
        self._given = ints(len(Given), max_requests)
        self._blank(0)

    def blank(self, seq_lens: torch.Tensor) -> StepPlan:
        """Return the plan of a pass without requests behind its rows, as in warm-up and capture.

        Args:
            seq_lens: `int32[n]` that attention shall see; every block is the null block.
        """
        self._blank(0)
        count = len(seq_lens)
        self._seq_lens[:count] = seq_lens
        return self._view(count, 0, 0)

    def plan_step(
        self,
        batch: Batch,
        slots: Sequence[int],
        sparse: Sequence[bool],
        is_drafted: Sequence[bool],
        step: int,
        cap: int,
    ) -> StepPlan:
        """Plan a step.

        Args:
            batch: The rows.
            slots: Request slot of each row.
            sparse: Whether each row's request is sparse.
            is_drafted: What `looks_ahead_with` said.
            step: Number of the step.
            cap: Most blocks that a KV head may fetch in it.
        """
        count, sets = len(slots), self._sets
        unusable = [0 if ok else n for n, ok in zip(batch.num_drafts, is_drafted, strict=True)]
        given = {
            Given.SLOT: list(slots),
            Given.NUM_DRAFTS: list(batch.num_drafts),
            Given.NUM_UNUSABLE: unusable,
            Given.IS_SPARSE: [int(flag) for flag in sparse],
        }
        self._given = upload([given[row] for row in Given], self._device)
        plan(
            self._given,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table[:, : self._block_table.shape[1]],
            sets.num_complete,
            sets.page_ids,
            slots=self._slots,
            query_rows=self._query_rows,
            drafter_rows=self._drafter_rows,
            rows=self._rows,
            attended_table=self._block_table,
            attended_lens=self._seq_lens,
            budget=self._budget,
            rows_per_page=sets.layout.rows_per_page,
            block_size=self._block_size,
            step=step,
            cap=cap,
        )
        return self._view(count, count, sum(sparse))

    def looks_ahead_with(self, batch: Batch, first: Set[str]) -> list[bool]:
        """Say of each row whether its draft token's query chooses; the normal token's own does in the others.

        Args:
            batch: The rows.
            first: Requests in their first sparse step, which may follow a handover and then has no draft: they choose
                by their own query everywhere, so that both ways give the same tokens.
        """
        usable = zip(batch.request_ids, batch.has_usable_draft, strict=True)
        return [self._uses_drafts and is_usable and request_id not in first for request_id, is_usable in usable]

    def padded(self, running: StepPlan, count: int) -> StepPlan:
        """Return the plan with padding rows behind its own, `count` in all."""
        return self._view(count, running.num_rows, running.num_sparse)

    def plan_drafting(
        self, running: StepPlan, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> StepPlan:
        """Plan the drafter's pass over the rows of a step, where it lays its tokens out anew.

        Its lookahead query is that of the last token that is no rejected draft.

        Args:
            running: The step's plan; its attention is over.
            query_start_loc: As in `Batch`, of the drafter's pass.
            seq_lens: As in `Batch`; the drafter may see more tokens than the target.
            block_table: As in `Batch`.
        """
        count = running.num_rows
        self._drafter_rows[:count] = query_start_loc[1:] - 1 - self._given[Given.NUM_DRAFTS]
        attend_to(
            self._rows[:count],
            seq_lens,
            block_table,
            self._block_table[:count],
            self._seq_lens[:count],
            self._budget,
            self._block_size,
        )
        return self._view(count, count, running.num_sparse)

    def _blank(self, first: int) -> None:
        """Turn the rows from `first` on into padding."""
        self._slots[first:] = len(self._sets.num_complete) - 1
        self._rows[first:, Row.REQUEST] = -1
        self._rows[first:, Row.FINISHED_BLOCK] = -1
        for tensor in (self._query_rows, self._drafter_rows, self._seq_lens, self._block_table):
            tensor[first:] = 0

    def _view(self, count: int, num_rows: int, num_sparse: int) -> StepPlan:
        return StepPlan(
            num_sparse=num_sparse,
            num_rows=num_rows,
            budget_blocks=self._budget,
            slots=self._slots[:count],
            rows=self._rows[:count],
            query_rows=self._query_rows[:count],
            drafter_rows=self._drafter_rows[:count],
            block_table=self._block_table[:count],
            seq_lens=self._seq_lens[:count],
        )
