"""What vLLM's configuration says about the backend: whether it is on, its settings, and what it refuses."""

from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.version import __version__ as vllm_version

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.layout import SparseLayout
from oasiskv.core.switch_rule import DEVICE_SPEEDS, SwitchRule
from oasiskv.engine.vllm.names import CONNECTOR, HANDOVER, VLLM_VERSION, WORKERS
from oasiskv.kernels.formats import FP8
from oasiskv.kernels.rows import SummaryLayout

MAX_ARRIVING = 8
"""Requests whose KV comes from staging while others run: each holds what it needs, and they share the network."""


def is_enabled(vllm_config: VllmConfig) -> bool:
    """Say whether this engine runs with the backend: its connector is configured."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def load(vllm_config: VllmConfig) -> LookaheadConfig:
    """Read the backend's settings from `kv_connector_extra_config`.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    given = {name: value for name, value in transfer.kv_connector_extra_config.items() if name != HANDOVER}
    config = LookaheadConfig.from_mapping(given)
    return config.within(max_blocks(vllm_config))


def asks(vllm_config: VllmConfig) -> bool:
    """Say whether devices ask for blocks that are in staging, as they must where their background calls nobody."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector_extra_config.get(HANDOVER) is True


def sparse_layout(config: LookaheadConfig, block_size: int, head_dim: int, dtype_bytes: int) -> SparseLayout:
    """Return which blocks a sparse request holds.

    Raises:
        UnsupportedError: summary rows of this head_dim cannot be fp8.
    """
    summaries = SummaryLayout.of(config, block_size, head_dim, dtype_bytes)
    return SparseLayout(budget_blocks=config.budget_blocks, rows_per_page=summaries.rows_per_page)


def layout_of(vllm_config: VllmConfig, config: LookaheadConfig) -> SparseLayout:
    """Return the same from vLLM's configuration, before there is a cache."""
    head_dim = vllm_config.model_config.get_head_size()
    return sparse_layout(config, vllm_config.cache_config.block_size, head_dim, cache_dtype(vllm_config).itemsize)


def cache_dtype(vllm_config: VllmConfig) -> torch.dtype:
    """Return the number format of the engine's KV cache; vLLM's tensors of fp8 have the dtype uint8."""
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype if vllm_config.cache_config.cache_dtype == "auto" else FP8


def switch_rule(vllm_config: VllmConfig, config: LookaheadConfig) -> SwitchRule:
    """Return when requests become sparse."""
    if config.switch == "late":
        return SwitchRule()
    speed = DEVICE_SPEEDS.get(current_platform.get_device_name()) if config.switch == "auto" else None
    if speed is None:
        return SwitchRule(is_early=True)
    return SwitchRule(cost=speed.step_cost(config, **step_sizes(vllm_config, config)))


