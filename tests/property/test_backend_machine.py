"""Any schedule that vLLM can produce leaves the backend right: its own block manager decides, real workers carry out.

The machine plays vLLM's scheduler over vLLM's KVCacheManager with our LookaheadManager, and two workers run every step,
each holding its transfers back in its own way. `TinyWorker` compares them with a plain model in every layer.
"""

import random
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.layout import SparseLayout
from oasiskv.core.ledger import RequestLedger
from oasiskv.core.switch_rule import SwitchRule
from oasiskv.engine.pipeline import InlinePipeline, Pipeline, ThreadPipeline
from oasiskv.engine.state import CacheShape
from oasiskv.engine.tiny_worker import TINY_COST, Texts, TinyRow, TinyWorker
from oasiskv.kernels.rows import SummaryLayout

pytest.importorskip("vllm", reason="the block manager under test is vLLM's")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import RequestStatus

    from oasiskv.engine.vllm.manager import LookaheadManager, LookaheadSpec, install

    install()

MAX_BLOCKS = st.sampled_from([9, 19, 36])  # of the longest request: one summary page, two or three
MAX_RUNNING, NUM_TEXTS = 4, 2
PROMPTS = st.tuples(
    st.integers(0, NUM_TEXTS - 1),
    # Blocks about the budget, one page and two: where the shape of a request changes.
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 30, 31, 32]),
    st.integers(-4, 20),
    st.sampled_from([1, 20, 60, 200]),
)
"""Text, blocks, tokens more than that, and tokens to generate."""
PROMPT_LISTS = st.lists(PROMPTS, min_size=1, max_size=4)
SLACK = st.sampled_from([0, 2, 5, 10, 20, 40])  # blocks beyond those of the longest request
RULES = st.sampled_from([*2 * [SwitchRule(is_early=True)], SwitchRule(), SwitchRule(cost=TINY_COST)])
BUDGETS = st.integers(2, 6)
HOLDS = st.sampled_from([None, 0, 1, 2, 3, 5, "inline"])


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """What the block manager reads of vLLM's request, and what the machine knows besides."""

    request_id: str
    text: int
    num_prompt_tokens: int
    max_tokens: int
    num_tokens: int  # prompt and output tokens that the scheduler knows
    block_hashes: list[bytes]
    priority: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0  # as the scheduler hopes: drafts in flight count as accepted
    num_in_flight_tokens: int = 0
    num_true_tokens: int = 0  # as the worker knows: tokens in place
    num_prefill_tokens: int = 0
    num_preemptions: int = 0
    last_step: int = -1
    block_ids: list[int] = field(default_factory=list)  # the worker's block table

    @property
    def longest(self) -> int:
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens


@dataclass(frozen=True, slots=True)
class Output:
    """What a step gave one request."""

    request: Request
    num_preemptions: int
    num_scheduled: int
    num_rejected: int
    num_sampled: int


