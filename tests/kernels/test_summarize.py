from dataclasses import replace
from importlib import import_module

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.summarize import summarize
from oasiskv.kernels.testing import POISON, Shape, distinct, far, generator, numbers

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1),
    Shape(block_size=16, head_dim=128, num_kv_heads=3, kind="mid"),
    Shape(block_size=32, head_dim=96, num_kv_heads=2),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, kind="mid"),
]


def name_of(shape: Shape) -> str:
    return f"{shape.kind}-{shape.block_size}x{shape.head_dim}"


def oracle(
    cache: torch.Tensor,
    block_ids: list[int],
    pages: torch.Tensor,
    page_ids: list[int],
    first: int,
    layout: SummaryLayout,
) -> torch.Tensor:
    """The pages afterwards, element by element."""
    out = pages.cpu().clone()
    keys = cache.cpu().double()
    head_dim = layout.head_dim
    for index, block in enumerate(block_ids, start=first):
        page, row = page_ids[index // layout.rows_per_page], index % layout.rows_per_page
        for head in range(cache.shape[1]):
            tokens = keys[block, head, :, :head_dim].tolist()
            upper = [max(column) for column in zip(*tokens, strict=True)]
            lower = [min(column) for column in zip(*tokens, strict=True)]
            flat = out[page, head].view(-1)
            if layout.kind == "minmax":
                written = upper + lower
            else:
                written = [(a + b) / 2 for a, b in zip(upper, lower, strict=True)]
            width = len(written)
            flat[row * width : (row + 1) * width] = torch.tensor(written).to(out.dtype)
    return out


@pytest.mark.parametrize("base", SHAPES, ids=name_of)
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (5, 9), (15, 40)])
def test_each_block_gets_its_row_and_nothing_else_is_written(
    implementation: str, dtype: torch.dtype, device: str, base: Shape, first: int, count: int
) -> None:
    shape, random = replace(base, device=device, dtype=dtype), generator(first + count)
    cache = numbers((50, *shape.unit), random, shape)
    block_ids = distinct(count, 50, random, device)
    pages = torch.full((12, *shape.unit), POISON, dtype=dtype, device=device)
    page_ids = distinct(shape.layout.num_pages(first + count), 12, random, device)
    wanted = oracle(cache, block_ids.tolist(), pages, page_ids.tolist(), first, shape.layout)
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    module.summarize(cache, block_ids, pages, page_ids, first, shape.layout)
    assert torch.equal(pages.cpu(), wanted)


def test_pages_may_lie_in_the_cache_itself(implementation: str, device: str) -> None:
    shape, random = Shape(device=device), generator(1)
    cache = numbers((20, *shape.unit), random, shape)
    ids = distinct(9, 20, random, device)
    block_ids, page_ids = ids[:8].contiguous(), ids[8:].contiguous()
    wanted = oracle(cache, block_ids.tolist(), cache, page_ids.tolist(), 0, shape.layout)
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    module.summarize(cache, block_ids, cache, page_ids, 0, shape.layout)
    assert torch.equal(cache.cpu(), wanted)


def test_what_is_not_written_stays_nan(implementation: str, device: str) -> None:
    shape, random = Shape(device=device), generator(3)
    cache, ids = numbers((9, *shape.unit), random, shape), distinct(9, 9, random, device)
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    pages = torch.full((2, *shape.unit), float("nan"), device=device)
    module.summarize(cache, ids, pages, ids[:2] % 2, 4, shape.layout)
    wanted = oracle(cache, ids.tolist(), torch.full(pages.shape, float("nan")), (ids[:2] % 2).tolist(), 4, shape.layout)
    assert torch.equal(pages.cpu().view(torch.int32), wanted.view(torch.int32))


def test_a_long_prompt_in_one_call(implementation: str, device: str) -> None:
    shape, random = Shape(num_kv_heads=1, head_dim=16, device=device, dtype=torch.float16), generator(4)
    # All of it, or its end where an interpreter takes milliseconds for a few blocks.
    count = 40 if implementation == "kernel" and device == "cpu" else 8192
    cache, page_ids = numbers((64, *shape.unit), random, shape), distinct(512, 512, random, device)
    block_ids = torch.randint(0, 64, (count,), generator=random).int().to(device)
    pages = torch.zeros(512, *shape.unit, dtype=shape.dtype, device=device)
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    module.summarize(cache, block_ids, pages, page_ids, 8192 - count, shape.layout)
    found = pages[page_ids.long()].view(8192, 2, 16)
    keys = cache[block_ids.long(), 0, :, :16]
    assert torch.equal(found[8192 - count :], torch.stack([keys.amax(1), keys.amin(1)], 1))
    assert not found[: 8192 - count].any()


