"""Input builders and tolerances that tests and benchmarks of the operations share."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from oasiskv.core.host_memory import fp8_part_bytes
from oasiskv.kernels.fp8.reference import write
from oasiskv.kernels.rows import Counter, Row, SummaryLayout

TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest `|out - wanted| / max|wanted|` of sums of products whose operands have this dtype."""

POISON = 1.7e4
"""Fills what must not be read: finite, so that a kernel that skips NaN shows a wrong read too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one case."""

    num_kv_heads: int = 2
    group: int = 1
    """Query heads per KV head."""
    block_size: int = 16
    head_dim: int = 64
    kind: Literal["minmax", "mid"] = "minmax"
    """Kind of the summaries."""
    num_requests: int = 3
    budget: int = 4
    """Slots per request and KV head."""
    max_blocks: int = 40
    """Most complete blocks of a request."""
    num_layers: int = 2
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False
    """Whether the host pool holds fp8 units."""
    has_fp8_rows: bool = False
    """Whether summaries are fp8."""
    device: str = "cpu"

    @property
    def layout(self) -> SummaryLayout:
        """Layout of the summaries."""
        return SummaryLayout(
            kind=self.kind,
            block_size=self.block_size,
            head_dim=self.head_dim,
            is_fp8=self.has_fp8_rows,
            dtype_bytes=self.dtype.itemsize,
        )

    @property
    def unit(self) -> tuple[int, int, int]:
        """Shape of a block: heads, tokens, K and V side by side."""
        return self.num_kv_heads, self.block_size, 2 * self.head_dim


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator on the CPU, so that every device gets the same inputs."""
    return torch.Generator().manual_seed(seed)


def numbers(
    shape: tuple[int, ...], random: torch.Generator, like: Shape, *, whole: bool = False, low: int = -2, high: int = 2
) -> torch.Tensor:
    """Return normal numbers, or whole ones in [low, high], whose sums of products are exact in every dtype used here.

    Args:
        shape: Shape of the result.
        random: Source of randomness.
        like: Gives dtype and device.
        whole: Draw whole numbers; many are equal.
        low: Least whole number.
        high: Greatest whole number.
    """
    if whole:
        drawn = torch.randint(low, high + 1, shape, generator=random).float()
    else:
        drawn = torch.randn(shape, generator=random)
    return drawn.to(like.device, like.dtype)


def distinct(count: int, below: int, random: torch.Generator, device: str) -> torch.Tensor:
    """Return `int32[count]` distinct numbers below a limit, in random order."""
    return torch.randperm(below, generator=random)[:count].int().to(device)


def step_rows(rows: list[tuple[int, int, int, int]], device: str, caps: list[int] | None = None) -> torch.Tensor:
    """Return `rows` from (request, complete blocks, step, engine block that finished) each, and caps, else 0."""
    given = [(*row, cap) for row, cap in zip(rows, caps or [0] * len(rows), strict=True)]
    return torch.tensor(given, dtype=torch.int32).reshape(len(rows), len(Row)).to(device)


def counters(shape: Shape) -> torch.Tensor:
    """Return one layer's counters at zero."""
    return torch.zeros(shape.num_kv_heads, len(Counter), dtype=torch.int64, device=shape.device)


def host_units(num_host_blocks: int, shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Return a pool of random units in host memory, pinned if the device is not the CPU."""
    drawn = torch.randn((num_host_blocks, shape.num_layers, *shape.unit), generator=random).to(shape.dtype)
    if shape.is_fp8:
        part_bytes = fp8_part_bytes(shape.num_kv_heads, shape.block_size, shape.head_dim)
        units = torch.zeros(num_host_blocks, shape.num_layers, part_bytes, dtype=torch.uint8)
        for layer in range(shape.num_layers):
            write(units, layer, torch.arange(num_host_blocks), drawn[:, layer])
        drawn = units
    return drawn if shape.device == "cpu" else drawn.pin_memory()


def far(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a much longer tensor that ends with a given one, and at which index that begins: past four gigabytes.

    What lies before is not touched: on the CPU it takes no memory.
    """
    row_bytes = tensor[0].numel() * tensor.element_size()
    move = 2**32 // row_bytes + 1_000
    longer = torch.empty(
        move + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device, pin_memory=tensor.is_pinned()
    )
    longer[move:] = tensor
    return longer, move


def number_of(code: int) -> float:
    """Read a number of e4m3 from its bits: sign, four of exponent, three of fraction."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


FP8_NUMBERS = [number_of(code) for code in range(127)]
"""All that are not negative, ascending; code 127 is NaN."""


def nearest(number: float, largest: float = 448.0) -> int:
    """Return the code of the nearest number of e4m3 up to a largest one; of two, the even code."""
    candidates = [code for code in range(127) if FP8_NUMBERS[code] <= largest]
    code = min(candidates, key=lambda code: (abs(FP8_NUMBERS[code] - min(abs(number), largest)), code % 2))
    return code | 128 * (math.copysign(1, number) < 0)


def at_least(number: float) -> int:
    """Return the code of the least number of e4m3 that is not less."""
    if number > 0:
        return bisect_left(FP8_NUMBERS, number)
    return 128 + bisect_right(FP8_NUMBERS, -number) - 1


def fp8_row(keys: Sequence[Sequence[float]], kind: Literal["minmax", "mid"]) -> bytes:
    """Summarize the keys of a block as fp8, one number at a time.

    Returns:
        A byte for each number of the row, and that of the exponent. A zero has no sign.
    """
    columns = list(zip(*keys, strict=True))
    is_spoilt = [any(math.isnan(number) for number in column) for column in columns]
    upper = [math.nan if bad else max(column) for column, bad in zip(columns, is_spoilt, strict=True)]
    lower = [math.nan if bad else min(column) for column, bad in zip(columns, is_spoilt, strict=True)]
    row = upper + lower if kind == "minmax" else [(a + b) / 2 for a, b in zip(upper, lower, strict=True)]
    largest = max((abs(number) for number in row if math.isfinite(number)), default=0.0)
    exponent = -100
    while largest > 448 * 2.0**exponent:
        exponent += 1
    codes = []
    for place, number in enumerate(row):
        scaled = number * 2.0**-exponent
        if not math.isfinite(number):
            codes.append(127)
        elif kind == "mid":
            codes.append(nearest(scaled))
        else:
            codes.append(at_least(scaled) if place < len(upper) else at_least(-scaled) ^ 128)
    return bytes([*(0 if code == 128 else code for code in codes), exponent + 127])
