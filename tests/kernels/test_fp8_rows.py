"""Summaries as fp8: rounded outward, so that a bound stays a bound."""

import math
from dataclasses import replace
from importlib import import_module
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.kernels.predict.reference import scores_of
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.summarize import summarize
from oasiskv.kernels.summarize.reference import read_rows
from oasiskv.kernels.testing import Shape, distinct, fp8_row, generator, number_of, numbers

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1),
    Shape(block_size=16, head_dim=128, num_kv_heads=3, kind="mid"),
    Shape(block_size=32, head_dim=96, num_kv_heads=2),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, kind="mid"),
]
TINY, HUGE = 2.0**-149, float(torch.finfo(torch.float32).max)
NUMPY = "ignore:(invalid value|overflow) encountered:RuntimeWarning"
"""What Triton's interpreter says of infinities, where a GPU says nothing."""
COLUMNS = {
    "ordinary": [1.0, -2.3, 0.4, 17.3],
    "above and below zero by little": [3e-7, -3e-7],
    "numbers of the format": [448.0, -448.0, 0.001953125],
    "just above one": [1.0000001, -1.0000001],
    "just below one": [0.9999999, -0.9999999],
    "zeros": [0.0, -0.0],
    "subnormal": [TINY, -TINY],
    "positive alone": [5.3, 0.7],
    "negative alone": [-5.3, -0.7],
    "largest of float16": [65504.0, -65504.0],
    "large": [1e30, -1e30],
    "largest": [HUGE, -HUGE],
    "large and positive": [HUGE, 1.0],
    "infinite above": [1.0, math.inf],
    "infinite below": [-math.inf, 1.0],
    "infinite": [math.inf, -math.inf],
    "NaN": [math.nan, 1.0, -5.3],
    "NaN and infinite": [math.nan, math.inf],
}