@pytest.mark.parametrize("has_fp8_rows", [False, True])
@pytest.mark.parametrize("where", ["kv_cache", "pages"])
def test_offsets_past_four_gigabytes(implementation: str, device: str, where: str, has_fp8_rows: bool) -> None:
    shape = Shape(num_kv_heads=2, device=device, dtype=torch.float16, has_fp8_rows=has_fp8_rows)
    random = generator(6)
    cache, pages = numbers((9, *shape.unit), random, shape), torch.zeros(3, *shape.unit, dtype=shape.dtype)
    pages, block_ids, page_ids = pages.to(device), distinct(9, 9, random, device), distinct(2, 3, random, device)
    module = import_module(f"oasiskv.kernels.summarize.{implementation}")
    wanted = pages.clone()
    module.summarize(cache, block_ids, wanted, page_ids, 0, shape.layout)
    longer, move = far(cache if where == "kv_cache" else pages)
    if where == "kv_cache":
        module.summarize(longer, block_ids + move, pages, page_ids, 0, shape.layout)
    else:
        module.summarize(cache, block_ids, longer, page_ids + move, 0, shape.layout)
        pages = longer[move:]
    assert torch.equal(pages.view(torch.uint8), wanted.view(torch.uint8))
    assert wanted.any()


def test_the_bound_holds_for_every_stored_key(device: str, dtype: torch.dtype) -> None:
    shape, random = Shape(device=device, dtype=dtype), generator(2)
    cache = numbers((8, *shape.unit), random, shape)
    pages = torch.zeros(1, *shape.unit, dtype=dtype, device=device)
    ids = torch.arange(8, dtype=torch.int32, device=device)
    summarize(cache, ids, pages, ids[:1], 0, shape.layout)
    rows = pages.view(shape.num_kv_heads, 16, 2, shape.head_dim)[:, :8].transpose(0, 1)  # [8, H, 2, D]
    keys = cache[..., : shape.head_dim]
    assert (rows[:, :, 0, None] >= keys).all()
    assert (rows[:, :, 1, None] <= keys).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": torch.zeros(4, 2, 16)}, r"^kv_cache: expected shape \[\*, \*, \*, \*\], got \[4, 2, 16\]"),
        ({"kv_cache": torch.zeros(4, 2, 16, 128, dtype=torch.int8)}, "^kv_cache: expected .*float32.*, got torch.int8"),
        ({"kv_cache": torch.zeros(4, 2, 128, 16).mT}, "^kv_cache: expected contiguous memory, got strides"),
        ({"kv_cache": torch.zeros(4, 2, 16, 127)}, "^kv_cache: expected an even last dimension"),
        ({"block_ids": torch.zeros(3, dtype=torch.int64)}, "^block_ids: expected torch.int32, got torch.int64"),
        ({"pages": torch.zeros(4, 1, 16, 128)}, r"^pages: expected shape \[\*, 2, 16, 128\], got \[4, 1, 16, 128\]"),
        ({"page_ids": torch.zeros(0, dtype=torch.int32)}, "^page_ids: expected at least 1 pages, got 0"),
        ({"first_block": -1}, "^first_block: expected at least 0, got -1"),
        (
            {"layout": SummaryLayout(kind="mid", block_size=32, head_dim=64)},
            "^layout: expected block_size 16 and head_dim 64, got 32 and 64",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_written(
    changes: dict[str, object], message: str
) -> None:
    pages = torch.full((2, 2, 16, 128), POISON)
    arguments: dict[str, object] = {
        "kv_cache": torch.zeros(4, 2, 16, 128),
        "block_ids": torch.zeros(3, dtype=torch.int32),
        "pages": pages,
        "page_ids": torch.zeros(1, dtype=torch.int32),
        "first_block": 0,
        "layout": Shape().layout,
    }
    with pytest.raises(ConfigError, match=message):
        summarize(**(arguments | changes))  # type: ignore[arg-type]
    assert (pages == POISON).all()
