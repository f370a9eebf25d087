"""The backend's place in a vLLM worker process: built with it, told of every step before the model runs.

`cpu.Worker` and `cuda.Worker` mix `LookaheadWorker` into vLLM's own worker classes.
"""

import logging
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import check_fits, host_memory_limit, size
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.numa import cpus_of_node
from oasiskv.engine.pipeline import Pipeline, ThreadPipeline
from oasiskv.engine.plan import Batch, StepPlan
from oasiskv.engine.runtime import Runtime
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.vllm import settings
from oasiskv.engine.vllm.connector import StepMetadata, host_block_bytes
from oasiskv.engine.vllm.handover_calls import HandoverCalls
from oasiskv.engine.vllm.layers import check_layer, key_scale
from oasiskv.engine.vllm.manager import LookaheadSpec
from oasiskv.engine.vllm.names import CONNECTOR
from oasiskv.kernels.formats import FP8

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
"""Seconds between two lines about host memory while it is being taken."""

FLAGS_FROM_ROWS = 24
"""Fewest rows of a captured step whose background runs in graphs of its own, see `StreamPipeline`."""


class WorkerBackend:
    """Everything of the backend in one worker process.

    Attributes:
        config: The backend's settings.
        runtime: None until the KV cache exists.
        v1_batch: Model runner V1's batch, which knows the request of each row.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Check the configuration before anything is loaded."""
        settings.check(vllm_config)
        self.config: LookaheadConfig = settings.load(vllm_config)
        self.vllm_config = vllm_config
        self.layout = settings.layout_of(vllm_config, self.config)
        self.runtime: Runtime | None = None
        self._layers: dict[str, int] = {}
        self._shape: CacheShape | None = None
        self._sets: WorkingSets | None = None
        self._num_drafts: dict[str, int] = {}
        self._usable: set[str] = set()
        self._was_passed_by = False
        self.is_warming_up = False
        self._weight_bytes = 0
        self._is_pending = False
        self._is_running = False
        self._fresh_plan: StepPlan | None = None
        self._told: dict[str, float] = {}
        self.v1_batch: Any = None

    def layer(self, name: str) -> int:
        """Return the index of an attention layer."""
        return self._layers[name]

    def is_draft_layer(self, name: str) -> bool:
        """Say whether an attention layer belongs to the drafter."""
        assert self._shape is not None
        return self._layers[name] >= self._shape.num_target_layers

    def load(self, target_names: set[str], device: torch.device, impl_class: type, weight_bytes: int) -> None:
        """Look at the loaded layers and allocate the device state, inside vLLM's memory profile.

        Args:
            target_names: Layers of the target model; the others are the drafter's.
            device: Where the layers run.
            impl_class: The attention class that every layer must have.
            weight_bytes: What the weights take in this process.

        Raises:
            UnsupportedError: a layer is not one that the backend serves.
        """
        self._weight_bytes = weight_bytes
        layers = {
            name: layer
            for name, layer in self.vllm_config.compilation_config.static_forward_context.items()
            if isinstance(layer, Attention)
        }
        # The target's layers come first, each model's in the order of its own making.
        names = [name for name in layers if name in target_names] + [
            name for name in layers if name not in target_names
        ]
        for name in names:
            check_layer(name, layers[name], impl_class)
        shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.impl.scale) for layer in layers.values()}
        if len(shapes) != 1:
            raise UnsupportedError(
                "model: expected the same heads, KV heads, head size and scale in every layer, the drafter's included, "
                f"got {sorted(shapes)}; choose another draft model, or method 'ngram'"
            )
        num_heads, num_kv_heads, head_dim, scale = shapes.pop()
        dtype = settings.cache_dtype(self.vllm_config)
        self._layers = {name: index for index, name in enumerate(names)}
        self._shape = CacheShape(
            num_layers=len(names),
            num_target_layers=len(target_names & layers.keys()),
            num_query_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=self.vllm_config.cache_config.block_size,
            dtype=dtype,
            scale=scale,
            query_dtype=self.vllm_config.model_config.dtype,
            key_scales=tuple(key_scale(layers[name]) for name in names) if dtype == FP8 else (),
            is_fp8=self.config.host_dtype == "fp8",
            tp_rank=get_tensor_model_parallel_rank(),
            tp_size=self.vllm_config.parallel_config.tensor_parallel_size,
        )
        self._sets = WorkingSets(
            self.config,
            self._shape,
            self.vllm_config.scheduler_config.max_num_seqs + settings.max_arriving(self.vllm_config),
            settings.max_blocks(self.vllm_config),
            device,
            asks=settings.asks(self.vllm_config),
        )

    def start(self, kv_cache_config: KVCacheConfig) -> None:
        """Take host memory and start, once the KV cache is allocated.

        Raises:
            ConfigError: vLLM gave the layers other caches than the backend asked for, or host memory is too small.
        """
        assert self._shape is not None
        assert self._sets is not None
        context = self.vllm_config.compilation_config.static_forward_context
        group = kv_cache_config.kv_cache_groups[0]
        block_bytes = host_block_bytes(kv_cache_config, self.config)
        if set(group.layer_names) != self._layers.keys() or not isinstance(group.kv_cache_spec, LookaheadSpec):
            raise ConfigError(f"kv_cache_config: expected a cache for {sorted(self._layers)}, got {group.layer_names}")
        caches = [context[name].kv_cache for name in self._layers]
        if self._shape.dtype == FP8:
            caches = [cache.view(FP8) for cache in caches]
        shape = (self._shape.num_kv_heads, self._shape.block_size, 2 * self._shape.head_dim)
        for name, cache in zip(self._layers, caches, strict=True):
            if tuple(cache.shape[1:]) != shape or not cache.is_contiguous():
                raise ConfigError(
                    f"kv_cache_layout: expected contiguous blocks of {shape}, got {cache.shape} in {name}"
                )
        assert block_bytes == self._shape.host_block_bytes
        num_host_blocks = settings.num_host_blocks(self.vllm_config, self.config, block_bytes)
        pool = self._make_pool(num_host_blocks, sum(cache.nbytes for cache in caches))
        self.runtime = Runtime(self.config, self._shape, self._sets, caches, pool, self._make_pipeline())

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Take the scheduler's orders of the next step.

        Raises:
            ConfigError: they are missing, so the scheduler runs without the backend.
        """
        metadata = scheduler_output.kv_connector_metadata
        if self.is_warming_up:
            self.end_step()
            return
        if self.runtime is None or not isinstance(metadata, StepMetadata):
            raise ConfigError(f"kv_transfer_config.kv_connector: expected {CONNECTOR} on the scheduler's side")
        # Model runner V1 leaves the drafter out for a batch with a request longer than the drafter takes, and hands on
        # zeros in the place of its drafts. V2 never does.
        is_drafter_left_out = self.v1_batch is not None and self.runtime.make_up_drafting()
        self.runtime.apply(metadata.commands)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        # With asynchronous scheduling the scheduler knows only how many drafts there are, not which. Model runner V2
        # tells it in steps with structured outputs alone, and -1 for every draft in others.
        knows_ids = not self.vllm_config.scheduler_config.async_scheduling and (
            not self.vllm_config.use_v2_model_runner or any(ids and ids[-1] >= 0 for ids in drafts.values())
        )
        self._num_drafts = {request_id: len(ids) for request_id, ids in drafts.items()}
        self._usable = {request_id for request_id, ids in drafts.items() if ids and not (knows_ids and ids[-1] < 0)}
        if is_drafter_left_out or self._was_passed_by:
            self._usable = set()
        self._was_passed_by = False
        self._is_pending = self._is_running = scheduler_output.total_num_scheduled_tokens > 0

    def begin_step(
        self, request_ids: list[str], query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> StepPlan | None:
        """Plan the step; None when the pass has no requests behind it, as in warm-up."""
        if self.runtime is None or not self._is_pending:
            return None
        self._is_pending = False
        num_rows = len(request_ids)
        self._fresh_plan = self.runtime.begin_step(
            Batch(
                request_ids=request_ids,
                query_start_loc=query_start_loc[: num_rows + 1],
                seq_lens=seq_lens[:num_rows],
                block_table=block_table[:num_rows],
                num_drafts=[self._num_drafts.get(request_id, 0) for request_id in request_ids],
                has_usable_draft=[request_id in self._usable for request_id in request_ids],
            )
        )
        return self._fresh_plan

    def take_plan(self) -> StepPlan | None:
        """Return the plan of the step about to run, once; None for a pass that has no requests behind it."""
        plan, self._fresh_plan = self._fresh_plan, None
        return plan

    def needs_drafts(self) -> bool:
        """Say whether the drafter must run behind the running step: a row is sparse, or none is anybody's."""
        plan = None if self.runtime is None else self.runtime.plan
        return plan is None or plan.num_rows == 0 or plan.num_sparse > 0

    def pass_drafter_by(self, name: str, query: torch.Tensor) -> None:
        """Note that the drafter makes no drafts in the running step; see `Runtime.pass_drafter_by`."""
        assert self.runtime is not None
        self._was_passed_by = True
        self.runtime.pass_drafter_by(self.layer(name), query)

    def begin_drafting(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> StepPlan | None:
        """Plan the drafter's pass; None when it has no requests behind it."""
        if self.runtime is None or self.runtime.plan is None:
            return None
        num_rows = self.runtime.plan.num_rows
        return self.runtime.begin_drafting(query_start_loc[: num_rows + 1], seq_lens[:num_rows], block_table[:num_rows])

    def plan_pass(
        self, num_rows: int, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> StepPlan | None:
        """Return the plan of a pass of model runner V2, padding rows included; None before the KV cache exists.

        It is the target's of the step just begun, else the drafter's of the running step, else without requests.
        """
        if self.runtime is None:
            return None
        if self.take_plan() is None:
            if self.runtime.plan is None or self.runtime.plan.num_rows == 0:
                return self.runtime.begin_blank(seq_lens[:num_rows])
            self.begin_drafting(query_start_loc, seq_lens, block_table)
        return self.runtime.pad(num_rows)

    def end_step(self) -> None:
        """Forget the running step: what runs next has no requests behind it."""
        if self.runtime is not None:
            self.runtime.apply(StepCommands())

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        if self.runtime is None:
            return {}
        now = self.runtime.counts(wait=not self._is_running)
        delta = {name: value - self._told.get(name, 0) for name, value in now.items()}
        self._told = now
        return delta

    def levels(self) -> dict[str, float]:
        """Return what holds now; empty before the KV cache exists."""
        return {} if self.runtime is None else {"cap_blocks": self.runtime.caps.cap}

    def close(self) -> None:
        """Finish the background and give host memory back."""
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None

    def request_ids(self, num_rows: int) -> list[str] | None:
        """Return the requests behind a batch's rows in model runner V1; None where there are none."""
        if not self._is_pending or self.v1_batch is None:
            return None
        return list(self.v1_batch.req_ids[:num_rows])

    def _make_pool(self, num_blocks: int, engine_bytes: int) -> HostPool:
        assert self._shape is not None
        config = self._shape.host_pool(num_blocks)
        parallel = self.vllm_config.parallel_config
        num_processes = parallel.world_size * max(1, parallel.data_parallel_size_local)
        is_cuda = self._sets is not None and self._sets.resident.is_cuda
        others = {}
        if not is_cuda:
            others["for the engine's KV cache"] = num_processes * engine_bytes
            others["for the weights"] = num_processes * self._weight_bytes
        limit = host_memory_limit(user_limit_bytes=self.config.host_limit_bytes)
        check_fits(config.total_bytes, limit, num_processes=num_processes, others=others)
        make = HostPool.private if self.config.host_backing == "private" else HostPool.shared
        progress = _Progress()
        # Of the GPU, so that its copies do not cross to another socket.
        node = current_platform.get_device_numa_node(torch.cuda.current_device()) if is_cuda else None
        cpus = cpus_of_node(node)
        pool = make(config, self._shape.host_dtype, pin=is_cuda, report=progress, cpus=cpus)
        progress.end(config.total_bytes)
        return pool

    def _make_pipeline(self) -> Pipeline:
        assert self._shape is not None
        if self._sets is not None and self._sets.resident.is_cuda:
            from oasiskv.engine.streams import StreamPipeline

            return StreamPipeline(
                self._sets.resident.device,
                self._shape.num_target_layers,
                self._sets.counters,
                {"auto": FLAGS_FROM_ROWS, "joined": None, "flags": 1}[self.config.signal],
                self.config.debug_hold_layers,
                is_timed=self.config.cap == "auto",
            )
        return ThreadPipeline(self._shape.num_layers, hold_layers=self.config.debug_hold_layers)


class _Progress:
    """Logs how far host memory is, now and then and at its end."""

    def __init__(self) -> None:
        self._started = self._told = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            seconds = now - self._started
            logger.info("Host memory for KV: %s of %s after %.0f s", size(done_bytes), size(total_bytes), seconds)

    def end(self, total_bytes: int) -> None:
        """Log how much was got, and how long it took."""
        seconds = time.monotonic() - self._started
        logger.info("Host memory for KV: %s ready after %.1f s", size(total_bytes), seconds)


class CheckedOutput(AsyncModelRunnerOutput):
    """A step's output, checked when it is there: a failure on the device shows before the tokens that it spoiled do."""

    def __init__(self, output: AsyncModelRunnerOutput, backend: WorkerBackend) -> None:
        """Wrap an output whose copy to the host is under way."""
        self._output = output
        self._backend = backend

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the output.

        Raises:
            TransferTimeoutError: see `Runtime.check`.
        """
        result = self._output.get_output()
        if (runtime := self._backend.runtime) is not None:
            runtime.check()
            # Known now of all steps before this one, which was not so when it was launched.
            if runtime.asks and (failed := runtime.inbox.take_failed_blocks()):
                assert result.kv_connector_output is not None
                result.kv_connector_output.invalid_block_ids |= failed
        return result


_current: WorkerBackend | None = None


def current() -> WorkerBackend | None:
    """Return this process's backend; None where OasisKV is off."""
    return _current


class LookaheadWorker(HandoverCalls):
    """What a vLLM worker class gains; mixed in before it."""

    vllm_config: VllmConfig
    model_runner: Any
    device: torch.device

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Check the configuration and put the attention backend in place, before a model is loaded."""
        global _current
        self.backend = _current = WorkerBackend(vllm_config)
        self.install(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def install(self, vllm_config: VllmConfig) -> None:
        """Make vLLM use the backend's attention in this process."""
        raise NotImplementedError

    def attention_impl(self) -> type:
        """Return the attention class that every layer must have."""
        raise NotImplementedError

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and the drafter, then look at their layers."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner = self.model_runner
        self.backend.load(target_layer_names(runner), self.device, self.attention_impl(), weight_bytes(runner))
        if not runner_is_v2(self):
            self.backend.v1_batch = runner.input_batch
        elif self.backend.config.drafting == "when-sparse":
            from oasiskv.engine.vllm import drafting

            drafting.install(runner, self.backend)
        if getattr(runner, "rejection_sampler", None) is not None and not runner_is_v2(self):
            from oasiskv.engine.vllm.sampling import RejectDrafts

            runner.rejection_sampler = RejectDrafts(runner.sampler, runner.speculative_config, runner.device)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache, then host memory."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.backend.start(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Hand the step's orders to the backend, then run the model."""
        self.backend.apply(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, which sends steps of its own making through `execute_model`."""
        self.backend.is_warming_up = True
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.backend.is_warming_up = False
        if self.backend.runtime is not None:
            self.backend.runtime.capture()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, but hand out no token that a failed background may have spoiled."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        return CheckedOutput(output, self.backend) if isinstance(output, AsyncModelRunnerOutput) else output

    def execute_dummy_batch(self) -> None:
        """Run a pass without requests, as data parallel ranks do when they have none."""
        self.backend.end_step()
        super().execute_dummy_batch()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop the backend, then the worker."""
        self.backend.close()
        super().shutdown()  # type: ignore[misc]


def is_planned(layer_name: str) -> bool:
    """Say whether the running forward pass has requests behind it, as far as this layer is concerned."""
    metadata = get_forward_context().attn_metadata
    return isinstance(metadata, dict) and getattr(metadata.get(layer_name), "is_planned", False)


def runner_is_v2(worker: Any) -> bool:
    """Say whether the worker runs vLLM's model runner V2."""
    return bool(getattr(worker, "use_v2_model_runner", False))


def target_layer_names(runner: Any) -> set[str]:
    """Return the names of the target model's attention layers: all that are not the drafter's."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    context = runner.vllm_config.compilation_config.static_forward_context
    draft_names: set[str] = set(getattr(drafter, "_draft_attn_layer_names", ()) or ())
    draft_names |= {name for name, layer in context.items() if getattr(layer, "is_draft_layer", False)}
    return {name for name in context if name not in draft_names}


def weight_bytes(runner: Any) -> int:
    """Return the bytes of the model's and the drafter's weights; those that both use count once."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    models = [runner.model, getattr(drafter, "model", None)]
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    weights = {weight.data_ptr(): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(weights.values())
