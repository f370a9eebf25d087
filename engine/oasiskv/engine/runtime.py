"""The backend inside one worker: carries out the scheduler's orders and runs every layer's part of a step.

The engine calls, in this order: `apply(commands)`, `begin_step(batch)`, then per layer `before_write`, `publish`,
`after_attention`; the attention between them reads the `StepPlan`. What the background does is in `_background`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import CorruptBlockError
from oasiskv.engine.counters import RuntimeCounters
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.pipeline import Pipeline, Stage
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.switch import switch_layer
from oasiskv.kernels.complete import complete
from oasiskv.kernels.predict import predict
from oasiskv.kernels.rows import Row, stamp_of
from oasiskv.kernels.select import select
from oasiskv.kernels.transfer import store, transfer


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
class AttentionRows:
    """What attention reads: each row's blocks in order and how many tokens of them count.

    Attributes:
        block_table: `int32[num_rows, width]`; a sparse row lists its slots, then its active blocks.
        seq_lens: `int32[num_rows]`: tokens in those blocks; the row's queries are the last of them.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything the layers of one step share.

    Attributes:
        slots: `int64[num_rows]`: request slot of each row.
        sparse: Indices of the sparse rows.
        num_complete: `int32[num_rows]`: complete blocks of each row.
        rows: `int32[len(sparse), len(Row)]`.
        query_rows: `int64[num_rows]`: token whose query looks ahead.
        num_drafts: `int32[num_rows]`.
        attention: The target layers' view.
    """

    slots: torch.Tensor
    sparse: list[int]
    num_complete: torch.Tensor
    rows: torch.Tensor
    query_rows: torch.Tensor
    num_drafts: torch.Tensor
    attention: AttentionRows


class Runtime:
    """Owner of the working sets of one worker process.

    Args:
        config: The backend's settings.
        shape: This process's KV cache.
        sets: The device state, allocated before so that the engine's memory profile sees it.
        kv_caches: One tensor per layer, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`, contiguous.
        pool: Host memory for units.
        pipeline: Runs the background.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        sets: WorkingSets,
        kv_caches: Sequence[torch.Tensor],
        pool: HostPool,
        pipeline: Pipeline,
    ) -> None:
        """Take over state, caches and pool."""
        self.config = config
        self.shape = shape
        self.sets = sets
        self.counters = RuntimeCounters(shape.num_layers)
        self._kv_caches = list(kv_caches)
        self._pool = pool
        self._pipeline = pipeline
        # The device counters as of each layer's last finished background: what may be read while the next one runs.
        self._settled_counters = torch.zeros_like(sets.counters)
        self._device = sets.resident.device
        self._slot_of: dict[str, int] = {}
        self._free_slots = list(range(len(sets.cap) - 1, -1, -1))
        self._num_host_blocks: dict[str, int] = {}
        self._sparse: set[str] = set()
        self._commands = StepCommands()
        self._step = 0
        self._plan: StepPlan | None = None
        self._drafter_queries: torch.Tensor | None = None

    @property
    def plan(self) -> StepPlan | None:
        """The running step; None outside of one, as in warm-up and profiling."""
        return self._plan

    def apply(self, commands: StepCommands) -> None:
        """Take the scheduler's orders for the next step and end the one before.

        Waits for the whole background if requests left: their blocks may now belong to others.
        """
        self._plan = None
        if commands.released:
            self.fence()
        for request_id in commands.released:
            self._sparse.discard(request_id)
            self._num_host_blocks.pop(request_id, None)
            if (slot := self._slot_of.pop(request_id, None)) is not None:
                self._free_slots.append(slot)
        for request_id, host_ids in commands.host_blocks.items():
            slot, first = self._slot(request_id), self._num_host_blocks.get(request_id, 0)
            end = first + len(host_ids)
            self.sets.host_table[slot, first:end] = torch.tensor(host_ids, dtype=torch.int32, device=self._device)
            self._num_host_blocks[request_id] = end
        self._commands = commands

    def begin_step(self, batch: Batch) -> StepPlan:
        """Write finished blocks through, switch requests to sparse, and plan the step."""
        self._step += 1
        slots = [self._slot(request_id) for request_id in batch.request_ids]
        row_of = {request_id: row for row, request_id in enumerate(batch.request_ids)}
        commands, self._commands = self._commands, StepCommands()
        for request_id, (first, end) in commands.store.items():
            self._store(slots[row_of[request_id]], batch.block_table[row_of[request_id]], first, end)
        for request_id, num_complete in commands.switch.items():
            self._switch(slots[row_of[request_id]], batch.block_table[row_of[request_id]], num_complete)
            self._sparse.add(request_id)
        self._plan = self._make_plan(batch, slots)
        self._drafter_queries = batch.query_start_loc[1:].long() - 1 - self._plan.num_drafts
        return self._plan

    def begin_drafting(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> AttentionRows:
        """Start the drafter's pass over the rows of the running step.

        Its lookahead query is that of the last token that is no rejected draft.

        Args:
            query_start_loc: As in `Batch`, of the drafter's pass.
            seq_lens: As in `Batch`; the drafter may see more tokens than the target.
            block_table: As in `Batch`.

        Returns:
            What the drafter's attention reads.
        """
        plan = self._plan
        assert plan is not None
        self._drafter_queries = query_start_loc[1:].long() - 1 - plan.num_drafts
        return self._attention_rows(seq_lens, block_table, plan.sparse, plan.num_complete)

    def _attention_rows(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, sparse_rows: list[int], num_complete: torch.Tensor
    ) -> AttentionRows:
        if not sparse_rows:
            return AttentionRows(block_table=block_table, seq_lens=seq_lens)
        budget, block_size = self.config.budget_blocks, self.shape.block_size
        sparse = torch.tensor(sparse_rows, device=self._device)
        width = budget + 2
        column = torch.arange(width, device=self._device)
        active = num_complete[sparse, None]
        last = (seq_lens[sparse, None] + block_size - 1) // block_size
        source = torch.where(column < budget, column, active + column - budget)
        source = torch.where(source < last, source, 0).long()
        compact = block_table[sparse].gather(1, source)
        lens = seq_lens.clone()
        lens[sparse] = budget * block_size + seq_lens[sparse] - block_size * num_complete[sparse]
        is_all_sparse = len(sparse_rows) == len(seq_lens)
        table = block_table[:, :width].clone() if is_all_sparse else block_table.clone()
        if table.shape[1] < width:
            table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        table[sparse, :width] = compact
        return AttentionRows(block_table=table, seq_lens=lens)

    def before_write(self, layer: int) -> None:
        """Wait for the layer's transfer of the step before, then take in blocks that became final."""
        plan = self._plan
        assert plan is not None
        started = time.perf_counter()
        if self._pipeline.wait(layer):
            self.counters.add_late(
                layer, int((self.sets.plan[layer, ..., 0] >= 0).sum()), time.perf_counter() - started
            )
        sets = self.sets
        self._settled_counters[layer] = sets.counters[layer]
        if plan.sparse:
            complete(
                self._kv_caches[layer],
                self._pool.units,
                layer,
                plan.rows,
                sets.resident[layer],
                sets.stamp[layer],
                sets.slot_ids,
                sets.page_ids,
                sets.host_table,
                sets.counters[layer],
                layout=sets.summaries,
                num_sinks=self.config.sink_blocks,
            )
            if self.config.debug_verify:
                self._verify(layer, plan)

    def publish(self, layer: int, query: torch.Tensor) -> None:
        """Copy the layer's lookahead queries to where the background and a later switch read them.

        Args:
            layer: The layer.
            query: `[num_tokens, num_query_heads, head_dim]` of this pass, after the rotary embedding.
        """
        plan = self._plan
        assert plan is not None
        rows = plan.query_rows
        if layer >= self.shape.num_target_layers:
            assert self._drafter_queries is not None
            rows = self._drafter_queries
        self.sets.query[layer, plan.slots] = query[rows]

    def after_attention(self, layer: int) -> None:
        """Hand the layer to the background."""
        plan = self._plan
        assert plan is not None
        if plan.sparse:
            self._pipeline.submit(layer, self._background(layer, plan.rows))

    def fence(self) -> None:
        """Wait for the whole background."""
        self._pipeline.fence()
        self._settled_counters.copy_(self.sets.counters)

    def counts(self) -> dict[str, float]:
        """Return everything counted since the start, in which predicted = hit + fetched + deferred always holds."""
        return self.counters.snapshot(self._settled_counters, self.shape)

    def close(self) -> None:
        """Finish the background and give the host memory back."""
        self._pipeline.close()
        self._pool.close()

    def check_invariants(self) -> None:
        """Check residency and bytes of every sparse request with no step in flight.

        Raises:
            CorruptBlockError: a working set names a block twice or one that is not complete, or differs from the host.
        """
        self.fence()
        slots = sorted(self._slot_of[request_id] for request_id in self._sparse)
        for layer in range(self.shape.num_layers):
            for slot in slots:
                self._check_working_set(layer, slot)

    def _slot(self, request_id: str) -> int:
        if (slot := self._slot_of.get(request_id)) is None:
            slot = self._slot_of[request_id] = self._free_slots.pop()
            self.sets.clear(slot)
        return slot

    def _store(self, slot: int, table: torch.Tensor, first: int, end: int) -> None:
        host_ids = self.sets.host_table[slot, first:end]
        for layer, kv_cache in enumerate(self._kv_caches):
            store(kv_cache, table[first:end], self._pool.units, layer, host_ids)
        self.counters.stored_blocks += end - first

    def _switch(self, slot: int, table: torch.Tensor, num_complete: int) -> None:
        sets, budget = self.sets, self.config.budget_blocks
        positions = torch.tensor(sets.layout.page_positions(num_complete), device=self._device)
        sets.slot_ids[slot] = table[:budget]
        sets.page_ids[slot, : len(positions)] = table[positions]
        sets.num_complete[slot] = num_complete
        for layer, kv_cache in enumerate(self._kv_caches):
            switch_layer(
                kv_cache,
                table[:num_complete],
                sets.page_ids[slot, : len(positions)],
                sets.query[layer, slot],
                sets.switch_pages,
                sets.resident[layer, slot],
                layout=sets.summaries,
                config=self.config,
                scale=self.shape.scale,
            )
            sets.stamp[layer, slot] = stamp_of(self._step)
        self.counters.switches += 1

    def _make_plan(self, batch: Batch, slots: list[int]) -> StepPlan:
        sets, block_size, layout = self.sets, self.shape.block_size, self.sets.layout
        sparse = [row for row, request_id in enumerate(batch.request_ids) if request_id in self._sparse]
        query_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        num_complete = (batch.seq_lens - query_lens) // block_size
        slot_tensor = torch.tensor(slots, dtype=torch.int64, device=self._device)
        num_drafts = torch.tensor(batch.num_drafts, dtype=torch.int32, device=self._device)
        skipped = [
            0 if usable else drafts for drafts, usable in zip(batch.num_drafts, batch.has_usable_draft, strict=True)
        ]
        query_rows = batch.query_start_loc[1:].long() - 1 - torch.tensor(skipped, device=self._device)

        index = torch.tensor(sparse, dtype=torch.int64, device=self._device)
        slot, complete_now, table = slot_tensor[index], num_complete[index], batch.block_table[index]
        finished = table.gather(1, (complete_now - 1).clamp(min=0).long()[:, None])[:, 0]
        is_finished = complete_now > sets.num_complete[slot]
        sets.num_complete[slot] = complete_now
        # A page starts with the block that finishes now; naming it again in later steps changes nothing.
        page = (complete_now - 1).clamp(min=0).long() // layout.rows_per_page
        position = torch.maximum(layout.budget_blocks + page, page * layout.rows_per_page)
        sets.page_ids[slot, page] = table.gather(1, position[:, None])[:, 0]
        columns = {
            Row.REQUEST: slot.int(),
            Row.NUM_COMPLETE: complete_now.int(),
            Row.STEP: torch.full_like(complete_now, self._step),
            Row.FINISHED_BLOCK: torch.where(is_finished, finished, -1),
        }
        self.counters.add_sources(sum(batch.has_usable_draft[row] for row in sparse), len(sparse))
        return StepPlan(
            slots=slot_tensor,
            sparse=sparse,
            num_complete=num_complete,
            rows=torch.stack([columns[column].int() for column in Row], 1),
            query_rows=query_rows,
            num_drafts=num_drafts,
            attention=self._attention_rows(batch.seq_lens, batch.block_table, sparse, num_complete),
        )

    def _background(self, layer: int, rows: torch.Tensor) -> list[Stage]:
        sets, config, kv_cache = self.sets, self.config, self._kv_caches[layer]
        shape = (len(rows), self.shape.num_kv_heads, config.budget_blocks)
        blocks = torch.empty(shape, dtype=torch.int32, device=self._device)
        scores = torch.empty(shape, dtype=torch.float32, device=self._device)
        plan = sets.plan[layer]
        plan.fill_(-1)

        @torch.inference_mode()
        def run_predict() -> None:
            predict(
                sets.query[layer],
                rows,
                kv_cache,
                sets.page_ids,
                blocks,
                scores,
                layout=sets.summaries,
                alpha=config.score_alpha,
                reduction=config.group_reduction,
                scale=self.shape.scale,
                num_sinks=config.sink_blocks,
            )

        @torch.inference_mode()
        def run_select() -> None:
            select(
                blocks,
                scores,
                rows,
                sets.cap,
                sets.resident[layer],
                sets.stamp[layer],
                plan[: len(rows)],
                sets.counters[layer],
            )
            if config.debug_poison:
                self._poison(layer, rows)

        @torch.inference_mode()
        def run_transfer() -> None:
            transfer(self._pool.units, layer, kv_cache, plan[: len(rows)], rows, sets.host_table, sets.slot_ids)

        return [run_predict, run_select, run_transfer]

    def _poison(self, layer: int, rows: torch.Tensor) -> None:
        """Make an early reader of a slot stand out: K 0 and V huge, but finite, pass every softmax."""
        row, head, entry = torch.nonzero(self.sets.plan[layer, : len(rows), ..., 0] >= 0, as_tuple=True)
        slot = self.sets.plan[layer, row, head, entry, 1].long()
        block = self.sets.slot_ids[rows[row, Row.REQUEST].long(), slot].long()
        head_dim = self.shape.head_dim
        self._kv_caches[layer][block, head, :, :head_dim] = 0
        self._kv_caches[layer][block, head, :, head_dim:] = 1e4

    def _verify(self, layer: int, plan: StepPlan) -> None:
        for slot in plan.slots[plan.sparse].tolist():
            self._check_working_set(layer, slot)

    def _check_working_set(self, layer: int, slot: int) -> None:
        sets = self.sets
        resident, num_complete = sets.resident[layer, slot], int(sets.num_complete[slot])
        where = f"layer {layer}, request slot {slot}"
        for head, blocks in enumerate(resident.tolist()):
            if len(set(blocks)) != len(blocks):
                raise CorruptBlockError(f"resident: expected each block once, got {blocks} ({where}, head {head})")
            if min(blocks) < 0 or max(blocks) >= num_complete:
                raise CorruptBlockError(
                    f"resident: expected blocks below {num_complete}, got {blocks} ({where}, head {head})"
                )
            if not set(range(self.config.sink_blocks)) <= set(blocks):
                raise CorruptBlockError(f"resident: expected the sink blocks, got {blocks} ({where}, head {head})")
        heads = torch.arange(resident.shape[0], device=self._device)[:, None]
        held = self._kv_caches[layer][sets.slot_ids[slot].long()[None], heads].cpu()
        host = self._pool.units[sets.host_table[slot][resident.long()].long().cpu(), layer, heads.cpu()]
        if not torch.equal(held.view(torch.uint8), host.view(torch.uint8)):
            bad = (held != host).flatten(2).any(-1).nonzero().tolist()
            raise CorruptBlockError(f"resident: bytes differ from host memory at (head, slot) {bad[:8]} ({where})")
