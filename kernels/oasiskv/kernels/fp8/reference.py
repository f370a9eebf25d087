"""What fp8 units mean, in plain torch.

Numbers are e4m3 without infinities. The K and the V of a unit have a scale each: the least power of two with which the
largest of them is at most 448, so scaling rounds nothing and a widened unit narrows to itself again.
"""

import torch

from oasiskv.core.host_memory import FP8_SCALE_BYTES

NAN = 0x7F
"""The one NaN that is stored."""

LARGEST = 448.0
"""The largest e4m3 number."""

LEAST_EXPONENT = -100
"""Of a scale: far below any key or value that matters, and far enough from where float32 loses digits."""

TOP_LARGEST = 240.0
"""The largest number with a dtype's largest scale: 256 times that scale is beyond the dtype."""


def top_exponent(dtype: torch.dtype) -> int:
    """Return the exponent of the largest scale that numbers of a dtype need."""
    return 8 if dtype == torch.float16 else 120


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return `2 ** exponent` as float32, exact for -126 to 127."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def narrow(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to fp8, to nearest, ties to even.

    Infinities become the largest number of their scale, which finite numbers alone decide. NaN stays NaN.

    Args:
        blocks: `[..., block_size, 2 * head_dim]`, K|V per token.

    Returns:
        Bytes of the numbers, `uint8` of the same shape, and scales, `float32[..., 2]`, of K and of V.
    """
    halves = _halves(blocks.float())
    largest = torch.where(halves.isfinite(), halves.abs(), 0.0).amax((-3, -1))
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2 ** exponent, fraction from 0.5 to 1
    exponent = exponent - 9 + (fraction > LARGEST / 512).int()
    top = top_exponent(blocks.dtype)
    exponent = torch.where(largest > 0, exponent.clamp(LEAST_EXPONENT, top), LEAST_EXPONENT)
    limit = torch.where(exponent == top, TOP_LARGEST, LARGEST)[..., None, :, None]
    scaled = halves * power_of_two(-exponent)[..., None, :, None]
    numbers = torch.minimum(torch.maximum(scaled, -limit), limit).to(torch.float8_e4m3fn).view(torch.uint8)
    numbers = torch.where(scaled.isnan(), NAN, numbers)
    return numbers.flatten(-2), power_of_two(exponent)


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """Tell K from V: `[..., block_size, 2, head_dim]`."""
    return blocks.view(*blocks.shape[:-1], 2, blocks.shape[-1] // 2)


def widen(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn what `narrow` returned into numbers of a dtype; exact but for subnormal float16."""
    halves = _halves(numbers.view(torch.float8_e4m3fn).float())
    return (halves * scales[..., None, :, None]).to(dtype).flatten(-2)


def views(units: torch.Tensor, unit: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and the scales in a pool of fp8 units.

    Args:
        units: `uint8[num_host_blocks, num_layers, part_bytes]`.
        unit: `(num_kv_heads, block_size, 2 * head_dim)`.

    Returns:
        `uint8[num_host_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]` and
        `float32[num_host_blocks, num_layers, num_kv_heads, 2]`; both share the pool's memory.
    """
    num_kv_heads, block_size, width = unit
    first = num_kv_heads * block_size * width
    scales = units[..., first : first + FP8_SCALE_BYTES * num_kv_heads].view(torch.float32)
    blocks = units.shape[:-1]
    return units[..., :first].view(*blocks, *unit), scales.view(*blocks, num_kv_heads, 2)


def read(
    units: torch.Tensor, layer: int, host_ids: torch.Tensor, heads: torch.Tensor, kv_cache: torch.Tensor
) -> torch.Tensor:
    """Return units of a pool, fp8 or not, as the cache holds them when they are resident.

    Args:
        units: The pool.
        layer: Index into its second dimension.
        host_ids: `int64`, host block of each unit, where the pool is.
        heads: `int64`, its KV head; broadcasts with `host_ids`.
        kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`: gives shape and dtype.

    Returns:
        `[..., block_size, 2 * head_dim]` in the dtype of the cache, where the pool is.
    """
    if units.dtype != torch.uint8:
        return units[host_ids, layer, heads]
    numbers, scales = views(units, tuple(kv_cache.shape[1:]))
    return widen(numbers[host_ids, layer, heads], scales[host_ids, layer, heads], kv_cache.dtype)


def write(units: torch.Tensor, layer: int, host_ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Write whole blocks into one layer of a pool, fp8 or not.

    Args:
        units: The pool.
        layer: Index into its second dimension.
        host_ids: `int64[n]`, where the pool is.
        blocks: `[n, num_kv_heads, block_size, 2 * head_dim]`.
    """
    if units.dtype != torch.uint8:
        units[host_ids, layer] = blocks.to(units.device)
        return
    for view, values in zip(views(units, tuple(blocks.shape[1:])), narrow(blocks), strict=True):
        view[host_ids, layer] = values.to(units.device)


def round_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Round blocks of the engine in place; see `op.round_blocks`."""
    kv_cache[block_ids.long()] = widen(*narrow(kv_cache[block_ids.long()]), kv_cache.dtype)
