"""Selection traces through the backend's own handovers, without a model: what is fetched when, and what is kept.

`stage_prompt` is the prefill side and `Replay` the decode side. No attention is computed; K and V are random numbers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oasiskv.core.commands import Admission
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError
from oasiskv.core.handover import HandoverLayout
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.layout import SparseLayout
from oasiskv.core.ledger import RequestLedger
from oasiskv.core.switch_rule import SwitchRule
from oasiskv.core.trace import SelectionTrace
from oasiskv.engine.handover import MAX_UNDERWAY_BYTES, Outbox, StagedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.pipeline import InlinePipeline
from oasiskv.engine.plan import Batch
from oasiskv.engine.runtime import Runtime
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.switch import seat
from oasiskv.kernels.rows import Row, SummaryLayout

POLL_S = 0.002
"""Between two looks whether all of a prompt is staged, or has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of a replay did."""

    seconds: float
    admitted_bytes: int
    """Fetched from staging for requests that began with it: first sets, summaries, active blocks and maps."""
    first_set_bytes: int
    """Complete blocks among them."""
    missed_bytes: int
    """Fetched since a block was selected that was absent."""
    host_bytes: int
    """Parts of blocks on this host when it ended, fetched or completed here, of the step's requests."""
    held_bytes: int
    """Host blocks that those requests held, whole ones, with what of their rooms is empty."""
    num_requests: int
    ended: tuple[str, ...]
    """Requests that ended with it."""


def replay_shape(trace: SelectionTrace, head_dim: int) -> CacheShape:
    """Return the shape of a KV cache in which a trace can be replayed, with heads as narrow as given."""
    return CacheShape(
        num_layers=trace.num_layers,
        num_target_layers=trace.num_layers,
        num_query_heads=trace.num_kv_heads,
        num_kv_heads=trace.num_kv_heads,
        head_dim=head_dim,
        block_size=trace.block_size,
        dtype=torch.bfloat16,
        scale=1.0,
    )


def handover_layout(trace: SelectionTrace, config: LookaheadConfig, shape: CacheShape) -> HandoverLayout:
    """Return which staged block of a trace's prompt holds what."""
    summaries = SummaryLayout.of(config, shape.block_size, shape.head_dim, shape.dtype.itemsize)
    layout = SparseLayout(budget_blocks=config.budget_blocks, rows_per_page=summaries.rows_per_page)
    return HandoverLayout.of(trace.num_tokens, trace.block_size, layout)


