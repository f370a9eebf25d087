"""Door of rounding the engine's blocks to fp8."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.formats import FP8
from oasiskv.kernels.fp8 import reference


def round_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Round whole blocks (all heads) of one layer in place to what an fp8 host pool holds of them.

    Args:
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; read and written.
        block_ids: `int32[n]`, distinct engine blocks.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    check.cache("kv_cache", kv_cache)
    if kv_cache.dtype == FP8:
        raise ConfigError("kv_cache: expected numbers to round, got fp8")
    check.tensor("block_ids", block_ids, (None,), device=kv_cache.device)
    _round_blocks(kv_cache, block_ids)


def _on_cuda(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    from oasiskv.kernels.fp8 import kernel

    kernel.round_blocks(kv_cache, block_ids)


_round_blocks = library.register(
    "round_blocks(Tensor(a!) kv_cache, Tensor block_ids) -> ()", cpu=reference.round_blocks, cuda=_on_cuda
)
