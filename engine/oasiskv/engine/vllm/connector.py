"""The channel between vLLM's scheduler and its workers: orders out with every step, counters back.

It moves no KV itself; vLLM's connector interface is what an out-of-tree backend has for this. Of a request that is
handed over, prefilled here or elsewhere, it tells the ledger what `kv_transfer_params` say.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from oasiskv.core.chunks import ChunkRule
from oasiskv.core.commands import Admission, Prefix, StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError
from oasiskv.core.host_blocks import HostBlockManager
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.core.ledger import RequestLedger
from oasiskv.engine.chunks import LEAST_TOKENS, TELL_STEPS, Chunks
from oasiskv.engine.vllm import settings
from oasiskv.engine.vllm.manager import LookaheadManager, LookaheadSpec
from oasiskv.engine.vllm.stats import LookaheadPromMetrics, LookaheadStats

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

NULL_BLOCK_ID = 0
"""vLLM's placeholder in a block table."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The orders of one step."""

    commands: StepCommands = field(default_factory=StepCommands)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side.

    Attributes:
        wanted: By request, the blocks that it fetched so far in the layer with most.
        stall_s: Time that layers waited since the start; None in most steps.
    """

    wanted: dict[str, int]
    stall_s: float | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join what two ranks tell."""
        assert isinstance(other, WorkerNews)
        names = self.wanted.keys() | other.wanted.keys()
        stalls = [news.stall_s for news in (self, other) if news.stall_s is not None]
        return WorkerNews(
            {name: max(self.wanted.get(name, 0), other.wanted.get(name, 0)) for name in names},
            min(stalls, default=None),
        )


def host_block_bytes(kv_cache_config: "KVCacheConfig", config: LookaheadConfig) -> int:
    """Return the bytes in host memory of one block over all layers of one worker.

    Raises:
        ConfigError: the layers were not all given OasisKV's spec, or their units cannot be stored as fp8.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, LookaheadSpec):
        specs = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(f"kv_cache_config: expected one group of LookaheadSpec, got {len(groups)} of {specs}")
    spec = groups[0].kv_cache_spec
    return HostPoolConfig(
        num_blocks=1,
        num_layers=len(groups[0].layer_names),
        num_kv_heads=spec.num_kv_heads,
        block_size=spec.block_size,
        head_dim=spec.head_size,
        dtype_bytes=1 if config.host_dtype == "fp8" else spec.dtype.itemsize,
        is_fp8_cache=spec.dtype.itemsize == 1,
    ).block_bytes


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What a request's `kv_transfer_params` say of handovers.

    Attributes:
        stage: Lease that its KV is staged under: it is to be prefilled here for another process.
        prefix: First blocks of its prompt, which are in that lease already.
        admission: All but the last token of its prompt, prefilled elsewhere.
    """

    stage: str | None = None
    prefix: Prefix | None = None
    admission: Admission | None = None

    def as_prefix(self, block_size: int) -> "Handed":
        """Return the same with complete blocks in the place of an admission: what a dense engine needs."""
        if self.admission is None:
            return self
        num_blocks = self.admission.num_tokens // block_size
        return Handed(prefix=Prefix(lease=self.admission.lease, num_blocks=num_blocks))


def handover_of(params: Mapping[str, Any], num_prompt_tokens: int, block_size: int) -> Handed:
    """Read `kv_transfer_params`: `oasiskv_stage`, with `oasiskv_prefix` or without it, or `oasiskv_lease`.

    What is not usable is not used; a client may send anything.
    """
    stage, lease, prefix = (params.get(f"oasiskv_{name}") for name in ("stage", "lease", "prefix"))
    if isinstance(stage, str) and lease is None:
        match prefix:
            case None:
                return Handed(stage=stage)
            case [str(read_lease), int(num_blocks)] if 0 < num_blocks * block_size < num_prompt_tokens:
                return Handed(stage=stage, prefix=Prefix(lease=read_lease, num_blocks=num_blocks))
    if isinstance(lease, str) and stage is None and prefix is None:
        return Handed(admission=Admission(lease=lease, num_tokens=num_prompt_tokens - 1))
    if any(given is not None for given in (stage, lease, prefix)):
        logger.warning("kv_transfer_params: expected oasiskv_stage or oasiskv_lease with a text, computing all here")
    return Handed()


class OasisKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for the lookahead backend; one instance beside the scheduler, one in each worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Check the configuration; a server that cannot run as configured does not start."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings.check(vllm_config)
        self._config = settings.load(vllm_config)
        self._vllm_config = vllm_config
        block_bytes = host_block_bytes(kv_cache_config, self._config)
        self._num_host_blocks = settings.num_host_blocks(vllm_config, self._config, block_bytes)
        self._ledger: RequestLedger | None = None
        self._host: HostBlockManager | None = None
        self._pool: Any = None
        self._dense_steps = 0
        self._finished: Counter[str] = Counter()
        self._chunks: Chunks | None = None
        self._told_steps = 0
        if self._config.chunks == "auto" and role == KVConnectorRole.SCHEDULER:
            scheduler = vllm_config.scheduler_config
            most = scheduler.max_num_batched_tokens
            rule = ChunkRule(min(LEAST_TOKENS, most), most)
            self._chunks = Chunks(rule, scheduler.long_prefill_token_threshold)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Ask for the layout in which the slice of one block and head is contiguous."""
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Say no: the attention backend itself declares which graphs it can be part of."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Say no: what a request hands over is staged, or said not to be, before its client hears of it."""
        return False

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Bring the ledger to the block manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], LookaheadManager):
            raise ConfigError(
                f"kv_cache_manager: expected one LookaheadManager, got {[type(m).__name__ for m in managers]}"
            )
        spec = managers[0].kv_cache_spec
        self._host = HostBlockManager(self._num_host_blocks)
        layout = settings.sparse_layout(self._config, spec.block_size, spec.head_size, spec.dtype.itemsize)
        self._ledger = managers[0].ledger = RequestLedger(
            layout,
            spec.block_size,
            self._host,
            settings.switch_rule(self._vllm_config, self._config),
            brings_all=self._config.handover_mode == "full",
        )
        self._pool = kv_cache_manager.block_pool

    def on_new_request(self, request: "Request") -> None:
        """Note how long the request can become."""
        assert self._ledger is not None
        longest = min(request.num_prompt_tokens + request.max_tokens, self._vllm_config.model_config.max_model_len)
        if request.resumable:
            # More prompt may come at any time, which a sparse request has no place for: it stays dense.
            longest = 0
        block_size = self._vllm_config.cache_config.block_size
        if not isinstance(request.kv_transfer_params, dict):
            # A client may send a text by `vllm_xargs`, and vLLM's scheduler, which reads a mapping next, would end.
            request.kv_transfer_params = None
        handed = handover_of(request.kv_transfer_params or {}, request.num_prompt_tokens, block_size)
        if self._config.handover_mode == "dense" and handed.stage is None:
            longest, handed = 0, handed.as_prefix(block_size)
        self._ledger.expect(
            request.request_id, longest, stage=handed.stage, prefix=handed.prefix, admission=handed.admission
        )

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Match what a request begins with, which comes beside the steps of others; None while as many come already."""
        assert self._ledger is not None
        num_tokens = self._ledger.num_staged_tokens(request.request_id)
        if num_tokens and self._ledger.num_arriving >= settings.max_arriving(self._vllm_config):
            return None, False
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note where the KV of a request from staging goes."""
        assert self._ledger is not None
        if num_external_tokens:
            self._ledger.seat(request.request_id, blocks.get_block_ids()[0])

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take what workers tell."""
        assert self._ledger is not None
        if isinstance(news := connector_output.kv_connector_worker_meta, WorkerNews):
            for request_id, wanted in news.wanted.items():
                self._ledger.rooms.note_wanted(request_id, wanted)
            if self._chunks is not None and news.stall_s is not None:
                self._chunks.take(news.stall_s)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        """Hand the step's orders over."""
        assert self._ledger is not None
        running = scheduler_output.scheduled_cached_reqs
        num_computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
        num_computed |= zip(running.req_ids, running.num_computed_tokens, strict=True)
        released = set(scheduler_output.finished_req_ids) | set(scheduler_output.preempted_req_ids or ())
        num_scheduled = scheduler_output.num_scheduled_tokens
        num_free = self._pool.get_num_free_blocks()
        commands = self._ledger.take_commands(num_computed, released, num_free, num_scheduled)
        self._dense_steps += self._ledger.num_dense_decodes(num_computed.keys())
        if self._chunks is not None:
            has_sparse = any(map(self._ledger.is_sparse, num_scheduled))
            # Read by vLLM's scheduler in each step.
            scheduler = self._vllm_config.scheduler_config
            scheduler.long_prefill_token_threshold = self._chunks.step(num_scheduled, has_sparse=has_sparse)
        return StepMetadata(commands=commands)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        assert self._ledger is not None
        self._finished["finished_requests"] += 1
        self._finished["finished_engine_blocks"] += sum(block_id != NULL_BLOCK_ID for block_id in block_ids[0])
        self._finished["finished_dense_blocks"] += len(block_ids[0])
        self._ledger.forget(request.request_id)
        return False, None

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    # The worker's side. The worker class drives the backend; these hooks have nothing left to do.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Do nothing."""

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Name the requests whose KV came from staging since the last call, or will not come."""
        from oasiskv.engine.vllm.worker import current

        backend = current()
        if backend is None or backend.runtime is None:
            return KVConnectorTransferResults()
        over, failed = backend.runtime.take_arrived()
        return KVConnectorTransferResults(finished_recving=over, failed_recving=set(failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell how much room requests want and, now and then, how long layers waited."""
        from oasiskv.engine.vllm.worker import current

        backend = current()
        if backend is None or backend.runtime is None:
            return None
        wanted, stall_s = backend.runtime.inbox.take_wanted(), None
        self._told_steps += 1
        if self._config.chunks == "auto" and self._told_steps % TELL_STEPS == 0:
            stall_s = backend.runtime.counts()["stall_seconds"]
        return WorkerNews(wanted, stall_s) if wanted or stall_s is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name a block of every request that could not get its KV from staging: vLLM drops its token and ends it."""
        from oasiskv.engine.vllm.worker import current

        backend = current()
        if backend is None or backend.runtime is None or backend.runtime.asks:
            return set()  # where devices ask, `CheckedOutput` tells, which knows what became of the step
        return backend.runtime.inbox.take_failed_blocks()

    def finish_forward(self) -> None:
        """Close the pass that just ran outside of a graph; model runner V2 calls it."""
        from oasiskv.engine.vllm.worker import current

        backend = current()
        if backend is not None and backend.runtime is not None:
            backend.runtime.end_pass()

    # Counters.

    def get_kv_connector_stats(self) -> LookaheadStats | None:
        """Return what this side counted since the last call."""
        if self.role == KVConnectorRole.SCHEDULER:
            return self._scheduler_stats()
        from oasiskv.engine.vllm.worker import current

        backend = current()
        return None if backend is None else LookaheadStats.of(backend.take_counts(), backend.levels())

    def _scheduler_stats(self) -> LookaheadStats:
        assert self._host is not None
        assert self._ledger is not None
        dense_steps, self._dense_steps = self._dense_steps, 0
        finished, self._finished = self._finished, Counter()
        return LookaheadStats.of(
            {
                "dense_steps": dense_steps,
                **finished,
                **{f"switched_{reason}": count for reason, count in self._ledger.take_num_switched().items()},
            },
            {
                "budget_blocks": self._config.budget_blocks,
                "chunk_tokens": 0 if self._chunks is None else self._chunks.tokens,
                "engine_blocks": self._pool.num_gpu_blocks - 1,
                "engine_blocks_held": self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks(),
                "host_blocks_held": self._host.num_blocks - self._host.num_free,
                "host_blocks_unfetched": self._ledger.rooms.num_unfetched,
                "host_blocks": self._host.num_blocks,
            },
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Rebuild stats that crossed a process."""
        return LookaheadStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        """Publish them on the server's /metrics."""
        return LookaheadPromMetrics(*args)