def stage_prompt(
    trace: SelectionTrace, config: LookaheadConfig, shape: CacheShape, staged: StagedBlocks, lease: str
) -> bytes:
    """Put random KV for a trace's prompt, and its first working set, into staging as a prefill engine does.

    Args:
        trace: The trace.
        config: The backend's settings.
        shape: From `replay_shape`.
        staged: The way to staging.
        lease: Of as many blocks as `handover_layout` says.

    Returns:
        What the lease's owner needs to declare the blocks final.

    Raises:
        OasisError: Not all of it was written.
    """
    num_blocks, layout = trace.num_prompt_blocks, handover_layout(trace, config, shape)
    sets = WorkingSets(config, shape, 1, num_blocks + 1, torch.device("cpu"))
    page = (layout.num_pages + 1, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
    kv_caches = [torch.zeros(page, dtype=shape.dtype) for _ in range(shape.num_layers)]
    sets.host_table[0, :num_blocks] = torch.arange(num_blocks)
    sets.page_ids[0, : layout.num_pages] = torch.arange(1, layout.num_pages + 1)
    for layer in range(shape.num_layers):
        sets.resident[layer, 0] = seat(torch.from_numpy(trace.blocks[0, layer].astype(np.int32)))
    pool = HostPool.private(shape.host_pool(num_blocks), shape.host_dtype)
    try:
        pool.units.normal_(generator=torch.Generator().manual_seed(0))
        outbox = Outbox(shape, sets, kv_caches, pool)
        outbox.open("prompt", lease)
        table = torch.zeros(num_blocks + 1, dtype=torch.int32)
        outbox.store(staged, "prompt", 0, table, 0, num_blocks)
        outbox.export(staged, "prompt", 0, table, layout)
        while (receipt := outbox.take_receipt(staged, lease)) is None:
            time.sleep(POLL_S)
        return receipt
    finally:
        pool.close()


def fetch_dense(trace: SelectionTrace, shape: CacheShape, staged: StagedBlocks, lease: str) -> Step:
    """Fetch all KV of a prompt as an engine without this backend would need it: in its HBM, none of it on the host.

    Raises:
        OasisError: Not all of it came.
    """
    started = time.perf_counter()
    num_blocks = -(-trace.num_tokens // trace.block_size)
    step = max(1, MAX_UNDERWAY_BYTES // shape.host_block_bytes)
    num_bytes = 0
    for first in range(0, num_blocks, step):
        indices = range(first, min(first + step, num_blocks))
        size = (len(indices), shape.num_layers, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        out = torch.empty(size, dtype=shape.dtype)
        staged.fetch(lease, indices, 0, out).result()
        num_bytes += out.nbytes
    return Step(
        seconds=time.perf_counter() - started,
        admitted_bytes=num_bytes,
        first_set_bytes=num_bytes,
        missed_bytes=0,
        host_bytes=0,
        held_bytes=0,
        num_requests=1,
        ended=(),
    )


class _ReplayRuntime(Runtime):
    """A runtime that predicts what a trace says; `num_done` tells for each row how many steps its request has done."""

    def __init__(
        self,
        trace: SelectionTrace,
        config: LookaheadConfig,
        shape: CacheShape,
        sets: WorkingSets,
        num_engine_blocks: int,
        pool: HostPool,
    ) -> None:
        cache = (num_engine_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        kv_caches = [torch.zeros(cache, dtype=shape.dtype) for _ in range(shape.num_layers)]
        super().__init__(config, shape, sets, kv_caches, pool, InlinePipeline())
        self._trace = trace
        self._ranks = torch.arange(config.budget_blocks, 0, -1, dtype=torch.float32)
        self.num_done: list[int] = []

    def predict(self, layer: int, rows: torch.Tensor, blocks: torch.Tensor, scores: torch.Tensor) -> None:
        """Name what the trace names in the step that each row is in."""
        for row, num_done in enumerate(self.num_done):
            if int(rows[row, Row.REQUEST]) >= 0:
                blocks[row] = torch.from_numpy(self._trace.blocks[num_done + 1, layer].astype(np.int32))
                scores[row] = self._ranks

    def absent(self, request_id: str, num_blocks: int) -> int:
        """Return how many of a request's first blocks are not on this host, summed over layers."""
        return int(self.inbox.fetched.absent[:, self._slot_of[request_id], :num_blocks].sum())


@dataclass(slots=True)
class _Request:
    place: int
    """Which part of engine memory it has."""
    num_done: int = 0


class Replay:
    """The decode side of a trace: requests that all select what it says, each from its own admission on.

    What is fetched, deferred and kept is decided by `Runtime`, `Inbox` and `select` themselves, and who holds which
    host blocks by `RequestLedger`.

    Args:
        trace: The trace.
        config: The backend's settings; with the trace's budget and sinks.
        shape: From `replay_shape`.
        max_requests: Requests at a time.
        num_host_blocks: Host memory; None for all KV of so many requests.
    """

    def __init__(
        self,
        trace: SelectionTrace,
        config: LookaheadConfig,
        shape: CacheShape,
        max_requests: int,
        num_host_blocks: int | None = None,
    ) -> None:
        """Allocate everything.

        Raises:
            ConfigError: The settings are not those of the trace, or the host memory is too little for its requests.
        """
        for name, got, expected in (
            ("budget_blocks", config.budget_blocks, trace.budget_blocks),
            ("sink_blocks", config.sink_blocks, trace.num_sinks),
        ):
            if got != expected:
                raise ConfigError(f"{name}: expected {expected}, as in the trace, got {got}")
        self.trace = trace
        self._shape = shape
        self._max_blocks = (trace.num_tokens + trace.num_steps) // trace.block_size + 1
        sets = WorkingSets(config, shape, max_requests, self._max_blocks, torch.device("cpu"))
        self._tables = _block_tables(trace, sets.layout, self._max_blocks, max_requests)
        if num_host_blocks is None:
            num_host_blocks = max_requests * self._max_blocks
        pool = HostPool.private(shape.host_pool(num_host_blocks), shape.host_dtype)
        brings_all = config.handover_mode == "full"
        host = HostBlockManager(num_host_blocks)
        self._ledger = RequestLedger(
            sets.layout, trace.block_size, host, SwitchRule(is_early=True), brings_all=brings_all
        )
        self._runtime = _ReplayRuntime(trace, config, shape, sets, int(self._tables.max()) + 1, pool)
        self._requests: dict[str, _Request] = {}
        self._free_places = list(range(max_requests))
        self._released: list[str] = []

    def attach(self, staged: StagedBlocks) -> None:
        """Take a way to staging; closed with this."""
        self._runtime.attach(staged)

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._requests)

    def counts(self) -> dict[str, float]:
        """Return what the backend counted."""
        return self._runtime.counts()

    def check(self) -> None:
        """Compare every resident block with host memory, bit for bit; raises CorruptBlockError."""
        self._runtime.check_invariants()

    def step(self, admitted: Sequence[tuple[str, str]] = ()) -> Step:
        """Run a step of every request under way.

        Args:
            admitted: Requests that begin with it, and the lease that each reads under.

        Raises:
            OasisError: A block did not come.
        """
        started = time.perf_counter()
        runtime, trace, shape = self._runtime, self.trace, self._shape
        before = runtime.handover_counts()
        self._admit(admitted)
        self._grow()
        requests = self._requests
        runtime.num_done = [request.num_done for request in requests.values()]
        lens = [trace.num_tokens + num_done + 1 for num_done in runtime.num_done]
        runtime.begin_step(
            Batch(
                request_ids=list(requests),
                query_start_loc=torch.arange(len(requests) + 1, dtype=torch.int32),
                seq_lens=torch.tensor(lens, dtype=torch.int32),
                block_table=self._tables[[request.place for request in requests.values()]],
                num_drafts=[0] * len(requests),
                has_usable_draft=[False] * len(requests),
            )
        )
        first_set_bytes = sum(self._prompt_bytes(request_id) for request_id, _ in admitted)
        query = torch.zeros(len(requests), shape.num_query_heads, shape.head_dim, dtype=shape.dtype)
        for layer in range(shape.num_layers):
            runtime.before_write(layer)
            runtime.publish(layer, query)
            runtime.after_attention(layer)
        runtime.end_pass()
        for error in runtime.inbox.take_failed().values():
            raise error
        after = runtime.handover_counts()
        host_bytes = sum(self._prompt_bytes(name) + self._own_bytes(request) for name, request in requests.items())
        return Step(
            seconds=time.perf_counter() - started,
            admitted_bytes=after["admitted_bytes"] - before["admitted_bytes"],
            first_set_bytes=first_set_bytes,
            missed_bytes=after["missed_bytes"] - before["missed_bytes"],
            host_bytes=host_bytes,
            held_bytes=self._ledger.num_host_blocks_held * shape.host_block_bytes,
            num_requests=len(requests),
            ended=self._end_step(),
        )

    def close(self) -> None:
        """Give everything back."""
        self._runtime.close()

    def _admit(self, admitted: Sequence[tuple[str, str]]) -> None:
        """Have requests come from staging, beside nobody: a step in which none runs."""
        if not admitted:
            return
        trace, ledger = self.trace, self._ledger
        for request_id, lease in admitted:
            admission = Admission(lease=lease, num_tokens=trace.num_tokens)
            ledger.expect(request_id, trace.num_tokens + trace.num_steps + 1, admission=admission)
            ledger.admit(request_id, trace.num_tokens + 1, trace.num_tokens)
            if not ledger.can_grow(request_id, trace.num_tokens):
                raise ConfigError(
                    f"num_host_blocks: expected enough for {len(self._requests) + 1} requests, got too few"
                )
            ledger.grow(request_id, trace.num_tokens)
            place = self._free_places.pop()
            self._requests[request_id] = _Request(place)
            ledger.seat(request_id, self._tables[place].tolist())
        self._runtime.apply(ledger.take_commands({}, self._take_released(), 0))
        self._wait_for({request_id for request_id, _ in admitted})

    def _grow(self) -> None:
        """Give every request host blocks for its next token, and tell the workers of a step in which all run."""
        ledger, num_computed = self._ledger, dict[str, int]()
        for request_id, wanted in self._runtime.inbox.take_wanted().items():
            ledger.rooms.note_wanted(request_id, wanted)
        for request_id, request in self._requests.items():
            num_computed[request_id] = self.trace.num_tokens + request.num_done
            ledger.advance(request_id, num_computed[request_id])
            ledger.grow(request_id, num_computed[request_id] + 1)
        self._runtime.apply(ledger.take_commands(num_computed, self._take_released(), 0))

    def _take_released(self) -> set[str]:
        released, self._released = set(self._released), []
        return released

    def _wait_for(self, request_ids: set[str]) -> None:
        while request_ids:
            over, failed = self._runtime.take_arrived()
            for error in failed.values():
                raise error
            request_ids = request_ids - over
            if request_ids:
                time.sleep(POLL_S)

    def _end_step(self) -> tuple[str, ...]:
        for request in self._requests.values():
            request.num_done += 1
        ended = [name for name, request in self._requests.items() if request.num_done == self.trace.num_steps]
        self._free_places += [self._requests.pop(name).place for name in ended]
        self._released += ended
        for request_id in ended:
            self._ledger.release(request_id)
            self._ledger.forget(request_id)
        return tuple(ended)

    def _prompt_bytes(self, request_id: str) -> int:
        """Return the bytes of the prompt's complete blocks that are on this host."""
        num_blocks = self.trace.num_prompt_blocks
        num_parts = num_blocks * self._shape.num_layers - self._runtime.absent(request_id, num_blocks)
        return num_parts * self._shape.num_kv_heads * self._shape.unit_bytes

    def _own_bytes(self, request: _Request) -> int:
        """Return the bytes of blocks that were completed here."""
        num_complete = (self.trace.num_tokens + request.num_done) // self.trace.block_size
        return (num_complete - self.trace.num_prompt_blocks) * self._shape.host_block_bytes


def _block_tables(trace: SelectionTrace, layout: SparseLayout, max_blocks: int, max_requests: int) -> torch.Tensor:
    """Return `int32[max_requests, max_blocks]`: entries with nothing of a sparse request are the null block."""
    pages = {place for place in layout.page_positions(max_blocks) if place < max_blocks}
    own = sorted({*range(layout.budget_blocks), *pages, *range(trace.num_prompt_blocks, max_blocks)})
    tables = torch.zeros(max_requests, max_blocks, dtype=torch.int32)
    tables[:, own] = torch.arange(1, max_requests * len(own) + 1, dtype=torch.int32).view(max_requests, -1)
    return tables
