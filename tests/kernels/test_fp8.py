"""Rounding to fp8, against a table of all its numbers."""

import itertools
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.fp8 import round_blocks
from oasiskv.kernels.fp8.reference import narrow, views, widen
from oasiskv.kernels.testing import (
    FP8_NUMBERS,
    Shape,
    distinct,
    far,
    generator,
    host_units,
    nearest,
    number_of,
    numbers,
)

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1),
    Shape(block_size=32, head_dim=96, num_kv_heads=3),
    Shape(block_size=64, head_dim=256, num_kv_heads=1),
    Shape(block_size=16, head_dim=128, num_kv_heads=8),
]


def plainly(half: list[float], dtype: torch.dtype) -> list[float]:
    """The K or the V of a unit, rounded one number at a time."""
    infinity = float("inf")
    finite = [abs(x) for x in half if abs(x) < infinity]
    scale = 2.0**-100
    while max(finite, default=0) > 448 * scale and scale < 2.0 ** (8 if dtype == torch.float16 else 120):
        scale *= 2
    largest = max(x for x in FP8_NUMBERS if float(torch.tensor(x * scale, dtype=torch.float64).to(dtype)) < infinity)
    return [x if x != x else number_of(nearest(x / scale if abs(x) < infinity else x, largest)) * scale for x in half]


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits, but for those of NaN."""
    assert torch.equal(got.isnan(), wanted.isnan())
    ints = {2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.nan_to_num(1, 2, 3).view(ints), wanted.nan_to_num(1, 2, 3).view(ints))


HALVES = {
    "ordinary": [1.0, -2.3, 0.4, 17.3, -0.01, 3.14159, 0.0, -0.0],
    "all numbers between two of the format": [448 - index / 8 for index in range(1025)],
    "ties": [x for a, b in itertools.pairwise(FP8_NUMBERS) for x in ((a + b) / 2, -(a + b) / 2)],
    "carries": [31.6, 15.6, 7.9, 1.97, 0.99, 448.0, -0.0155, 0.0157],
    "just above what a scale holds": [448.5, 449.0, 1.0],
    "small beside large": [448.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-11, -(2.0**-7), 0.0079],
    "zeros": [0.0, -0.0, 0.0],
    "tiny": [2.0**-24, 3 * 2.0**-24, -(2.0**-20)],
    "infinities": [1.0, float("inf"), -float("inf"), 0.3],
    "infinities alone": [float("inf"), -float("inf")],
    "NaN": [float("nan"), 1.0, -5.3],
    "NaN alone": [float("nan")],
    "largest float16": [65504.0, -65504.0, 1.0, 61441.0, 60000.0],
}


@pytest.mark.parametrize("name", HALVES)
def test_each_number_becomes_the_nearest_that_its_scale_has(
    implementation: str, dtype: torch.dtype, device: str, name: str
) -> None:
    head_dim, block_size = 64, 64
    exact = torch.tensor(HALVES[name], dtype=torch.float64).to(dtype)
    half = torch.zeros(head_dim * block_size, dtype=dtype)
    half[: len(exact)] = exact
    wanted = torch.tensor(plainly(half.double().tolist(), dtype), dtype=torch.float64).to(dtype).view(block_size, -1)
    other = torch.full_like(wanted, 3.0)
    cache = torch.stack([torch.cat([half.view(block_size, -1), other], -1), torch.cat([other, wanted], -1)])[:, None]
    cache = cache.to(device).contiguous()
    import_module(f"oasiskv.kernels.fp8.{implementation}").round_blocks(
        cache, torch.tensor([0, 1], device=device).int()
    )
    assert_same(cache[0, 0].cpu(), torch.cat([wanted, other], -1))
    # What is rounded rounds to itself.
    assert_same(cache[1, 0].cpu(), torch.cat([other, wanted], -1))


@pytest.mark.parametrize("size", [2.0**-120, 1e-30, 1.0, 1e30, 1.9375 * 2.0**127, 1.99 * 2.0**127])
def test_scales_reach_over_all_of_float32(implementation: str, device: str, size: float) -> None:
    cache = torch.randn(1, 2, 16, 128, generator=generator(1)) * 0.2
    cache[0, :, 3, 5], cache[0, :, 7, 99] = 1.0, -1.0
    cache = cache.clamp(-1, 1) * size
    wanted = [
        torch.tensor(plainly(half.flatten().double().tolist(), torch.float32)).view(16, 64)
        for head in cache[0]
        for half in head.split(64, -1)
    ]
    cache = cache.to(device)
    import_module(f"oasiskv.kernels.fp8.{implementation}").round_blocks(cache, torch.zeros(1, device=device).int())
    for got, plain in zip((half for head in cache[0].cpu() for half in head.split(64, -1)), wanted, strict=True):
        assert_same(got, plain)


@pytest.mark.parametrize("base", SHAPES, ids=lambda s: f"{s.num_kv_heads}-{s.block_size}x{s.head_dim}")
def test_only_the_named_blocks_are_rounded(implementation: str, dtype: torch.dtype, device: str, base: Shape) -> None:
    shape, random = replace(base, device=device, dtype=dtype), generator(3)
    cache, ids = numbers((9, *shape.unit), random, shape), distinct(4, 9, random, device)
    wanted = cache.cpu().clone()
    for block in ids.tolist():
        wanted[block] = widen(*narrow(wanted[block]), dtype)
    import_module(f"oasiskv.kernels.fp8.{implementation}").round_blocks(cache, ids)
    assert torch.equal(cache.cpu(), wanted)


def test_offsets_past_four_gigabytes(implementation: str, device: str) -> None:
    shape, random = Shape(device=device, dtype=torch.float16), generator(4)
    cache, ids = numbers((5, *shape.unit), random, shape), distinct(2, 5, random, device)
    longer, move = far(cache)
    module = import_module(f"oasiskv.kernels.fp8.{implementation}")
    module.round_blocks(longer, ids + move)
    assert not torch.equal(longer[move:], cache)
    module.round_blocks(cache, ids)
    assert torch.equal(longer[move:], cache)


def test_no_block_is_no_work(implementation: str, device: str) -> None:
    cache = torch.randn(2, 1, 16, 128, device=device)
    before = cache.clone()
    none = torch.zeros(0, dtype=torch.int32, device=device)
    import_module(f"oasiskv.kernels.fp8.{implementation}").round_blocks(cache, none)
    assert torch.equal(cache, before)


def test_the_scales_of_a_pool_lie_behind_its_numbers() -> None:
    shape = Shape(num_kv_heads=3, is_fp8=True)
    units = host_units(5, shape, generator(0))
    found, scales = views(units, shape.unit)
    assert units.shape == (5, 2, 3 * 16 * 128 + 128)
    assert found.shape == (5, 2, 3, 16, 128)
    assert scales.shape == (5, 2, 3, 2)
    assert torch.equal(units[3, 1, 2 * 2048 : 3 * 2048], found[3, 1, 2].flatten())
    assert torch.equal(units[3, 1, 3 * 2048 : 3 * 2048 + 24], scales[3, 1].flatten().view(torch.uint8))
    assert not units[..., 3 * 2048 + 24 :].any()


def test_blocks_that_are_no_list_of_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^block_ids: expected torch.int32, got torch.int64"):
        round_blocks(torch.zeros(4, 2, 16, 8), torch.zeros(2, dtype=torch.int64))
