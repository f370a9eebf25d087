"""What is asked of a loaded model's attention layers."""

import torch
from vllm.model_executor.layers.attention import Attention

from oasiskv.core.errors import UnsupportedError


def check_layer(name: str, layer: Attention, impl_class: type) -> None:
    """Refuse a layer whose attention is not one that the backend serves.

    Raises:
        UnsupportedError: it is not.
    """
    impl = layer.impl
    if type(impl) is not impl_class:
        raise UnsupportedError(f"{name}: expected attention by {impl_class.__name__}, got {type(impl).__name__}")
    checks = {
        "logits soft cap": getattr(impl, "logits_soft_cap", None),
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "KV shared between layers": getattr(impl, "kv_sharing_target_layer_name", None),
        "scales of K, V or queries by head": any(scale.numel() > 1 for scale in _scales(layer)),
    }
    for feature, value in checks.items():
        if value:
            raise UnsupportedError(f"model: expected no {feature}, got it in {name}; serve this model without OasisKV")


def is_query_fp8(layer: Attention) -> bool:
    """Say whether vLLM makes fp8 of a layer's queries before its attention gets them."""
    return layer.query_quant is not None and bool(layer.impl.supports_quant_query_input)


def key_scale(layer: Attention) -> float:
    """Return what products of the queries that a layer's attention gets and the keys of its fp8 cache are short of."""
    return float(layer._k_scale) * (float(layer._q_scale) if is_query_fp8(layer) else 1.0)


def _scales(layer: Attention) -> tuple[torch.Tensor, ...]:
    return layer._q_scale, layer._k_scale, layer._v_scale
