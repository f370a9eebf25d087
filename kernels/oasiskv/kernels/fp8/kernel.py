"""Narrowing and widening in Triton, for every kernel that touches fp8 units, and rounding blocks in place.

All arithmetic on scales is on the bits of powers of two, so that nothing depends on how a device divides. A GPU's own
conversions (NATIVE) serve what is copied. Where a kernel narrows and goes on with the narrow numbers it counts on bits:
on an H200, with Triton 3.6, such kernels read neighbours' numbers for some elements of a vector.
"""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.formats import FP8
from oasiskv.kernels.fp8.reference import LEAST_EXPONENT, top_exponent

NO_TOP = tl.constexpr(127)
"""For numbers that are never widened to a dtype with their scale: no scale reaches it."""


@triton.jit
def finite_bits(content):
    """Return the bits of the absolute values of float32 numbers, 0 for those that are not finite; they order alike."""
    bits = content.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < 0x7F800000, bits, 0)


@triton.jit
def exponent_of(largest, LEAST: tl.constexpr, TOP: tl.constexpr):
    """Return the exponent of the scale of numbers, from the bits of the largest of them."""
    # 448 is 1.75 * 2 ** 8.
    exponent = (largest >> 23) - (127 + 8) + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, LEAST), TOP)


@triton.jit
def power_of_two(exponent):
    """Return it as float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def narrow(content, exponent, TOP: tl.constexpr, NATIVE: tl.constexpr):
    """Return float32 numbers as bytes of fp8; `exponent`, of their scale, broadcasts."""
    limit = tl.where(exponent == TOP, 240.0, 448.0)
    scaled = content * power_of_two(-exponent)
    # Comparisons rather than minimum and maximum, which may drop NaN.
    scaled = tl.where(scaled > limit, limit, scaled)
    scaled = tl.where(scaled < -limit, -limit, scaled)
    if NATIVE:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # Triton's interpreter loses the carry of a number that rounds up to the next power of two.
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # From 2 ** 14 on, float32 counts in steps of 2 ** -9, the least fp8 number.
    counted = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF
    rounded = tl.where(size < (127 - 6) << 23, counted, normal)
    return tl.where(size > 0x7F800000, 0x7F, rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def number_of(numbers, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return bytes of fp8 as numbers of a dtype, without a scale; every dtype has them all."""
    if NATIVE:
        return numbers.to(tl.float8e4nv, bitcast=True).to(dtype)
    code = numbers.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    # The sign as a bit: a GPU subtracts from 0 to negate, which makes of -0 a 0.
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def widen(numbers, scale, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Return bytes of fp8 as numbers of a dtype; `scale`, float32, broadcasts."""
    return (number_of(numbers, tl.float32, NATIVE) * scale).to(dtype)


@triton.jit
def float_of(content):
    """Return what a cache holds as float32 numbers; bytes are those of an fp8 cache."""
    if content.dtype == tl.uint8:
        return number_of(content, tl.float32, False)
    else:
        return content.to(tl.float32)


@triton.jit
def held_as(numbers, dtype: tl.constexpr):
    """Return float32 numbers as a cache of a dtype holds them, rounded to nearest; bytes for an fp8 cache."""
    if dtype == tl.uint8:
        return narrow(numbers, tl.full([], 0, tl.int32), NO_TOP, False)
    else:
        return numbers.to(dtype)


@triton.jit
def narrow_outward(content, exponent, UP: tl.constexpr):
    """Return float32 numbers as bytes of fp8 that are not less (UP) or not greater; what is not finite becomes NaN."""
    bits = content.to(tl.int32, bitcast=True)
    is_away = (bits >= 0) if UP else (bits < 0)
    scaled = (content * power_of_two(-exponent)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = ((scaled + tl.where(is_away, 0xFFFFF, 0)) >> 20) - ((127 - 7) << 3)
    # Below 2 ** -6 the format counts in steps of 2 ** -9.
    steps = tl.minimum(scaled, (127 - 6) << 23).to(tl.float32, bitcast=True) * 512.0
    counted = steps.to(tl.int32)
    # A number far below its scale may become 0 when it is scaled, but its bound must not.
    is_above = (counted.to(tl.float32) < steps) | ((scaled == 0) & ((bits & 0x7FFFFFFF) != 0))
    counted += (is_away & is_above).to(tl.int32)
    rounded = tl.where(scaled < (127 - 6) << 23, counted, normal)
    is_finite = (bits & 0x7FFFFFFF) < 0x7F800000
    return tl.where(is_finite, rounded | ((bits >> 24) & 0x80), 0x7F).to(tl.uint8)


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def _round_blocks(
    kv_cache, block_ids, H: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, LEAST: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    block = tl.load(block_ids + tl.program_id(0)).to(tl.int64)
    # [2, B, DIM]: K and V.
    half, token, dim = tl.arange(0, 2)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, DIM)[None, None, :]
    inside = dim < D
    at = kv_cache + (block * H + tl.program_id(1)) * (B * 2 * D) + (token * (2 * D) + half * D + dim)
    content = tl.load(at, mask=inside, other=0).to(tl.float32)
    exponent = exponent_of(tl.max(tl.max(finite_bits(content), axis=2), axis=1), LEAST, TOP)[:, None, None]
    numbers = narrow(content, exponent, TOP, False)
    tl.store(at, widen(numbers, power_of_two(exponent), kv_cache.dtype.element_ty, False), mask=inside)


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels take it: fp8 numbers as their bytes, since the kernels convert them by bits."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def constants(kv_cache: torch.Tensor) -> dict[str, int]:
    """Return the compile-time arguments of narrowing numbers of a cache."""
    return {"LEAST": LEAST_EXPONENT, "TOP": top_exponent(kv_cache.dtype)}


def round_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Launch it on the current stream; see `op.round_blocks`."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    if len(block_ids) == 0:
        return
    _round_blocks[(len(block_ids), num_kv_heads)](
        kv_cache,
        block_ids,
        H=num_kv_heads,
        B=block_size,
        D=width // 2,
        DIM=triton.next_power_of_2(width // 2),
        **constants(kv_cache),
        num_warps=4 if block_size * width <= 8192 else 8,
    )
