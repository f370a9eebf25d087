"""Checks of tensor arguments at the doors: shapes, dtypes and devices alone, so that no call waits for a device."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.core.host_memory import fp8_part_bytes
from oasiskv.kernels.formats import FP8, WIDE
from oasiskv.kernels.rows import Row, SummaryLayout

_CONTENT = (*WIDE, FP8)
_COUNTS = (torch.int32,)


def tensor(
    field: str,
    value: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...] = _COUNTS,
    device: torch.device | None = None,
    *,
    rows_may_be_apart: bool = False,
) -> None:
    """Check one tensor argument.

    Args:
        field: Name of the argument, which starts the message.
        value: The argument.
        shape: Expected shape; None allows any length.
        dtypes: Expected one of these.
        device: Expected device; None allows any.
        rows_may_be_apart: Allow a matrix whose rows do not touch, such as columns taken from a wider table.

    Raises:
        ConfigError: The argument differs.
    """
    if len(value.shape) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, value.shape, strict=True)
    ):
        wanted = ", ".join("*" if length is None else str(length) for length in shape)
        raise ConfigError(f"{field}: expected shape [{wanted}], got {list(value.shape)}")
    if value.dtype not in dtypes:
        raise ConfigError(f"{field}: expected {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ConfigError(f"{field}: expected a tensor on {device}, got one on {value.device}")
    if not value.is_contiguous() and not (rows_may_be_apart and value.stride(-1) == 1):
        raise ConfigError(f"{field}: expected contiguous memory, got strides {list(value.stride())}")


def cache(field: str, value: torch.Tensor) -> tuple[int, int, int]:
    """Check a layer's KV cache and return `(num_kv_heads, block_size, 2 * head_dim)`.

    Args:
        field: Name of the argument, which starts the message.
        value: The argument.

    Raises:
        ConfigError: It is not `[num_blocks, num_kv_heads, block_size, 2 * head_dim]` in float32, float16, bfloat16 or
            float8_e4m3fn.
    """
    tensor(field, value, (None, None, None, None), _CONTENT)
    _, num_kv_heads, block_size, width = value.shape
    if width % 2:
        raise ConfigError(f"{field}: expected an even last dimension, 2 * head_dim, got {width}")
    return num_kv_heads, block_size, width


def units(value: torch.Tensor, layer: int, kv_cache: torch.Tensor) -> None:
    """Check the host pool and the index of a layer in it.

    Args:
        value: The argument `units`.
        layer: The argument `layer`.
        kv_cache: The layer's KV cache, already checked.

    Raises:
        ConfigError: The pool does not hold units of this cache, or has no such layer.
    """
    if value.dtype == torch.uint8 and kv_cache.dtype != FP8:
        _, num_kv_heads, block_size, width = kv_cache.shape
        tensor("units", value, (None, None, fp8_part_bytes(num_kv_heads, block_size, width // 2)), (torch.uint8,))
    else:
        tensor("units", value, (None, None, *kv_cache.shape[1:]), (kv_cache.dtype,))
    if not 0 <= layer < value.shape[1]:
        raise ConfigError(f"layer: expected 0 to {value.shape[1] - 1}, got {layer}")


def rows(value: torch.Tensor, device: torch.device) -> int:
    """Check the step's rows and return how many there are.

    Args:
        value: The argument `rows`.
        device: Expected device.

    Raises:
        ConfigError: It is not `int32[num_rows, len(Row)]` on that device.
    """
    tensor("rows", value, (None, len(Row)), _COUNTS, device)
    return value.shape[0]


def layout(value: SummaryLayout, cache_shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Check that summaries of this layout fit the blocks of a cache.

    Args:
        value: The argument `layout`.
        cache_shape: What `cache` returned.
        dtype: Dtype of the cache.

    Raises:
        ConfigError: Block size, head dimension, or with fp8 rows the bytes of an element, differ from the cache's.
    """
    _, block_size, width = cache_shape
    if (value.block_size, 2 * value.head_dim) != (block_size, width):
        raise ConfigError(
            f"layout: expected block_size {block_size} and head_dim {width // 2}, "
            f"got {value.block_size} and {value.head_dim}"
        )
    if value.is_fp8 and value.dtype_bytes != dtype.itemsize:
        raise ConfigError(f"layout: expected dtype_bytes {dtype.itemsize}, got {value.dtype_bytes}")
