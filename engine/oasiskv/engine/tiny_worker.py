"""A worker with a tiny model for tests of the backend, and the plain meaning of a working set beside it.

`TinyWorker` plays the engine's worker over a real `Runtime`. In every layer of every step it compares the backend with
`WorkingSetModel`, plain Python over the tokens' true K and V, and the attention's output with a dense float64 one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oasiskv.core.commands import Admission, StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.switch_rule import StepCost
from oasiskv.engine.attention import attend, group_rows
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.pipeline import Pipeline
from oasiskv.engine.plan import Batch, StepPlan
from oasiskv.engine.runtime import Runtime
from oasiskv.engine.side import Inline
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.kernels.fp8.reference import narrow, read, widen
from oasiskv.kernels.rows import Counter, SummaryLayout
from oasiskv.kernels.summarize.reference import fp8_rows, read_rows, widen_rows

NOISE = -1
"""The text whose K, V and queries rejected draft tokens have: another one than any request's."""

NOBODYS = 80
"""K and V where no token lies; no token has it, and every format of numbers does."""


class Texts:
    """K, V and queries of every token of a few texts, per layer.

    All are small integers, so that every score is exact in any float type: equal scores are equal, and the order of
    blocks is never a matter of rounding. Where the host holds fp8, K and V are larger, and still integers when rounded.

    Attributes:
        kv: `[num_texts + 1, num_layers, num_tokens, num_kv_heads, 2 * head_dim]`, K in the first half.
        held: The same as complete blocks of sparse requests hold it: rounded where the host holds fp8.
        query: `[num_texts + 1, num_layers, num_tokens, num_query_heads, head_dim]`.
    """

    def __init__(self, num_texts: int, num_tokens: int, shape: CacheShape, seed: int) -> None:
        """Draw all texts."""
        random = torch.Generator().manual_seed(seed)

        def draw(largest: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            size = (num_texts + 1, shape.num_layers, num_tokens, heads, width)
            return torch.randint(-largest, largest + 1, size, generator=random).to(dtype)

        self.kv = draw(40 if shape.is_fp8 else 4, shape.num_kv_heads, 2 * shape.head_dim, shape.dtype)
        self.held = self.kv.clone()
        for first in range(0, num_tokens - shape.block_size + 1, shape.block_size) if shape.is_fp8 else ():
            block = self.held[:, :, first : first + shape.block_size]  # [T, L, B, H, 2D]
            block.copy_(widen(*narrow(block.transpose(2, 3)), shape.dtype).transpose(2, 3))
        self.query = draw(3, shape.num_query_heads, shape.head_dim, shape.published_dtype)


TINY_COST = StepCost(
    fixed_ms=1, row_ms=0, block_ms=0.3, sparse_ms=0.5, predict_ms=0.02, transfer_ms=1.5, overlap_loss=0, budget_blocks=4
)
"""Made-up times by which some requests of a small batch switch and others do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRow:
    """What one request computes in a step."""

    request_id: str
    text: int
    num_computed: int
    """Tokens in place before the step, none of them a rejected draft."""
    num_new: int
    """Tokens of this step, the draft token included."""
    num_drafts: int = 0
    has_usable_draft: bool = False
    is_accepted: bool = False
    """Whether the draft is the text's own next token, so that its K and V are final."""
    block_ids: list[int]
    """The worker's block table: it never learns that an entry was given back."""

    def of(self, table: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the new tokens' part of a table of `Texts`."""
        new = slice(self.num_computed, self.num_computed + self.num_new)
        values = table[self.text, layer, new]
        if self.num_drafts and not self.is_accepted:
            values = torch.cat([values[:-1], table[NOISE, layer, new][-1:]])
        return values

    def history(self, texts: Texts, layer: int, num_held: int) -> torch.Tensor:
        """Return K|V of all tokens up to the end of the step; the first `num_held` lie in blocks that were taken in."""
        held, exact = texts.held[self.text, layer, :num_held], texts.kv[self.text, layer, num_held : self.num_computed]
        return torch.cat([held, exact, self.of(texts.kv, layer)])


@dataclass(slots=True)
class WorkingSetModel:
    """The working set of one layer, request and KV head in the plainest form."""

    slots: list[int]
    """Block in each slot."""
    stamps: list[int]
    """Step in which it was last selected."""
    fresh: list[bool]
    """Whether it was fetched and not named since."""
    counts: list[int] = field(default_factory=lambda: [0] * len(Counter))

    @classmethod
    def start(cls, chosen: list[int], step: int) -> "WorkingSetModel":
        """Seat the first selection: a block in its own slot if it has one, the others where room is, ascending."""
        budget = len(chosen)
        rest = iter(sorted(block for block in chosen if block >= budget))
        slots = [slot if slot in chosen else next(rest) for slot in range(budget)]
        return cls(slots, [step] * budget, [False] * budget)

    def complete(self, block: int, num_sinks: int, step: int) -> None:
        """Take in a block that became final."""
        places = [slot for slot, held in enumerate(self.slots) if held >= num_sinks]
        self._replace(min(places, key=lambda slot: (self.stamps[slot], slot)), block, step, is_fresh=False)

    def select(self, predicted: list[int], cap: int, step: int) -> None:
        """Admit the missing ones of the predicted blocks, best first."""
        for slot, held in enumerate(self.slots):
            if held in predicted:
                self.stamps[slot], self.fresh[slot] = step, False
        missing = [block for block in predicted if block not in self.slots]
        others = [slot for slot, held in enumerate(self.slots) if held not in predicted]
        others.sort(key=lambda slot: (self.stamps[slot], slot))
        for block, slot in zip(missing[:cap], others, strict=False):
            self._replace(slot, block, step, is_fresh=True)
        num_fetched = min(len(missing), cap)
        self.counts[Counter.PREDICTED] += len(predicted)
        self.counts[Counter.HIT] += len(predicted) - len(missing)
        self.counts[Counter.FETCHED] += num_fetched
        self.counts[Counter.DEFERRED] += len(missing) - num_fetched

    def _replace(self, slot: int, block: int, step: int, *, is_fresh: bool) -> None:
        self.counts[Counter.WASTED] += self.fresh[slot]
        self.counts[Counter.EVICTED] += 1
        self.slots[slot], self.stamps[slot], self.fresh[slot] = block, step, is_fresh


def best_blocks(
    keys: torch.Tensor, query: torch.Tensor, num_complete: int, block_size: int, config: LookaheadConfig
) -> list[int]:
    """Return the predicted blocks of one KV head, best first, ties to the lower block.

    Args:
        keys: `[num_tokens, head_dim]`: all keys of the head.
        query: `[group_size, head_dim]`.
        num_complete: Blocks to choose from.
        block_size: Tokens per block.
        config: How to score and how many to choose.
    """
    blocks = keys[: num_complete * block_size].double().reshape(num_complete, block_size, -1)
    upper, lower = blocks.amax(1), blocks.amin(1)
    if config.summary_dtype == "fp8":
        layout = SummaryLayout.of(config, block_size, keys.shape[1], keys.element_size())
        rows = widen_rows(*fp8_rows(blocks, layout)).double()
        upper, lower = rows.chunk(2, -1) if config.summary == "minmax" else (rows, rows)
    q = query.double()
    middle = q @ ((upper + lower) / 2).T
    half = q.abs() @ ((upper - lower) / 2).T
    score = middle + config.score_alpha * half
    reduced = (score.amax(0) if config.group_reduction == "max" else score.sum(0)).tolist()
    order = sorted(range(num_complete), key=lambda block: (block >= config.sink_blocks, -reduced[block], block))
    sinks = list(range(config.sink_blocks))
    return sinks + [block for block in order if block >= config.sink_blocks][: config.budget_blocks - len(sinks)]


def dense_attention(query: torch.Tensor, kv: torch.Tensor, sees: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend in float64.

    Args:
        query: `[num_queries, num_query_heads, head_dim]`.
        kv: `[num_tokens, num_kv_heads, 2 * head_dim]`.
        sees: `bool[num_kv_heads, num_queries, num_tokens]`.
        scale: Softmax scale.

    Returns:
        `float64[num_queries, num_query_heads, head_dim]`.
    """
    head_dim, num_kv_heads = query.shape[-1], kv.shape[1]
    grouped = query.double().reshape(len(query), num_kv_heads, -1, head_dim)  # [Q, H, G, D]
    keys, values = kv[..., :head_dim].double(), kv[..., head_dim:].double()
    scores = torch.einsum("qhgd,thd->hgqt", grouped, keys) * scale
    weights = torch.softmax(scores.masked_fill(~sees[:, None], float("-inf")), -1)
    return torch.einsum("hgqt,thd->qhgd", weights, values).flatten(1, 2)


class TinyWorker:
    """A worker process of the engine over a real `Runtime`; every step checks itself.

    Args:
        config: The backend's settings.
        shape: Of the KV cache.
        texts: What the requests say.
        num_engine_blocks: Size of the engine's pool, the null block included.
        num_host_blocks: Size of the host pool.
        max_requests: Requests at a time.
        max_blocks: Blocks of the longest request.
        pipeline: Runs the background.
        asks: Whether missed blocks are asked for as a device does.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        texts: Texts,
        *,
        num_engine_blocks: int,
        num_host_blocks: int,
        max_requests: int,
        max_blocks: int,
        pipeline: Pipeline,
        asks: bool = False,
    ) -> None:
        """Allocate everything; K and V start as values that no token has."""
        cache = (num_engine_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        self.config, self.shape, self.texts, self.pipeline = config, shape, texts, pipeline
        self.kv_caches = [torch.full(cache, NOBODYS, dtype=shape.dtype) for _ in range(shape.num_layers)]
        self.pool = HostPool.private(shape.host_pool(num_host_blocks), shape.host_dtype)
        self.sets = WorkingSets(config, shape, max_requests, max_blocks, torch.device("cpu"), asks=asks)
        self.runtime = Runtime(config, shape, self.sets, self.kv_caches, self.pool, pipeline, Inline())
        self.working_sets: dict[tuple[str, int, int], WorkingSetModel] = {}
        """By request, layer and KV head; sparse requests only."""
        self.counts = torch.zeros(shape.num_layers, shape.num_kv_heads, len(Counter), dtype=torch.int64)
        """What requests that ended counted."""
        self.given_dtype = shape.published_dtype
        """Of queries as the engine gives them."""
        self._queries: dict[tuple[str, int], torch.Tensor] = {}
        self.num_complete: dict[str, int] = {}
        """Blocks of each sparse request that its working sets took in."""
        self._coming: dict[str, Admission] = {}  # with KV from staging, did not run yet
        self._first: set[str] = set()  # whose first sparse step this is
        self.was_drafter_left_out = False
        """Whether the step before the last one had no drafter's pass."""
        self._step = 0

    def run(
        self,
        commands: StepCommands,
        rows: Sequence[TinyRow],
        free_blocks: Sequence[int] = (),
        *,
        has_drafter_pass: bool = True,
    ) -> list[torch.Tensor]:
        """Run one step.

        Args:
            commands: The ledger's orders.
            rows: What each request computes.
            free_blocks: Engine blocks that are nobody's in this step: overwritten before it, and not written by it.
            has_drafter_pass: Whether the drafter's layers run too; else their K and V come from nowhere.

        Returns:
            Every layer's attention output, `[num_tokens, num_query_heads, head_dim]`; nothing where there are no rows.
        """
        self.was_drafter_left_out = self.runtime.make_up_drafting()
        self.runtime.apply(commands)
        for kv_cache in self.kv_caches:
            kv_cache[list(free_blocks)] = NOBODYS
        outputs = self._run_rows(commands, rows, has_drafter_pass)
        for layer, kv_cache in enumerate(self.kv_caches):
            assert bool((kv_cache[list(free_blocks)] == NOBODYS).all()), f"layer {layer}: a free block was written"
        return outputs

    def _run_rows(self, commands: StepCommands, rows: Sequence[TinyRow], has_drafter_pass: bool) -> list[torch.Tensor]:
        for request_id in commands.released:
            self._forget(request_id)
        self._coming |= commands.admit
        if not rows:
            return []
        self._step += 1
        lens = torch.tensor([row.num_new for row in rows])
        query_start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        seq_lens = torch.tensor([row.num_computed + row.num_new for row in rows], dtype=torch.int32)
        width = max(len(row.block_ids) for row in rows)
        table = torch.tensor([row.block_ids + [0] * (width - len(row.block_ids)) for row in rows], dtype=torch.int32)
        batch = Batch(
            request_ids=[row.request_id for row in rows],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            num_drafts=[row.num_drafts for row in rows],
            has_usable_draft=[row.has_usable_draft for row in rows],
        )
        plan = self.runtime.begin_step(batch)
        by_id = {row.request_id: row for row in rows}
        for request_id, num_complete in commands.switch.items():
            self._switch(by_id[request_id], num_complete)
        self._first = (self._coming.keys() & by_id.keys()) | commands.switch.keys()
        for request_id in self._first & self._coming.keys():
            self._admit(by_id[request_id], self._coming.pop(request_id))
        outputs = []
        for layer in range(self.shape.num_layers):
            if layer >= self.shape.num_target_layers and not has_drafter_pass:
                self._leave_out(layer, rows)
                continue
            if layer == self.shape.num_target_layers:
                self.runtime.end_pass()
                plan = self.runtime.begin_drafting(query_start_loc, seq_lens, table)
            outputs.append(self._run_layer(layer, rows, query_start_loc, plan))
        self.runtime.end_pass()
        return outputs

    def slot_of(self, request_id: str) -> int:
        """Return the request slot that the runtime gave a request."""
        return self.runtime._slot_of[request_id]

    def resident(self, request_id: str, layer: int) -> list[list[int]]:
        """Return the blocks in the slots, per KV head."""
        held: list[list[int]] = self.sets.resident[layer, self.slot_of(request_id)].tolist()
        return held

    def close(self) -> None:
        """Finish the background and check once more that it did what it should."""
        self.runtime.check_invariants()
        for layer in range(self.shape.num_layers):
            self._check_residents(layer)
        counts = self.runtime.counts(wait=True)
        assert counts["predicted"] == self.sets.counters[..., Counter.PREDICTED].sum()
        assert counts["late"] <= counts["fetched"]
        self.runtime.close()

    def _forget(self, request_id: str) -> None:
        self.num_complete.pop(request_id, None)
        self._coming.pop(request_id, None)
        for layer in range(self.shape.num_layers):
            self._queries.pop((request_id, layer), None)
            for head in range(self.shape.num_kv_heads):
                if (model := self.working_sets.pop((request_id, layer, head), None)) is not None:
                    self.counts[layer, head] += torch.tensor(model.counts)

    def _switch(self, row: TinyRow, num_complete: int) -> None:
        self.num_complete[row.request_id] = num_complete
        for layer in range(self.shape.num_layers):
            query = self._queries.get((row.request_id, layer))
            if query is None:
                # The drafter never ran for it.
                query = torch.zeros(self.shape.num_query_heads, self.shape.head_dim, dtype=self.shape.published_dtype)
            predicted = self._predict(row, layer, query, num_complete)
            for head, chosen in enumerate(predicted):
                self.working_sets[row.request_id, layer, head] = WorkingSetModel.start(chosen, self._step)

    def _admit(self, row: TinyRow, admission: Admission) -> None:
        """Expect the working set that a switch after the prompt would have chosen."""
        num_complete = admission.num_tokens // self.shape.block_size
        for layer in range(self.shape.num_layers):
            self._queries[row.request_id, layer] = self.texts.query[row.text, layer, admission.num_tokens - 1]
        self._switch(row, num_complete)

    def _predict(self, row: TinyRow, layer: int, query: torch.Tensor, num_complete: int) -> list[list[int]]:
        keys = self.texts.held[row.text, layer, :, :, : self.shape.head_dim]
        grouped = query.reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)
        size = self.shape.block_size
        return [
            best_blocks(keys[:, head], grouped[head], num_complete, size, self.config)
            for head in range(self.shape.num_kv_heads)
        ]

    def _run_layer(
        self, layer: int, rows: Sequence[TinyRow], query_start_loc: torch.Tensor, plan: StepPlan
    ) -> torch.Tensor:
        num_complete = {row.request_id: row.num_computed // self.shape.block_size for row in rows}
        self.runtime.before_write(layer)
        sparse = self._complete(layer, rows, num_complete)
        self._check_residents(layer)
        for row in sparse:
            self._check_bytes(layer, row, num_complete[row.request_id])
            self._check_summaries(layer, row, num_complete[row.request_id])
        for row in rows:
            self._write(layer, row)
        query = torch.cat([row.of(self.texts.query, layer) for row in rows])
        output = torch.full_like(query, float("nan"))
        self.runtime.publish(layer, query.to(self.given_dtype))
        if self.config.prediction == "on-demand":
            self._look_ahead(layer, rows, num_complete)
        groups = group_rows(query_start_loc, plan.seq_lens, plan.block_table, self.shape.block_size)
        attend(query, self.kv_caches[layer], groups, self.shape.scale, output)
        self._check_outputs(layer, rows, query, output)
        self.runtime.after_attention(layer)
        if self.config.prediction != "on-demand":
            self._look_ahead(layer, rows, num_complete)
        return output

    def _leave_out(self, layer: int, rows: Sequence[TinyRow]) -> None:
        num_complete = {row.request_id: row.num_computed // self.shape.block_size for row in rows}
        sparse = self._complete(layer, rows, num_complete)
        for row in rows:
            self._write(layer, row)
        if layer == self.shape.num_layers - 1:
            self.num_complete |= {row.request_id: num_complete[row.request_id] for row in sparse}

    def _complete(self, layer: int, rows: Sequence[TinyRow], num_complete: dict[str, int]) -> list[TinyRow]:
        """Let the models take in the blocks that ended, and return the sparse rows."""
        sparse = [row for row in rows if (row.request_id, layer, 0) in self.working_sets]
        for row in sparse:
            if num_complete[row.request_id] > self.num_complete[row.request_id]:
                for head in range(self.shape.num_kv_heads):
                    model = self.working_sets[row.request_id, layer, head]
                    model.complete(num_complete[row.request_id] - 1, self.config.sink_blocks, self._step)
        return sparse

    def _look_ahead(self, layer: int, rows: Sequence[TinyRow], num_complete: dict[str, int]) -> None:
        for row in rows:
            queries = row.of(self.texts.query, layer)
            is_draft = layer < self.shape.num_target_layers and row.has_usable_draft
            is_draft &= self.config.prediction in ("lookahead", "resident") and row.request_id not in self._first
            query = self._queries[row.request_id, layer] = queries[-1 if is_draft else -1 - row.num_drafts]
            if (row.request_id, layer, 0) in self.working_sets:
                predicted = self._predict(row, layer, query, num_complete[row.request_id])
                for head, chosen in enumerate(predicted):
                    model = self.working_sets[row.request_id, layer, head]
                    before = set(model.slots)
                    cap = self.runtime.caps.cap
                    model.select(chosen, cap, self._step)
                    assert len(set(model.slots) - before) <= cap
                    assert cap < self.config.budget_blocks or set(model.slots) == set(chosen)
                if layer == self.shape.num_layers - 1:
                    self.num_complete[row.request_id] = num_complete[row.request_id]

    def _check_residents(self, layer: int) -> None:
        """Compare residency, order of age and counters with the model, of requests out of this step's batch too."""
        counts = self.counts[layer].clone()
        for (request_id, model_layer, head), model in self.working_sets.items():
            if model_layer == layer:
                slot = self.slot_of(request_id)
                held, stamps = self.sets.resident[layer, slot, head].tolist(), self.sets.stamp[layer, slot, head]
                assert held == model.slots, f"layer {layer}, {request_id!r}, head {head}: {held}, not {model.slots}"
                assert (stamps // 2).tolist() == model.stamps
                assert len(set(held)) == len(held)
                assert set(range(self.config.sink_blocks)) <= set(held)
                counts[head] += torch.tensor(model.counts)
        counters = self.sets.counters[layer]
        assert torch.equal(counters, counts), f"layer {layer}: {counters.tolist()}, not {counts.tolist()}"
        assert torch.equal(counters[:, Counter.PREDICTED], counters[:, Counter.HIT : Counter.DEFERRED + 1].sum(1))

    def _blocks(self, layer: int, row: TinyRow, num_complete: int) -> torch.Tensor:
        """Return the true units of a request's complete blocks, `[n, num_kv_heads, block_size, 2 * head_dim]`."""
        size = self.shape.block_size
        tokens = self.texts.held[row.text, layer, : num_complete * size]
        return tokens.reshape(num_complete, size, *tokens.shape[1:]).transpose(1, 2)

    def _check_bytes(self, layer: int, row: TinyRow, num_complete: int) -> None:
        slot, true = self.slot_of(row.request_id), self._blocks(layer, row, num_complete)
        every_head = torch.arange(self.shape.num_kv_heads)
        host_ids = self.runtime.host_table(layer)[slot, :num_complete, None].long()
        host = read(self.pool.units, layer, host_ids, every_head, self.kv_caches[layer])
        resident = self.sets.resident[layer, slot].long()
        assert int(resident.max()) < num_complete
        held = self.kv_caches[layer][self.sets.slot_ids[slot].long()[None], every_head[:, None]]
        is_here = ~self.runtime.inbox.fetched.absent[layer, slot, :num_complete]
        # What ended in this step comes to host memory behind the layer's attention.
        is_here[self.num_complete[row.request_id] :] = False
        is_kept = torch.equal(host[is_here].float(), true[is_here].float())
        assert is_kept, f"layer {layer}: host memory of {row.request_id!r} differs from what was computed"
        is_same = torch.equal(held.float(), true[resident, every_head[:, None]].float())
        assert is_same, f"layer {layer}: slots of {row.request_id!r} hold other units"

    def _check_summaries(self, layer: int, row: TinyRow, num_complete: int) -> None:
        slot, layout = self.slot_of(row.request_id), self.sets.summaries
        stored = read_rows(self.kv_caches[layer], self.sets.page_ids[slot], num_complete, layout).transpose(0, 1)
        keys = self._blocks(layer, row, num_complete)[..., : self.shape.head_dim].float()
        upper, lower = keys.amax(2), keys.amin(2)
        true = torch.cat([upper, lower], -1) if layout.kind == "minmax" else ((upper + lower) / 2).to(self.shape.dtype)
        if layout.is_fp8:
            true = widen_rows(*fp8_rows(keys, layout))
        assert torch.equal(stored, true.float()), f"layer {layer}: summaries of {row.request_id!r} differ from its keys"

    def _write(self, layer: int, row: TinyRow) -> None:
        position = torch.arange(row.num_computed, row.num_computed + row.num_new)
        block = torch.tensor(row.block_ids)[position // self.shape.block_size]
        assert bool((block > 0).all()), "a token has no place but the null block"
        self.kv_caches[layer][block, :, position % self.shape.block_size] = row.of(self.texts.kv, layer)

    def _check_outputs(self, layer: int, rows: Sequence[TinyRow], query: torch.Tensor, output: torch.Tensor) -> None:
        first, size = 0, self.shape.block_size
        for row in rows:
            end = row.num_computed + row.num_new
            token = torch.arange(end)
            # A few queries of a long chunk stand for all, the first and the last among them.
            chosen = torch.tensor(sorted({0, *range(row.num_new - 1, -1, -max(1, row.num_new // 8))}))
            causal = token <= (row.num_computed + chosen)[:, None]
            sees = causal[None].repeat(self.shape.num_kv_heads, 1, 1)
            num_held = 0
            for head in range(self.shape.num_kv_heads):
                if (model := self.working_sets.get((row.request_id, layer, head))) is not None:
                    num_held = row.num_computed // size * size
                    is_active = token >= num_held
                    sees[head] &= is_active | torch.isin(token // size, torch.tensor(model.slots))
            mine = first + chosen
            expected = dense_attention(query[mine], row.history(self.texts, layer, num_held), sees, self.shape.scale)
            tolerance = 1e-4 if query.dtype == torch.float32 else 0.06
            torch.testing.assert_close(output[mine].double(), expected, rtol=tolerance, atol=tolerance)
            first += row.num_new
