"""The backend on vLLM's CPU build: attention in plain torch over FlashAttention's cache layout, and the worker."""

# vLLM wants its CPU worker imported before anything else of its worker code.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec

from oasiskv.engine.attention import AttentionGroups, attend, group_rows
from oasiskv.engine.plan import StepPlan
from oasiskv.engine.vllm.manager import LookaheadSpec
from oasiskv.engine.vllm.worker import LookaheadWorker, WorkerBackend, current, is_planned, runner_is_v2
from oasiskv.kernels.formats import FP8


@dataclass
class LookaheadCPUMetadata(CPUAttentionMetadata):
    """vLLM's metadata with what our attention reads.

    Attributes:
        groups: Rows of like shape, attended together.
        is_planned: Whether requests of a running step stand behind the rows; not so in warm-up.
    """

    groups: AttentionGroups | None = None
    is_planned: bool = False


class LookaheadCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds the metadata of one forward pass."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LookaheadCPUMetadata:
        """Plan the step for the target's layers."""
        backend, common = _backend(), common_attn_metadata
        if (request_ids := backend.request_ids(common.num_reqs)) is not None:
            backend.begin_step(request_ids, common.query_start_loc, common.seq_lens, common.block_table_tensor)
        plan = backend.plan_pass(common.num_reqs, common.query_start_loc, common.seq_lens, common.block_table_tensor)
        return self._metadata(common, plan)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> LookaheadCPUMetadata:
        """Plan the drafter's pass over the same rows."""
        common = common_attn_metadata
        plan = _backend().begin_drafting(common.query_start_loc, common.seq_lens, common.block_table_tensor)
        return self._metadata(common, plan)

    def _metadata(self, common: CommonAttentionMetadata, plan: StepPlan | None) -> LookaheadCPUMetadata:
        block_table, seq_lens = common.block_table_tensor, common.seq_lens
        if plan is not None:
            block_table, seq_lens = plan.block_table, plan.seq_lens
        return LookaheadCPUMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            groups=group_rows(common.query_start_loc, seq_lens, block_table, self.block_size),
            is_planned=plan is not None,
        )


class LookaheadCPUImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Order the layer after its last transfer, then write the step's K and V."""
        if is_planned(layer.layer_name):
            backend = _backend()
            assert backend.runtime is not None
            backend.runtime.before_write(backend.layer(layer.layer_name))
        block_size, head_dim = kv_cache.shape[2], self.head_size
        is_real = slot_mapping >= 0
        slots, num_tokens = slot_mapping[is_real], slot_mapping.shape[0]
        block, offset = slots // block_size, slots % block_size
        key, value = key[:num_tokens][is_real], value[:num_tokens][is_real]
        if self.is_fp8_kv_cache:
            kv_cache = kv_cache.view(FP8)
            key, value = _as_fp8(key, layer._k_scale_float), _as_fp8(value, layer._v_scale_float)
        kv_cache[block, :, offset, :head_dim] = key
        kv_cache[block, :, offset, head_dim:] = value

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LookaheadCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Publish the lookahead queries, attend, hand the layer to the background."""
        if attn_metadata is None:
            return output
        backend = _backend()
        runtime, index = backend.runtime, backend.layer(layer.layer_name)
        if attn_metadata.is_planned:
            assert runtime is not None
            runtime.publish(index, query)
        assert attn_metadata.groups is not None
        if self.is_fp8_kv_cache:
            scale, kv_cache = self.scale * layer._k_scale_float, kv_cache.view(FP8)
            attend(query, kv_cache, attn_metadata.groups, scale, output, value_scale=layer._v_scale_float)
        else:
            attend(query, kv_cache, attn_metadata.groups, self.scale, output)
        if attn_metadata.is_planned:
            assert runtime is not None
            runtime.after_attention(index)
        return output


def _as_fp8(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """Return K or V as vLLM's CPU build keeps them in an fp8 cache: rounded towards zero, unlike on a GPU."""
    # Three bits of fraction, or steps of 2 ** -9 below 2 ** -6.
    largest, least = torch.finfo(FP8).max, torch.finfo(FP8).smallest_normal
    scaled = (numbers.float() / scale).clamp(-largest, largest)
    normal = (scaled.view(torch.int32) & ~0xFFFFF).view(torch.float32)
    return torch.where(scaled.abs() < least, (scaled * 512).trunc() / 512, normal).to(FP8)


class LookaheadCPUBackend(CPUAttentionBackend):
    """What vLLM asks about the attention backend."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Serve any multiple of 16; vLLM's own CPU kernels want 32."""
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[LookaheadCPUImpl]:
        """Return the attention class."""
        return LookaheadCPUImpl

    @staticmethod
    def get_builder_cls() -> type[LookaheadCPUMetadataBuilder]:
        """Return the metadata builder."""
        return LookaheadCPUMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: KVCacheSpec) -> LookaheadSpec:
        """Give every layer a bounded cache."""
        return LookaheadSpec.of(spec, _backend().layout)


class Worker(LookaheadWorker, CPUWorker):
    """vLLM's CPU worker with the backend; `--worker-cls oasiskv.engine.vllm.cpu.Worker`."""

    def install(self, vllm_config: VllmConfig) -> None:
        """Put our attention in the place of vLLM's, the only one it selects on CPU."""
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{LookaheadCPUBackend.__name__}")
        if vllm_config.use_v2_model_runner:
            from oasiskv.engine.vllm import model_state

            model_state.install(vllm_config)

    def attention_impl(self) -> type:
        """Return the attention class that every layer must have."""
        return LookaheadCPUImpl

    def sample_tokens(self, *args: Any) -> Any:
        """Sample; a prompt that is not all there yet draws nothing from its request's random numbers.

        vLLM lets it draw and then winds the generator back, which a CPU's cannot: the engine would die of it.
        """
        if runner_is_v2(self):
            return super().sample_tokens(*args)
        batch = self.model_runner.input_batch
        is_partial = self.model_runner.discard_request_mask.np[: batch.num_reqs]
        kept = {row: batch.generators.pop(row) for row in list(batch.generators) if is_partial[row]}
        output = super().sample_tokens(*args)
        batch.generators.update(kept)
        return output


def _backend() -> WorkerBackend:
    backend = current()
    assert backend is not None, "the attention backend is installed by the worker class alone"
    return backend