def step_sizes(vllm_config: VllmConfig, config: LookaheadConfig) -> dict[str, int]:
    """Return what a step of one process reads, as `DeviceSpeed.step_cost` takes it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_ranks, text = parallel.tensor_parallel_size, model.hf_text_config
    num_layers, num_heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    # The matrices that a step reads, by the usual shapes; of a mixture of experts all, as large batches do.
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    hidden = text.hidden_size
    attention = 2 * hidden * model.get_head_size() * (text.num_attention_heads + num_heads * num_ranks)
    weights = num_layers * (attention + 3 * num_experts * hidden * width) + hidden * text.vocab_size
    unit = 2 * vllm_config.cache_config.block_size * model.get_head_size()
    return {
        "weight_bytes": weights * model.dtype.itemsize // num_ranks,
        "num_layers": num_layers,
        "num_kv_heads": num_heads,
        "unit_bytes": unit * cache_dtype(vllm_config).itemsize,
        "rows_per_page": layout_of(vllm_config, config).rows_per_page,
    }


def max_blocks(vllm_config: VllmConfig) -> int:
    """Return the blocks of the longest request, those of draft tokens included."""
    return cdiv(vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size) + 1


def max_arriving(vllm_config: VllmConfig) -> int:
    """Return for how many requests at once, beyond those that run, KV may come from staging."""
    return min(MAX_ARRIVING, vllm_config.scheduler_config.max_num_seqs)


def num_host_blocks(vllm_config: VllmConfig, config: LookaheadConfig, host_block_bytes: int) -> int:
    """Return how many host blocks the configured bytes hold; the same on the scheduler and on every worker.

    Raises:
        ConfigError: the longest request would not fit.
    """
    count, needed = config.host_pool_bytes // host_block_bytes, max_blocks(vllm_config)
    if count < needed:
        raise ConfigError(
            f"host_pool_bytes: expected at least {needed * host_block_bytes} (max_model_len "
            f"{vllm_config.model_config.max_model_len} takes {needed} blocks of {host_block_bytes} bytes), "
            f"got {config.host_pool_bytes}; raise it or lower --max-model-len"
        )
    return count


@dataclass(frozen=True, slots=True)
class _Rule:
    is_broken: bool
    setting: str
    expected: str
    got: object


def check(vllm_config: VllmConfig) -> None:
    """Refuse what the backend cannot serve, each with the setting and what to do instead.

    Raises:
        ConfigError: a setting must be another one.
        UnsupportedError: the model or a feature is not handled.
    """
    if vllm_version.split("+")[0] != VLLM_VERSION:
        raise UnsupportedError(f"vllm: expected version {VLLM_VERSION}, got {vllm_version}")
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    scheduler, drafter = vllm_config.scheduler_config, vllm_config.speculative_config
    offload = vllm_config.offload_config
    transfer = vllm_config.kv_transfer_config
    if cache.kv_offloading_size is not None:  # for which vLLM puts another connector in the place of the one configured
        raise UnsupportedError(
            f"--kv-offloading-size: expected none, got {cache.kv_offloading_size}; or serve without OasisKV"
        )
    if transfer is None or not is_enabled(vllm_config):
        got = None if transfer is None else transfer.kv_connector
        raise ConfigError(f"kv_transfer_config.kv_connector: expected {CONNECTOR}, got {got}")
    text = model.hf_text_config
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    unsupported = [
        _Rule(model.use_mla, "model", "multi-head or grouped-query attention", "multi-head latent attention"),
        _Rule(model.get_sliding_window() is not None, "model", "no sliding window", model.get_sliding_window()),
        _Rule(layer_types != {"full_attention"}, "model", "full-attention layers only", sorted(layer_types)),
        _Rule(model.attention_chunk_size is not None, "model", "no chunked attention", model.attention_chunk_size),
        _Rule(model.is_hybrid or model.is_attention_free, "model", "attention layers only", model.architecture),
        _Rule(model.is_encoder_decoder, "model", "a decoder-only model", model.architecture),
        _Rule(model.runner_type != "generate", "--runner", "generate", model.runner_type),
        _Rule(
            parallel.pipeline_parallel_size > 1,
            "--pipeline-parallel-size",
            "1 (use --tensor-parallel-size)",
            parallel.pipeline_parallel_size,
        ),
        _Rule(
            parallel.decode_context_parallel_size > 1,
            "--decode-context-parallel-size",
            "1",
            parallel.decode_context_parallel_size,
        ),
        _Rule(
            parallel.prefill_context_parallel_size > 1,
            "--prefill-context-parallel-size",
            "1",
            parallel.prefill_context_parallel_size,
        ),
        _Rule(parallel.enable_dbo, "--enable-dbo", "off", "on"),
        _Rule(
            bool(cache.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers",
            "none",
            cache.kv_cache_dtype_skip_layers,
        ),
        _Rule(cache.kv_sharing_fast_prefill, "--kv-sharing-fast-prefill", "off", "on"),
        _Rule(model.enable_sleep_mode, "--enable-sleep-mode", "off", "on"),
        _Rule(offload.uva.cpu_offload_gb > 0, "--cpu-offload-gb", "0", offload.uva.cpu_offload_gb),
        _Rule(
            offload.prefetch.offload_group_size > 0,
            "--offload-group-size",
            "0",
            offload.prefetch.offload_group_size,
        ),
    ]
    if drafter is not None:
        unsupported += [
            _Rule(
                drafter.num_speculative_tokens != 1,
                "speculative_config.num_speculative_tokens",
                "1",
                drafter.num_speculative_tokens,
            ),
            _Rule(
                drafter.method not in ("eagle3", "ngram", "draft_model"),
                "speculative_config.method",
                "eagle3, ngram or draft_model",
                drafter.method,
            ),
            _Rule(
                drafter.disable_padded_drafter_batch,
                "speculative_config.disable_padded_drafter_batch",
                "false",
                "true",
            ),
        ]
    for rule in unsupported:
        if rule.is_broken:
            raise UnsupportedError(
                f"{rule.setting}: expected {rule.expected}, got {rule.got}; or serve without OasisKV"
            )

    block_size, worker = cache.block_size, WORKERS["cpu" if vllm_config.device_config.device_type == "cpu" else "cuda"]
    wrong = [
        _Rule(block_size is None or block_size % 16 != 0, "--block-size", "a multiple of 16", block_size),
        _Rule(parallel.worker_cls != worker, "--worker-cls", worker, parallel.worker_cls),
        _Rule(transfer.kv_role != "kv_both", "kv_transfer_config.kv_role", "kv_both", transfer.kv_role),
        _Rule(not scheduler.scheduler_reserve_full_isl, "--scheduler-reserve-full-isl", "on", "off"),
    ]
    for rule in wrong:
        if rule.is_broken:
            raise ConfigError(f"{rule.setting}: expected {rule.expected}, got {rule.got}")
    config = load(vllm_config)
    config.check_cache_dtype(cache.cache_dtype)
    layout_of(vllm_config, config)