def rows_of(pages: torch.Tensor, page_ids: list[int], count: int, layout: SummaryLayout, head: int) -> list[bytes]:
    """The rows of a request's blocks in one head, byte by byte: numbers without a zero's sign, then the exponent."""
    found = []
    for index in range(count):
        page, row = page_ids[index // layout.rows_per_page], index % layout.rows_per_page
        held = pages[page, head].cpu().contiguous().view(torch.uint8).flatten().tolist()
        codes = held[row * layout.width : (row + 1) * layout.width]
        exponent = held[layout.rows_per_page * layout.width + row]
        found.append(bytes([*(0 if code == 128 else code for code in codes), exponent]))
    return found


def run(implementation: str, cache: torch.Tensor, layout: SummaryLayout) -> torch.Tensor:
    """Summarize all blocks of a cache into fresh pages."""
    pages = torch.zeros(layout.num_pages(len(cache)), *cache.shape[1:], dtype=cache.dtype, device=cache.device)
    block_ids, page_ids = (torch.arange(len(part), dtype=torch.int32, device=cache.device) for part in (cache, pages))
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    module.summarize(cache, block_ids, pages, page_ids, 0, layout)
    return pages


@pytest.mark.parametrize("base", SHAPES, ids=lambda s: f"{s.kind}-{s.block_size}x{s.head_dim}")
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (5, 9), (29, 40)])
def test_each_block_gets_its_row_and_nothing_else_is_written(
    implementation: str, dtype: torch.dtype, device: str, base: Shape, first: int, count: int
) -> None:
    shape, random = replace(base, device=device, dtype=dtype, has_fp8_rows=True), generator(first + count)
    cache, layout = numbers((50, *shape.unit), random, shape) * 3, shape.layout
    block_ids = distinct(count, 50, random, device)
    pages = torch.randint(0, 126, (9, *shape.unit[:2], 2 * shape.head_dim * dtype.itemsize), generator=random)
    pages = pages.to(torch.uint8).to(device).view(dtype)
    page_ids = distinct(layout.num_pages(first + count), 9, random, device)
    wanted = pages.cpu().clone().view(torch.uint8).flatten(2)
    for index, block in enumerate(block_ids.tolist(), start=first):
        page, row = int(page_ids[index // layout.rows_per_page]), index % layout.rows_per_page
        for head in range(shape.num_kv_heads):
            *codes, exponent = fp8_row(cache[block, head, :, : shape.head_dim].double().tolist(), shape.kind)
            wanted[page, head, row * layout.width : (row + 1) * layout.width] = torch.tensor(codes, dtype=torch.uint8)
            wanted[page, head, layout.rows_per_page * layout.width + row] = exponent
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    module.summarize(cache, block_ids, pages, page_ids, first, layout)
    found = pages.cpu().view(torch.uint8).flatten(2)
    assert torch.equal(torch.where(found == 128, 0, found), wanted)


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.parametrize("kind", ["minmax", "mid"])
@pytest.mark.parametrize("name", COLUMNS)
def test_numbers_of_every_kind_are_rounded_as_one_at_a_time(
    implementation: str, dtype: torch.dtype, device: str, kind: Literal["minmax", "mid"], name: str
) -> None:
    shape = Shape(num_kv_heads=1, kind=kind, dtype=dtype, device=device, has_fp8_rows=True)
    cache = torch.zeros(2, *shape.unit, dtype=dtype)
    column = torch.tensor(COLUMNS[name], dtype=torch.float64).to(dtype)
    for block, beside in enumerate((0.3, 40000.0)):
        cache[block, 0, :, 1] = beside
        cache[block, 0, :, 0] = column.repeat(16)[:16]
    wanted = [fp8_row(block[0, :, :64].double().tolist(), kind) for block in cache]
    pages = run(implementation, cache.to(device), shape.layout)
    assert rows_of(pages, list(range(len(pages))), 2, shape.layout, 0) == wanted


KEYS = st.lists(
    st.one_of(
        st.floats(width=32),
        st.floats(-40, 40, width=32),
        st.sampled_from([0.0, -0.0, TINY, -TINY, HUGE, -HUGE, 1.0, 2.0**-126]),
    ),
    min_size=1,
    max_size=24,
)


@pytest.mark.filterwarnings(NUMPY)
@pytest.mark.parametrize("kind", ["minmax", "mid"])
@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@given(drawn=KEYS, seed=st.integers(0, 2**16), is_half=st.booleans())
def test_a_bound_is_never_below_what_it_bounds(
    implementation: str, kind: Literal["minmax", "mid"], drawn: list[float], seed: int, is_half: bool
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, random = torch.float16 if is_half else torch.float32, generator(seed)
    shape = Shape(num_kv_heads=1, head_dim=16, kind=kind, dtype=dtype, device=device, has_fp8_rows=True)
    choice = torch.randint(0, len(drawn), (16, 16), generator=random)
    keys = torch.tensor(drawn, dtype=torch.float64).to(dtype)[choice]  # [token, dim]
    cache = torch.zeros(1, *shape.unit, dtype=dtype)
    cache[0, 0, :, :16] = keys
    [line] = rows_of(run(implementation, cache.to(device), shape.layout), [0], 1, shape.layout, 0)
    scale = 2.0 ** (line[-1] - 127)
    row = [math.nan if code == 127 else number_of(code) * scale for code in line[:-1]]
    for dim, column in enumerate(keys.double().mT.tolist()):
        middle = torch.tensor((max(column) + min(column)) / 2).float().item()
        if not all(map(math.isfinite, column)) or (kind == "mid" and not math.isfinite(middle)):
            assert any(map(math.isnan, row[dim::16]))
        elif kind == "mid":
            assert abs(row[dim] - middle) <= max(abs(middle) / 16, 2.0**-10 * scale)
        else:
            upper, lower = max(column), min(column)
            assert upper <= row[dim] <= upper + max(abs(upper) / 8, 2.0**-9 * scale)
            assert lower >= row[16 + dim] >= lower - max(abs(lower) / 8, 2.0**-9 * scale)
    if kind == "minmax" and bool(keys.isfinite().all()):
        query = torch.randn(16, generator=random, dtype=torch.float64)
        bound = torch.where(query > 0, torch.tensor(row[:16]).double(), torch.tensor(row[16:]).double()) @ query
        true = (keys.double() @ query).max()
        assert bound >= true - 1e-12 * (keys.double().abs() @ query.abs()).max()


def test_with_alpha_one_the_score_bounds_every_product(device: str, dtype: torch.dtype) -> None:
    shape, random = Shape(group=4, device=device, dtype=dtype, has_fp8_rows=True), generator(2)
    cache, query = numbers((8, *shape.unit), random, shape), numbers((8, shape.head_dim), random, shape)
    ids = torch.arange(8, dtype=torch.int32, device=device)
    pages = torch.zeros(1, *shape.unit, dtype=dtype, device=device)
    summarize(cache, ids, pages, ids[:1], 0, shape.layout)
    scores = scores_of(query, read_rows(pages, ids[:1], 8, shape.layout), shape.layout, 1.0, "max", 1.0)
    products = torch.einsum("hgd,nhtd->hnt", query.float().view(2, 4, -1)[:, :1], cache[..., :64].float())
    assert (scores[..., None] * (1 + 1e-5) >= products).all()


@pytest.mark.parametrize(
    ("kind", "block_size", "head_dim", "dtype_bytes", "rows"),
    [
        ("minmax", 16, 128, 2, 31),
        ("mid", 16, 128, 2, 63),
        ("minmax", 32, 64, 2, 63),
        ("minmax", 64, 96, 2, 127),
        ("mid", 64, 96, 2, 253),
        ("minmax", 16, 64, 4, 63),
    ],
)
def test_a_page_holds_twice_the_rows_but_for_their_exponents(
    kind: Literal["minmax", "mid"], block_size: int, head_dim: int, dtype_bytes: int, rows: int
) -> None:
    config = LookaheadConfig(summary=kind, score_alpha=0, summary_dtype="fp8")
    layout = SummaryLayout.of(config, block_size, head_dim, dtype_bytes)
    page_bytes = block_size * 2 * head_dim * dtype_bytes
    assert layout.rows_per_page == rows
    assert rows * (layout.width + 1) <= page_bytes < (rows + 1) * (layout.width + 1)


def test_rows_that_do_not_begin_at_whole_accesses_are_refused_by_name() -> None:
    config = LookaheadConfig(summary="mid", score_alpha=0, summary_dtype="fp8")
    with pytest.raises(UnsupportedError, match=r"^summary_dtype: expected auto with head_dim 72 and summary 'mid'"):
        SummaryLayout.of(config, 16, 72, 2)
    assert SummaryLayout.of(replace(config, summary_dtype="auto"), 16, 72, 2).rows_per_page == 32
    assert SummaryLayout.of(replace(config, summary="minmax"), 16, 72, 2).rows_per_page == 31


def test_a_layout_of_another_dtype_is_refused() -> None:
    cache, ids = torch.zeros(2, 2, 16, 128), torch.zeros(1, dtype=torch.int32)
    layout = SummaryLayout(kind="minmax", block_size=16, head_dim=64, is_fp8=True, dtype_bytes=2)
    with pytest.raises(ConfigError, match=r"^layout: expected dtype_bytes 4, got 2"):
        summarize(cache, ids, cache, ids, 0, layout)
