"""The backend on CUDA: vLLM's own FlashAttention over the backend's block tables, and the worker class."""

from dataclasses import dataclass, fields

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from oasiskv.core.errors import ConfigError
from oasiskv.engine.vllm import model_state
from oasiskv.engine.vllm.manager import LookaheadSpec
from oasiskv.engine.vllm.worker import LookaheadWorker, WorkerBackend, current, is_planned


@dataclass
class LookaheadFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata.

    Attributes:
        is_planned: Whether the backend works beside the pass; it does from the start of serving, captures included.
    """

    is_planned: bool = False


class LookaheadFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds the metadata of one forward pass."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        """Be part of full graphs of decode steps, the background with them; other steps run piecewise."""
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LookaheadFlashMetadata:
        """Let FlashAttention see the working sets of sparse rows."""
        common = common_attn_metadata
        plan = _backend().plan_pass(common.num_reqs, common.query_start_loc, common.seq_lens, common.block_table_tensor)
        if plan is not None:
            is_all_sparse = 0 < plan.num_sparse == plan.num_rows
            bound = (plan.budget_blocks + 2) * self.block_size
            common = common.replace(
                block_table_tensor=plan.block_table,
                seq_lens=plan.seq_lens,
                max_seq_len=bound if is_all_sparse else common.max_seq_len,
            )
        built = super().build(common_prefix_len, common, fast_build)
        values = {field.name: getattr(built, field.name) for field in fields(FlashAttentionMetadata)}
        return LookaheadFlashMetadata(**values, is_planned=plan is not None)


class LookaheadFlashImpl(FlashAttentionImpl):
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
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LookaheadFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Publish the lookahead queries, attend, hand the layer to the background."""
        backend = _backend()
        runtime, index = backend.runtime, backend.layer(layer.layer_name)
        planned = attn_metadata is not None and attn_metadata.is_planned
        if planned:
            assert runtime is not None
            runtime.publish(index, query)
        result: torch.Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        if planned:
            assert runtime is not None
            runtime.after_attention(index)
        return result


class LookaheadFlashBackend(FlashAttentionBackend):
    """What vLLM asks about the attention backend."""

    @staticmethod
    def get_impl_cls() -> type[LookaheadFlashImpl]:
        """Return the attention class."""
        return LookaheadFlashImpl

    @staticmethod
    def get_builder_cls() -> type[LookaheadFlashMetadataBuilder]:
        """Return the metadata builder."""
        return LookaheadFlashMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Ask for the layout in which the slice of one block and head is contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: KVCacheSpec) -> LookaheadSpec:
        """Give every layer a bounded cache."""
        return LookaheadSpec.of(spec, _backend().layout)


class Worker(LookaheadWorker, GPUWorker):
    """vLLM's GPU worker with the backend; `--worker-cls oasiskv.engine.vllm.cuda.Worker`."""

    def install(self, vllm_config: VllmConfig) -> None:
        """Put our attention in the place of vLLM's FlashAttention.

        Raises:
            ConfigError: another attention backend was asked for, or model runner V1.
        """
        asked = vllm_config.attention_config.backend
        if asked not in (None, AttentionBackendEnum.FLASH_ATTN):
            raise ConfigError(f"--attention-backend: expected FLASH_ATTN, got {asked.name}")
        if not vllm_config.use_v2_model_runner:
            raise ConfigError(
                "VLLM_USE_V2_MODEL_RUNNER: expected model runner V2, got V1; choose a drafter that V2 serves"
            )
        vllm_config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{LookaheadFlashBackend.__name__}")
        model_state.install(vllm_config)

    def attention_impl(self) -> type:
        """Return the attention class that every layer must have."""
        return LookaheadFlashImpl


def _backend() -> WorkerBackend:
    backend = current()
    assert backend is not None, "the attention backend is installed by the worker class alone"
    return backend
