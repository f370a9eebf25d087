"""The backend inside one worker: carries out the scheduler's orders and runs every layer's part of a step.

The engine calls, in this order: `apply(commands)`, `begin_step(batch)`, then per layer `before_write`, `publish`,
`after_attention`; the attention between them reads the `StepPlan`. What the background does is in `_background`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

import torch

from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine.caps import Caps
from oasiskv.engine.checks import check_working_set, poison
from oasiskv.engine.counters import RuntimeCounters
from oasiskv.engine.handovers import Handovers
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.inbox import Loading
from oasiskv.engine.pipeline import Pipeline, Stage
from oasiskv.engine.plan import Batch, StepPlan, StepPlanner
from oasiskv.engine.settled import SettledCounters
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.switch import switch_request
from oasiskv.engine.upload import upload
from oasiskv.kernels.complete import complete, keep
from oasiskv.kernels.predict import predict
from oasiskv.kernels.publish import publish
from oasiskv.kernels.rows import Row, stamp_of
from oasiskv.kernels.select import select
from oasiskv.kernels.transfer import store, transfer

logger = logging.getLogger(__name__)

COUNTER_STEPS = 16
"""Steps between two copies of the device counters on a GPU."""


class Runtime(Handovers):
    """Owner of the working sets of one worker process.

    Args:
        config: The backend's settings.
        shape: This process's KV cache.
        sets: The device state, allocated before so that the engine's memory profile sees it.
        kv_caches: One tensor per layer, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`, contiguous.
        pool: Host memory for units.
        pipeline: Runs the background.
        executor: Runs what handovers of a device do beside the steps; None for threads.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        sets: WorkingSets,
        kv_caches: Sequence[torch.Tensor],
        pool: HostPool,
        pipeline: Pipeline,
        executor: Executor | None = None,
    ) -> None:
        """Take over state, caches and pool."""
        self.config = config
        self.shape = shape
        self.sets = sets
        self.counters = RuntimeCounters(shape.num_layers)
        self._kv_caches = list(kv_caches)
        self._pool = pool
        self._pipeline = pipeline
        self._device = sets.resident.device
        self._settled = SettledCounters(sets, shape, pipeline, self.counters)
        self.caps = Caps(config)
        self._counts: dict[str, float] = {}
        self._slot_of: dict[str, int] = {}
        # The last slot is the padding rows'.
        num_slots = len(sets.num_complete) - 1
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._planner = StepPlanner(config, shape, sets, num_slots)
        self._num_host_blocks: dict[str, int] = {}
        self._num_loaded: dict[str, int] = {}
        self._sparse: set[str] = set()
        self._commands = StepCommands()
        self._step = 0
        # Rows of each layer's last background; behind them its plan is that of an earlier step.
        self._num_submitted = [0] * shape.num_layers
        self._plan: StepPlan | None = None
        self._has_drafted = False
        self._init_handovers(executor)

    @property
    def plan(self) -> StepPlan | None:
        """The running step; None outside of one, as in warm-up and profiling."""
        return self._plan

    def apply(self, commands: StepCommands) -> None:
        """Take the scheduler's orders for the next step and end the one before.

        Waits for the whole background if requests left: their blocks may now belong to others.
        """
        self._plan = None
        self.inbox.note_step(self._step + 1)
        # Host blocks that are taken back may belong to others too.
        takes_back = any(kept is not None for kept, _ in commands.room.values())
        if commands.released or takes_back or (self.asks and (commands.admit or commands.load)):
            self.fence()
        if takes_back:
            self.inbox.quiesce()
        for request_id in commands.released:
            self._sparse.discard(request_id)
            self._arrived.discard(request_id)
            self._num_host_blocks.pop(request_id, None)
            self._num_loaded.pop(request_id, None)
            self.outbox.close(request_id)
            if (slot := self._slot_of.pop(request_id, None)) is not None:
                if self.inbox.is_arriving(slot):
                    self.inbox.cancel(slot)
                else:
                    self._free(slot)
        for request_id, admission in commands.admit.items():
            slot = self._slot(request_id)
            self._num_host_blocks[request_id] = self.inbox.admit(request_id, slot, admission)
        for request_id, (num_kept, host_ids) in commands.room.items():
            if (slot := self._slot_of.get(request_id)) is not None:
                self.inbox.fetched.resize(slot, num_kept, host_ids)
        for request_id, prefix in commands.load.items():
            slot = self._slot(request_id)
            self.inbox.open_loading(Loading(request_id=request_id, slot=slot, prefix=prefix))
            self._num_loaded[request_id] = prefix.num_blocks
        for request_id in commands.admit | commands.load:
            self.inbox.start(self._staged, self._slot_of[request_id])
        if commands.host_blocks:
            self._add_host_blocks(commands.host_blocks)
        # Anybody's request may name a lease; without staging, nobody would ever take what is noted for it.
        stage = commands.stage if self._staged.is_attached else {}
        for request_id, lease in stage.items():
            self.outbox.open(request_id, lease, self._num_loaded.get(request_id, 0))
        self._commands = commands

    def begin_step(self, batch: Batch) -> StepPlan:
        """Write finished blocks through, switch requests to sparse, and plan the step."""
        self._step += 1
        self._pipeline.end_pass()
        if not self._settled.is_on_host and (self._step % COUNTER_STEPS == 0 or self.caps.is_due(self._step)):
            self._settled.settle(self._step - 1)
        slots = [self._slot(request_id) for request_id in batch.request_ids]
        row_of = {request_id: row for row, request_id in enumerate(batch.request_ids)}
        commands, self._commands = self._commands, StepCommands()
        for request_id, (first, end) in commands.store.items():
            slot = slots[row_of[request_id]]
            self._store(slot, batch.block_table[row_of[request_id]], first, end)
            if self.outbox.has(request_id):
                self.outbox.store(self._staged, request_id, slot, batch.block_table[row_of[request_id]], first, end)
        for request_id, num_complete in commands.switch.items():
            slot, table = slots[row_of[request_id]], batch.block_table[row_of[request_id]]
            self._switch(slot, table, num_complete)
            self._sparse.add(request_id)
            if self.outbox.has(request_id):
                num_pages = self.sets.layout.num_pages(num_complete)
                layout = HandoverLayout(num_complete=num_complete, num_pages=num_pages, has_active=True)
                self.outbox.export(self._staged, request_id, slot, table, layout)
        self.outbox.stream(commands.stream, {name: batch.block_table[row_of[name]] for name in commands.stream})
        arrived = self._arrived & row_of.keys()
        for request_id in arrived:
            self.sets.stamp[:, slots[row_of[request_id]]] = stamp_of(self._step)
        self._arrived -= arrived
        sparse = [request_id in self._sparse for request_id in batch.request_ids]
        is_drafted = self._planner.looks_ahead_with(batch, arrived | commands.switch.keys())
        drafted = sum(usable and flag for usable, flag in zip(is_drafted, sparse, strict=True))
        self.counters.add_sources(drafted, sum(sparse))
        self._measure()
        cap = self.caps.begin_step(self._step, sum(sparse))
        self.counters.allowed_blocks += cap * sum(sparse)
        self._plan = self._planner.plan_step(batch, slots, sparse, is_drafted, self._step, cap)
        self._has_drafted = False
        return self._plan

    def begin_blank(self, seq_lens: torch.Tensor) -> StepPlan:
        """Plan a pass without requests behind its rows, where the layers' work does nothing: warm-up and capture.

        Args:
            seq_lens: `int32[n]` that attention shall see.
        """
        self._pipeline.end_pass()
        self._plan = self._planner.blank(seq_lens)
        self._pipeline.begin_pass(len(seq_lens))
        return self._plan

    def pad(self, num_rows: int) -> StepPlan:
        """Let the running step have padding rows, as a captured graph has."""
        assert self._plan is not None
        self._plan = self._planner.padded(self._plan, num_rows)
        self._pipeline.begin_pass(num_rows)
        return self._plan

    def begin_replay(self) -> None:
        """Note that a graph of the pass is captured or replayed next."""
        self._pipeline.begin_replay()

    def capture(self) -> None:
        """Note that the engine has captured its graphs."""
        self._pipeline.capture()

    def check(self) -> None:
        """Check that the background did its work so far; asks nothing of the device.

        Raises:
            TransferTimeoutError: a wait on the device was given up, so that what was computed since is not to be used.
        """
        self._pipeline.check()
        self.inbox.check()

    def begin_drafting(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> StepPlan:
        """Start the drafter's pass over the rows of the running step; see `StepPlanner.plan_drafting`."""
        assert self._plan is not None
        self._has_drafted = True
        self._plan = self._planner.plan_drafting(self._plan, query_start_loc, seq_lens, block_table)
        return self._plan

    def pass_drafter_by(self, layer: int, query: torch.Tensor) -> None:
        """Note that the running step, in which no row is sparse, has no pass of the drafter but for K, V and queries.

        Args:
            layer: The drafter's.
            query: As in `publish`.
        """
        self._pipeline.end_pass()
        self._pipeline.wait(layer)
        self.publish(layer, query)
        self.counters.undrafted_steps += 1

    def make_up_drafting(self) -> bool:
        """Say whether the running step, now at its end, had no drafter's pass, and make up for it if so.

        A block that ended in the step is complete in every layer all the same: else the drafter would later be given
        what the block's places held before.
        """
        drafter_layers = range(self.shape.num_target_layers, self.shape.num_layers)
        if not drafter_layers or self._plan is None or self._plan.num_rows == 0 or self._has_drafted:
            return False
        for layer in drafter_layers:
            self.before_write(layer)
            self._keep(layer, self._plan.rows)
        self._has_drafted = True
        return True

    def before_write(self, layer: int) -> None:
        """Wait for the layer's transfer of the step before, then take in blocks that became final."""
        plan = self._plan
        assert plan is not None
        started = time.perf_counter()
        if self._pipeline.wait(layer):
            fetched = self.sets.plan[layer, : self._num_submitted[layer], ..., 0] >= 0
            self.counters.add_late(layer, int(fetched.sum()), time.perf_counter() - started)
        sets = self.sets
        self._settled.note(layer)
        if self._has_work(plan):
            if self.config.debug_verify:
                self._verify(layer, plan)
            complete(
                self._kv_caches[layer],
                plan.rows,
                sets.resident[layer],
                sets.stamp[layer],
                sets.slot_ids,
                sets.page_ids,
                sets.counters[layer],
                layout=sets.summaries,
                num_sinks=self.config.sink_blocks,
                rounds=self._pool.config.is_fp8,
            )

    def publish(self, layer: int, query: torch.Tensor) -> None:
        """Copy the layer's lookahead queries to where the background and a later switch read them.

        Args:
            layer: The layer.
            query: `[num_tokens, num_query_heads, head_dim]` of this pass, after the rotary embedding.
        """
        plan, sets = self._plan, self.sets
        assert plan is not None
        query_rows = plan.drafter_rows if layer >= self.shape.num_target_layers else plan.query_rows
        publish(query, query_rows, plan.slots, plan.rows, sets.query[layer], sets.rows[layer])
        if self.config.prediction == "on-demand" and self._has_work(plan):
            self._fetch_now(layer, len(plan.rows))

    def _fetch_now(self, layer: int, num_rows: int) -> None:
        """Choose and fetch what the layer attends to next, in the order of the foreground, which waits for it."""
        started = time.perf_counter()
        for stage in self._background(layer, num_rows):
            stage()
        if self._settled.is_on_host:
            fetched = self.sets.plan[layer, :num_rows, ..., 0] >= 0
            self.counters.add_late(layer, int(fetched.sum()), time.perf_counter() - started)

    def after_attention(self, layer: int) -> None:
        """Hand the layer to the background, unless it has had its turn, and its part of a prompt to staging."""
        plan = self._plan
        assert plan is not None
        self.outbox.put_layer(self._staged, layer)
        if self._has_work(plan) and self.config.prediction != "on-demand":
            self._num_submitted[layer] = len(plan.rows)
            self._pipeline.submit(layer, self._background(layer, len(plan.rows)))

    def end_pass(self) -> None:
        """Note that a forward pass is over, the target's or the drafter's."""
        self._pipeline.end_pass()

    def fence(self) -> None:
        """Wait for the whole background."""
        self._pipeline.fence()
        self._settled.settle(self._step)

    def counts(self, *, wait: bool = False) -> dict[str, float]:
        """Return everything counted since the start, in which predicted = hit + fetched + deferred always holds.

        Args:
            wait: Wait for the device; else its last counters that arrived are returned.
        """
        if wait:
            self._settled.wait(self._step)
        if not self._counts or self._settled.has_arrived():
            self._counts = self._snapshot()
        return self._counts

    def _snapshot(self) -> dict[str, float]:
        return self._settled.snapshot() | self.handover_counts() | {"cap_changes": self.caps.num_changes}

    def _measure(self) -> None:
        """Tell the cap's owner of counters that arrived since the last step; asks nothing of the device."""
        settled = self._settled
        if settled.is_on_host and self.caps.is_due(self._step):
            settled.step = self._step - 1
        if self.caps.is_auto and settled.step is not None and settled.has_arrived():
            self.caps.take(self._snapshot(), settled.step)
            settled.step = None

    def close(self) -> None:
        """Finish the background and give the host memory back."""
        self._pipeline.close()
        self.outbox.stop()
        self.inbox.stop()
        self.caps.close()
        self._staged.close()
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
                if not self.inbox.is_failed(slot):
                    self._check_working_set(layer, slot)

    def _slot(self, request_id: str) -> int:
        if (slot := self._slot_of.get(request_id)) is None:
            slot = self._slot_of[request_id] = self._free_slots.pop()
            self.sets.clear(slot)
        return slot

    def _free(self, slot: int) -> None:
        if (lease := self.inbox.close(slot)) is not None:
            self._staged.forget(lease)
        self._free_slots.append(slot)

    def _add_host_blocks(self, added: Mapping[str, Sequence[int]]) -> None:
        table, places, entries = self.sets.host_table, list[int](), list[int]()
        for request_id, host_ids in added.items():
            slot, first = self._slot(request_id), self._num_host_blocks.get(request_id, 0)
            end = self._num_host_blocks[request_id] = first + len(host_ids)
            places += range(slot * table.shape[1] + first, slot * table.shape[1] + end)
            entries += host_ids
        place, entry = upload([places, entries], self._device)
        table.view(-1)[place] = entry
        self.inbox.fetched.note_own(place, entry)

    def _store(self, slot: int, table: torch.Tensor, first: int, end: int) -> None:
        host_ids = self.sets.host_table[slot, first:end]
        for layer, kv_cache in enumerate(self._kv_caches):
            store(kv_cache, table[first:end], self._pool.units, layer, host_ids)
        self.counters.stored_blocks += end - first

    def _switch(self, slot: int, table: torch.Tensor, num_complete: int) -> None:
        switch_request(
            self.config, self.shape, self.sets, self._kv_caches, slot, table, num_complete, stamp_of(self._step)
        )
        self.counters.switches += 1

    def _has_work(self, plan: StepPlan) -> bool:
        """Say whether a pass needs the background: some row is sparse, or will be in a replay of this capture."""
        return plan.num_sparse > 0 or plan.num_rows == 0

    def _background(self, layer: int, num_rows: int) -> list[Stage]:
        sets, config, kv_cache = self.sets, self.config, self._kv_caches[layer]
        rows, plan = sets.rows[layer, :num_rows], sets.plan[layer, :num_rows]
        blocks, scores = sets.blocks[layer, :num_rows], sets.scores[layer, :num_rows]

        @torch.inference_mode()
        def run_predict() -> None:
            # First, since the selection may choose any resident as a victim.
            self._keep(layer, rows)
            self.predict(layer, rows, blocks, scores)

        @torch.inference_mode()
        def run_select() -> None:
            resident, stamp = sets.resident[layer], sets.stamp[layer]
            select(blocks, scores, rows, resident, stamp, plan, sets.counters[layer])
            if config.debug_poison:
                poison(sets, kv_cache, layer, rows)

        @torch.inference_mode()
        def run_transfer() -> None:
            started = time.perf_counter()
            left = self.inbox.bring(self._staged, layer, plan, rows)
            transfer(self._pool.units, layer, kv_cache, left, rows, self.host_table(layer), sets.slot_ids)
            if self._settled.is_on_host:
                self.counters.transfer_s += time.perf_counter() - started

        return [run_predict, run_select, run_transfer]

    def _keep(self, layer: int, rows: torch.Tensor) -> None:
        """Write the blocks to host memory that the layer took in for these rows."""
        sets = self.sets
        resident, table = sets.resident[layer], sets.host_table
        keep(self._kv_caches[layer], self._pool.units, layer, rows, resident, sets.slot_ids, table)

    def predict(self, layer: int, rows: torch.Tensor, blocks: torch.Tensor, scores: torch.Tensor) -> None:
        """Name the blocks that a layer's published queries look for: the seam at which traces come and go."""
        sets, config = self.sets, self.config
        predict(
            sets.query[layer],
            rows,
            self._kv_caches[layer],
            sets.page_ids,
            blocks,
            scores,
            layout=sets.summaries,
            alpha=config.score_alpha,
            reduction=config.group_reduction,
            scale=self.shape.score_scale(layer),
            num_sinks=config.sink_blocks,
        )

    def _verify(self, layer: int, plan: StepPlan) -> None:
        for slot in plan.rows[:, Row.REQUEST].tolist():
            if slot >= 0 and not self.inbox.is_failed(slot):
                self._check_working_set(layer, slot)

    def _check_working_set(self, layer: int, slot: int) -> None:
        table, absent = self.host_table(layer), self.inbox.fetched.absent[layer, slot]
        num_sinks, kv_cache = self.config.sink_blocks, self._kv_caches[layer]
        check_working_set(self.sets, kv_cache, self._pool.units, layer, slot, num_sinks, table[slot], absent)