class Scheduler:
    """vLLM's scheduler in small: the same calls to the block manager, in the same order."""

    def __init__(
        self,
        layout: SparseLayout,
        block_size: int,
        *,
        num_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
        num_lookahead_tokens: int,
        is_async: bool,
        has_priorities: bool,
        rule: SwitchRule,
    ) -> None:
        spec = LookaheadSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=4,
            dtype=torch.float32,
            budget_blocks=layout.budget_blocks,
            rows_per_page=layout.rows_per_page,
        )
        self.max_model_len, self.num_lookahead_tokens = max_model_len, num_lookahead_tokens
        self.layout, self.block_size = layout, block_size
        self.kv = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            max_model_len=max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        (manager,) = self.kv.coordinator.single_type_managers
        assert isinstance(manager, LookaheadManager)
        self.manager = manager
        self.host = HostBlockManager(num_host_blocks)
        self.ledger = manager.ledger = RequestLedger(layout, block_size, self.host, rule)
        self.is_async, self.has_priorities = is_async, has_priorities
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.released: set[str] = set()
        self.unprocessed: deque[tuple[int, list[Output]]] = deque()
        self.deferred: deque[tuple[int, list[Any]]] = deque()
        self.step = 0
        self.num_processed_steps = 0

    def add(self, request_id: str, text: int, num_prompt_tokens: int, max_tokens: int) -> None:
        self.ledger.expect(request_id, num_prompt_tokens + max_tokens)
        self.waiting.append(
            Request(
                request_id=request_id,
                text=text,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                num_tokens=num_prompt_tokens,
                priority=ord(request_id) * 5 % 7,
                block_hashes=[f"{text} {index}".encode() for index in range(num_prompt_tokens // self.block_size)],
            )
        )

    def live(self) -> list[Request]:
        return self.running + self.waiting

    def can_free(self, request: Request) -> bool:
        """Say whether no step in flight uses the request's blocks."""
        return request.last_step <= self.num_processed_steps

    def free(self, request: Request) -> None:
        if self.can_free(request):
            self.kv.free(request)
        else:
            self.deferred.append((self.step, self.kv.pop_blocks_for_free(request)))
        request.block_ids = []
        request.num_true_tokens = 0

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self.released.add(request.request_id)

    def finish(self, request: Request) -> None:
        processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        self.kv.remove_skipped_blocks(request.request_id, processed, num_prompt_tokens=request.num_prompt_tokens)
        self.ledger.forget(request.request_id)
        self.free(request)
        request.status = RequestStatus.FINISHED_STOPPED
        (self.running if request in self.running else self.waiting).remove(request)
        self.released.add(request.request_id)

    def schedule(self, choice: random.Random, skip_rate: float) -> list[TinyRow]:
        """Choose the rows of a step, as a token budget and memory would."""
        self.kv.new_step_starts()
        scheduled: dict[Request, tuple[int, int]] = {}
        has_preempted, lookahead = False, self.num_lookahead_tokens
        for request in list(self.running):
            if request not in self.running or choice.random() < skip_rate:
                continue
            num_new, num_drafts = self.num_new_tokens(request, choice)
            if num_new == 0:
                continue
            while (blocks := self.kv.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)) is None:
                # Under priorities the victim may be one that runs in every step: then who asks runs in none.
                victim = max(self.running, key=lambda r: r.priority) if self.has_priorities else self.running[-1]
                if not self.can_free(victim):
                    break
                scheduled.pop(victim, None)
                self.preempt(victim)
                has_preempted = True
                if victim is request:
                    break
            if blocks is None:
                break
            request.block_ids += blocks.get_block_ids()[0]
            scheduled[request] = (num_new, num_drafts)
        # As in vLLM, a step in which someone was preempted admits nobody; one whose victim was in flight may.
        while self.waiting and len(self.running) < MAX_RUNNING and not has_preempted:
            request = self.waiting[0]
            request.num_prefill_tokens = request.num_tokens
            num_new, _ = self.num_new_tokens(request, choice)
            blocks = self.kv.allocate_slots(
                request, num_new, num_lookahead_tokens=lookahead, full_sequence_must_fit=True
            )
            if blocks is None:
                break
            self.running.append(self.waiting.pop(0))
            request.status, request.block_ids = RequestStatus.RUNNING, blocks.get_block_ids()[0]
            scheduled[request] = (num_new, 0)
        return [self.row(request, *tokens, choice) for request, tokens in scheduled.items()]

    def num_new_tokens(self, request: Request, choice: random.Random) -> tuple[int, int]:
        """Return how many tokens a request computes next, and how many of them are drafts."""
        if not request.is_decoding:
            left = request.num_prefill_tokens - request.num_computed_tokens
            return min(left, choice.choice([1, 7, self.block_size, 90, 400, 400])), 0
        num_pending = sum(o.num_sampled > 0 for _, step in self.unprocessed for o in step if o.request is request)
        if request.num_tokens + num_pending >= request.longest:
            return 0, 0  # the steps in flight reach its end
        num_drafts = int(request.num_computed_tokens + 3 <= self.max_model_len and choice.random() < 0.7)
        return 1 + num_drafts, num_drafts

    def row(self, request: Request, num_new: int, num_drafts: int, choice: random.Random) -> TinyRow:
        is_usable = bool(num_drafts) and choice.random() < 0.8
        return TinyRow(
            request_id=request.request_id,
            text=request.text,
            num_computed=request.num_true_tokens,
            num_new=num_new,
            num_drafts=num_drafts,
            has_usable_draft=is_usable,
            is_accepted=is_usable and choice.random() < 0.3,
            block_ids=list(request.block_ids),
        )

    def take_commands(self, rows: list[TinyRow]) -> StepCommands:
        by_id = {request.request_id: request for request in self.running}
        num_computed = {row.request_id: by_id[row.request_id].num_computed_tokens for row in rows}
        released, self.released = self.released, set()
        return self.ledger.take_commands(num_computed, released, self.manager.block_pool.get_num_free_blocks())

    def after_schedule(self, rows: list[TinyRow]) -> None:
        """Count the step's tokens as computed and note what its output will say."""
        self.step += bool(rows)
        by_id = {request.request_id: request for request in self.running}
        outputs = []
        for row in rows:
            request = by_id[row.request_id]
            num_rejected = row.num_drafts - row.is_accepted
            request.num_computed_tokens += row.num_new
            request.num_in_flight_tokens += row.num_new
            request.num_true_tokens += row.num_new - num_rejected
            request.last_step = self.step
            is_sampled = request.num_computed_tokens >= request.num_prefill_tokens
            num_sampled = (1 + row.is_accepted) if is_sampled else 0
            outputs.append(Output(request, request.num_preemptions, row.num_new, num_rejected, num_sampled))
        if rows:
            self.unprocessed.append((self.step, outputs))

    def process_output(self) -> None:
        """Learn what the oldest step in flight gave."""
        self.num_processed_steps, outputs = self.unprocessed.popleft()
        while self.deferred and self.deferred[0][0] <= self.num_processed_steps:
            self.kv.block_pool.free_blocks(reversed(self.deferred.popleft()[1]))
        for output in outputs:
            request = output.request
            request.num_in_flight_tokens -= output.num_scheduled
            if request.status != RequestStatus.RUNNING or request.num_preemptions != output.num_preemptions:
                continue
            request.num_computed_tokens -= output.num_rejected
            request.num_tokens = min(request.num_tokens + output.num_sampled, request.longest)
            if output.num_sampled and request.num_tokens >= request.longest:
                self.finish(request)

    def check(self, num_complete: dict[str, int]) -> None:
        """Assert that every engine block has one owner, and that no worker still needs what was given back.

        Args:
            num_complete: Blocks of each sparse request that the workers took in, in steps before this one.
        """
        self.host.check_invariants()
        tables: dict[str, list[Any]] = self.manager.req_to_blocks
        held = [block for table in tables.values() for block in table if not block.is_null]
        held += [block for _, blocks in self.deferred for block in blocks if not block.is_null]
        assert len({block.block_id for block in held}) == len(held)
        assert len(held) + self.kv.block_pool.get_num_free_blocks() == self.kv.block_pool.num_gpu_blocks - 1
        for request_id, table in tables.items():
            for entry, block in enumerate(table):
                assert not block.is_null or self.layout.budget_blocks <= entry < num_complete.get(request_id, 0)


class BackendMachine(RuleBasedStateMachine):
    """Requests come, prefill, become sparse, decode, are preempted, aborted, and end."""

    scheduler: Scheduler
    workers: tuple[TinyWorker, ...] = ()
    is_sound = True

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        draw = data.draw
        summary: Literal["minmax", "mid"] = draw(st.sampled_from(["minmax", "minmax", "mid"]))
        budget, num_kv_heads, num_layers = draw(BUDGETS), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        self.config = LookaheadConfig(
            budget_blocks=budget,
            fetch_ratio=0,
            min_cap=draw(st.integers(1, budget)),
            summary=summary,
            score_alpha=0 if summary == "mid" else draw(st.sampled_from([0, 0.25, 1])),
            group_reduction=draw(st.sampled_from(["max", "sum"])),
            sink_blocks=draw(st.integers(0, min(2, budget - 1))),
            prediction=draw(st.sampled_from(["lookahead", "lookahead", "previous", "on-demand", "resident"])),
            debug_poison=draw(st.booleans()),
            summary_dtype=draw(st.sampled_from(["auto", "auto", "fp8"])),
        )
        is_fp8 = draw(st.booleans())  # units; K is then ten times as large, so that rounding shows
        shape = CacheShape(
            num_layers=num_layers,
            num_target_layers=max(1, num_layers - draw(st.integers(0, 1))),
            num_query_heads=num_kv_heads * draw(st.sampled_from([1, 3, 4, 8])),
            num_kv_heads=num_kv_heads,
            head_dim=4 if self.config.summary_dtype == "auto" else 16,
            block_size=draw(st.sampled_from([16, 16, 32])),
            dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
            scale=0.04 if is_fp8 else 0.4,
            is_fp8=is_fp8,
        )
        self.block_size, max_blocks = shape.block_size, draw(MAX_BLOCKS)
        self.max_tokens = max_blocks * shape.block_size
        texts = Texts(NUM_TEXTS, self.max_tokens + 4, shape, seed=draw(st.integers(0, 3)))
        num_blocks, num_host_blocks = max_blocks + 2 + draw(SLACK), max_blocks + 1 + draw(SLACK)
        rows = SummaryLayout.of(self.config, shape.block_size, shape.head_dim, shape.dtype.itemsize).rows_per_page
        self.scheduler = Scheduler(
            SparseLayout(budget_blocks=budget, rows_per_page=rows),
            shape.block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=self.max_tokens,
            num_lookahead_tokens=draw(st.integers(0, 1)),
            is_async=draw(st.booleans()),
            has_priorities=draw(st.booleans()),
            rule=draw(RULES),
        )
        self.workers = tuple(
            TinyWorker(
                self.config,
                shape,
                texts,
                num_engine_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                max_requests=MAX_RUNNING,
                max_blocks=max_blocks + 1,
                pipeline=self.pipeline(draw(HOLDS), num_layers),
            )
            for _ in range(2)
        )
        self.add(draw(PROMPT_LISTS))

    @staticmethod
    def pipeline(hold: int | str | None, num_layers: int) -> Pipeline:
        if hold == "inline":
            return InlinePipeline()
        assert not isinstance(hold, str)
        return ThreadPipeline(num_layers, hold_layers=hold)

    @rule(prompts=PROMPT_LISTS)
    @precondition(lambda self: len(self.scheduler.live()) < 6)
    def add(self, prompts: list[tuple[int, int, int, int]]) -> None:
        unused = sorted(set("abcdefgh") - {request.request_id for request in self.scheduler.live()})
        for request_id, (text, num_blocks, num_more, max_tokens) in zip(unused, prompts, strict=False):
            num_prompt = min(num_blocks * self.block_size + num_more, self.max_tokens - 40)
            self.scheduler.add(request_id, text, num_prompt, min(max_tokens, self.max_tokens - num_prompt))

    @rule(count=st.integers(1, 30), seed=st.integers(0, 2**16), skip_rate=st.sampled_from([0, 0, 0.3]))
    @precondition(lambda self: self.scheduler.live())
    def steps(self, count: int, seed: int, skip_rate: float) -> None:
        choice = random.Random(seed)
        for _ in range(count):
            self.run_step(choice, skip_rate)

    @rule(seed=st.integers(0, 2**16))
    @precondition(lambda self: self.scheduler.running)
    def many_steps(self, seed: int) -> None:
        """Fill one block and more."""
        self.steps(self.block_size + 4, seed, 0)

    @rule(index=st.integers(0, 5), is_end=st.booleans())
    @precondition(lambda self: self.scheduler.live())
    def lose(self, index: int, is_end: bool) -> None:
        """Abort a request, or preempt it."""
        request = self.scheduler.live()[index % len(self.scheduler.live())]
        if is_end:
            self.scheduler.finish(request)
        elif request in self.scheduler.running:
            self.scheduler.preempt(request)

    def run_step(self, choice: random.Random, skip_rate: float) -> None:
        scheduler = self.scheduler
        self.is_sound = False
        rows = scheduler.schedule(choice, skip_rate)
        commands = scheduler.take_commands(rows)
        scheduler.check(self.workers[0].num_complete)
        free_blocks = [block.block_id for block in scheduler.kv.block_pool.blocks[1:] if block.ref_cnt == 0]
        drafts = choice.random() < 0.85  # vLLM leaves the drafter out of some steps
        outputs = [worker.run(commands, rows, free_blocks, has_drafter_pass=drafts) for worker in self.workers]
        for one, other in zip(*outputs, strict=True):
            assert torch.equal(one, other), "the timing of transfers changed an output"
        scheduler.after_schedule(rows)
        # With asynchronous scheduling, one step stays in flight while the next is scheduled.
        while len(scheduler.unprocessed) > (scheduler.is_async and bool(rows)):
            scheduler.process_output()
        self.is_sound = True

    def teardown(self) -> None:
        if not self.workers:
            return
        if not self.is_sound:
            for worker in self.workers:
                worker.pipeline.close()
            return
        for request in self.scheduler.live():
            self.scheduler.finish(request)
        self.run_step(random.Random(0), 0)
        for worker in self.workers:
            assert not worker.working_sets
            assert len(worker.runtime._free_slots) == MAX_RUNNING
            worker.close()
        assert self.scheduler.kv.block_pool.get_num_free_blocks() == self.scheduler.kv.block_pool.num_gpu_blocks - 1
        assert self.scheduler.host.num_free == self.scheduler.host.num_blocks


@settings(max_examples=8 * settings().max_examples)
@given(
    seed=st.integers(0, 2**32),
    max_blocks=st.sampled_from([9, 19]),
    budget=BUDGETS,
    slack=st.tuples(SLACK, SLACK),
    flags=st.tuples(st.booleans(), st.booleans()),
    rule=RULES,
)
def test_no_schedule_gives_back_what_the_workers_still_need(
    seed: int, max_blocks: int, budget: int, slack: tuple[int, int], flags: tuple[bool, bool], rule: SwitchRule
) -> None:
    """The scheduler's side alone, which takes many more steps in the same time."""
    choice, size = random.Random(seed), 16
    scheduler = Scheduler(
        SparseLayout(budget_blocks=budget, rows_per_page=size),
        size,
        num_blocks=max_blocks + 2 + slack[0],
        num_host_blocks=max_blocks + 1 + slack[1],
        max_model_len=max_blocks * size,
        num_lookahead_tokens=seed % 2,
        is_async=flags[0],
        has_priorities=flags[1],
        rule=rule,
    )
    num_complete: dict[str, int] = {}
    for _ in range(150):
        unused = sorted(set("abcdefgh") - {request.request_id for request in scheduler.live()})
        if len(unused) > 4 and choice.random() < 0.3:
            num_prompt = min(choice.choice([1, 3, 5, 7, 12]) * size + choice.randint(-4, 20), (max_blocks - 3) * size)
            scheduler.add(choice.choice(unused), 0, num_prompt, min(choice.choice([20, 60, 200]), 3 * size))
        rows = scheduler.schedule(choice, choice.choice([0, 0, 0.2]))
        commands = scheduler.take_commands(rows)
        for request_id in commands.released:
            num_complete.pop(request_id, None)
        scheduler.check(num_complete)
        for row in rows:
            if scheduler.ledger.is_sparse(row.request_id):
                num_complete[row.request_id] = row.num_computed // size
        scheduler.after_schedule(rows)
        while len(scheduler.unprocessed) > (scheduler.is_async and bool(rows)):
            scheduler.process_output()


# Each takes a second in `make test`, and about ten in `make soak`: 500 did not end in 77 minutes. A fault may hang.
MOST = min(150, settings().max_examples)
TestBackend = pytest.mark.timeout(60 + 15 * MOST)(BackendMachine.TestCase)
TestBackend.settings = settings(max_examples=MOST, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow])
