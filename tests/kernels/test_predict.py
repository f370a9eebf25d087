import math
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.predict import predict
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.testing import (
    POISON,
    TOLERANCE,
    Shape,
    distinct,
    far,
    generator,
    number_of,
    numbers,
    step_rows,
)

NEGATIVE = float("-inf")


def parts(pages: torch.Tensor, layout: SummaryLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of pages, `[num_pages, num_kv_heads, rows_per_page, width]`, and the exponents of fp8 rows, in place."""
    heads = pages.view(*pages.shape[:2], -1)
    if layout.is_fp8:
        heads = heads.view(torch.uint8)
    end = layout.rows_per_page * layout.width
    return heads[..., :end].view(*pages.shape[:2], layout.rows_per_page, layout.width), heads[..., end:]


def fp8_pages(pages: torch.Tensor, shape: Shape, random: torch.Generator) -> torch.Tensor:
    """Pages whose rows are the numbers of other pages, rounded, times 1/2, 1, 2 or 4."""
    layout = shape.layout
    out = torch.zeros_like(pages)
    rows, powers = parts(out, layout)
    drawn = pages.float().flatten().repeat(4)[: rows.numel()].view(rows.shape)
    rows[:] = drawn.cpu().to(torch.float8_e4m3fn).view(torch.uint8).to(pages.device)
    powers[:] = torch.randint(126, 130, powers.shape, generator=random).to(powers)
    return out


def line_of(pages: torch.Tensor, layout: SummaryLayout, page: int, head: int, row: int) -> torch.Tensor:
    """One summary in float64."""
    rows, powers = parts(pages, layout)
    if not layout.is_fp8:
        return rows[page, head, row].double()
    numbers = torch.tensor([number_of(code) for code in rows[page, head, row].tolist()], dtype=torch.float64)
    return numbers * 2.0 ** (int(powers[page, head, row]) - 127)


def a_step(shape: Shape, lengths: list[int | None], seed: int, *, whole: bool = True) -> dict[str, Any]:
    """Arguments of one call; None stands for a padding row. Whatever must not be read is poisoned."""
    random, layout = generator(seed), shape.layout
    num_rows, num_pages = len(lengths), layout.num_pages(shape.max_blocks)
    num_requests = num_rows + 2
    query_shape = (num_requests, shape.num_kv_heads * shape.group, shape.head_dim)
    pages = numbers((num_requests * num_pages + 3, *shape.unit), random, shape, whole=whole)
    page_ids = distinct(num_requests * num_pages, len(pages), random, "cpu").view(num_requests, num_pages)
    requests = distinct(num_rows, num_requests, random, "cpu").tolist()
    if shape.has_fp8_rows:
        pages = fp8_pages(pages, shape, random)
    flat, powers = parts(pages, layout)
    lengths_of = {r: n or 0 for r, n in zip(requests, lengths, strict=True)}
    for request in range(num_requests):
        for index in range(lengths_of.get(request, 0), num_pages * layout.rows_per_page):
            page, row = page_ids[request, index // layout.rows_per_page], index % layout.rows_per_page
            if shape.has_fp8_rows:
                flat[page, :, row], powers[page, :, row] = (126, 254) if index % 2 else (127, 255)
            else:
                flat[page, :, row] = POISON if index % 2 else float("nan")
    rows = [(-1 if n is None else r, n or 0, 7, -1) for r, n in zip(requests, lengths, strict=True)]
    wide = torch.full((num_requests, num_pages + 2), -5, dtype=torch.int32)
    wide[:, :num_pages] = page_ids
    out = (num_rows, shape.num_kv_heads, shape.budget)
    return {
        "query": numbers(query_shape, random, shape, whole=whole),
        "rows": step_rows(rows, shape.device),
        "pages": pages,
        "page_ids": wide.to(shape.device)[:, :num_pages],
        "blocks": torch.full(out, 12345, dtype=torch.int32, device=shape.device),
        "scores": torch.full(out, float("nan"), device=shape.device),
        "layout": layout,
        "alpha": 0.0 if shape.kind == "mid" else 0.25,
        "reduction": "max",
        "scale": 1 / math.sqrt(shape.head_dim),
        "num_sinks": 1,
    }


def oracle(arguments: dict[str, Any], row: int, head: int) -> list[float]:
    """Every block's score in one row and head, in float64 from the definition."""
    layout, rows = arguments["layout"], arguments["rows"].tolist()
    request, num_complete = rows[row][0], rows[row][1]
    pages = arguments["pages"].cpu()
    per_head = arguments["query"].shape[1] // pages.shape[1]
    queries = arguments["query"].cpu().double()[request, head * per_head : (head + 1) * per_head]
    per_query = []
    for query in queries:
        values = []
        for index in range(num_complete):
            page = int(arguments["page_ids"][request, index // layout.rows_per_page])
            line = line_of(pages, layout, page, head, index % layout.rows_per_page)
            if layout.kind == "mid":
                values.append(float(query @ line))
            else:
                upper, lower = line[: layout.head_dim], line[layout.head_dim :]
                bound = query @ ((upper + lower) / 2) + arguments["alpha"] * (query.abs() @ ((upper - lower) / 2))
                values.append(float(bound))
        if arguments["reduction"] == "softmax" and values:
            peak = max(values)
            weights = [math.exp((value - peak) * arguments["scale"]) for value in values]
            values = [weight / sum(weights) for weight in weights]
        per_query.append(values)
    together = sum if arguments["reduction"] == "sum" else max
    scores = [float(together(column)) for column in zip(*per_query, strict=True)]
    return [math.inf] * min(arguments["num_sinks"], num_complete) + scores[arguments["num_sinks"] :]


def found(arguments: dict[str, Any], row: int, head: int) -> list[tuple[int, float]]:
    """What the call wrote for one row and head, by block."""
    blocks, scores = arguments["blocks"][row, head].tolist(), arguments["scores"][row, head].tolist()
    return sorted(zip(blocks, scores, strict=True))


def assert_exact(arguments: dict[str, Any]) -> None:
    budget = arguments["blocks"].shape[2]
    for row, (request, *_) in enumerate(arguments["rows"].tolist()):
        for head in range(arguments["blocks"].shape[1]):
            scores = [] if request < 0 else oracle(arguments, row, head)
            best = sorted(range(len(scores)), key=lambda block: (-scores[block], block))[:budget]
            nothing = [(-1, NEGATIVE)] * (budget - len(best))
            assert found(arguments, row, head) == nothing + sorted((block, scores[block]) for block in best)


def run(implementation: str, arguments: dict[str, Any], **options: int) -> None:
    module = import_module(f"oasiskv.kernels.predict.{implementation}")
    module.predict(**arguments, **(options if implementation == "kernel" else {}))


SHAPES = [
    Shape(group=1, block_size=16, head_dim=64, budget=4),
    Shape(group=3, num_kv_heads=1, block_size=16, head_dim=128, budget=7),
    Shape(group=4, block_size=32, head_dim=96, budget=5),
    Shape(group=8, num_kv_heads=1, block_size=64, head_dim=256, budget=8),
    Shape(group=4, num_kv_heads=3, block_size=16, head_dim=128, budget=9, kind="mid"),
    Shape(group=3, num_kv_heads=1, block_size=64, head_dim=96, budget=3, kind="mid"),
    Shape(group=3, num_kv_heads=2, block_size=16, head_dim=64, budget=6, has_fp8_rows=True),
    Shape(group=8, num_kv_heads=1, block_size=16, head_dim=256, budget=5, has_fp8_rows=True),
    Shape(group=4, num_kv_heads=2, block_size=16, head_dim=96, budget=9, kind="mid", has_fp8_rows=True),
    Shape(group=1, num_kv_heads=1, block_size=32, head_dim=128, budget=5, has_fp8_rows=True),
    Shape(group=2, num_kv_heads=1, block_size=64, head_dim=64, budget=5, has_fp8_rows=True, max_blocks=130),
]


@pytest.mark.parametrize("reduction", ["max", "sum"])
@pytest.mark.parametrize(
    "base",
    SHAPES,
    ids=lambda s: f"{s.kind}-{s.group}-{s.block_size}x{s.head_dim}" + ("-fp8" if s.has_fp8_rows else ""),
)
def test_the_best_blocks_are_found_exactly_though_many_are_equal(
    implementation: str, dtype: torch.dtype, device: str, base: Shape, reduction: str
) -> None:
    shape = replace(base, device=device, dtype=dtype)
    arguments = a_step(shape, [40, None, 0, 1, base.budget], seed=1) | {"reduction": reduction}
    run(implementation, arguments)
    assert_exact(arguments)


@pytest.mark.parametrize("lengths", [[], [None], [0], [1]])
def test_no_request_no_block_or_one(implementation: str, device: str, lengths: list[int | None]) -> None:
    arguments = a_step(Shape(device=device), lengths, seed=12)
    run(implementation, arguments)
    assert_exact(arguments)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_alpha_weighs_the_half_width(implementation: str, device: str, alpha: float) -> None:
    arguments = a_step(Shape(group=2, device=device), [33], seed=2) | {"alpha": alpha}
    run(implementation, arguments)
    assert_exact(arguments)


@pytest.mark.parametrize("num_sinks", [0, 1, 3, 4, 9])
def test_sink_blocks_come_first_whatever_their_score(implementation: str, device: str, num_sinks: int) -> None:
    arguments = a_step(Shape(device=device), [30, 2, 5], seed=3) | {"num_sinks": num_sinks}
    run(implementation, arguments)
    assert_exact(arguments)


@pytest.mark.parametrize("reduction", ["max", "sum", "softmax"])
@pytest.mark.parametrize("has_fp8_rows", [False, True])
@pytest.mark.parametrize("kind", ["minmax", "mid"])
def test_scores_of_ordinary_numbers_are_close_and_no_better_block_is_left_out(
    implementation: str,
    dtype: torch.dtype,
    device: str,
    kind: Literal["minmax", "mid"],
    has_fp8_rows: bool,
    reduction: str,
) -> None:
    shape = Shape(group=4, kind=kind, budget=6, device=device, dtype=dtype, has_fp8_rows=has_fp8_rows)
    arguments = a_step(shape, [40, 17, None, 3, 0], seed=4, whole=False) | {"reduction": reduction}
    run(implementation, arguments)
    for row, (request, *_) in enumerate(arguments["rows"].tolist()):
        for head in range(shape.num_kv_heads):
            scores = [] if request < 0 else oracle(arguments, row, head)
            near = 2 * TOLERANCE[torch.float32] * max((abs(s) for s in scores if s < math.inf), default=0.0)
            chosen = [(block, score) for block, score in found(arguments, row, head) if block >= 0]
            assert len({block for block, _ in chosen}) == min(shape.budget, len(scores))
            for block, score in chosen:
                assert score == pytest.approx(scores[block], abs=near)
            left = [score for block, score in enumerate(scores) if block not in dict(chosen)]
            assert max(left, default=NEGATIVE) <= min((score for _, score in chosen), default=math.inf) + near


@pytest.mark.parametrize(
    ("reduction", "options"),
    [
        ("max", {"held": 64, "tile": 64}),
        ("max", {"num_programs": 12, "tile": 32}),
        ("softmax", {"held": 32, "num_programs": 999, "tile": 64}),
    ],
)
def test_shares_and_repeated_passes_choose_the_same(device: str, reduction: str, options: dict[str, int]) -> None:
    shape = Shape(group=2, budget=20, max_blocks=200, num_kv_heads=2, device=device)
    arguments = a_step(shape, [200, 65, 64, 1, None, 0], seed=5, whole=reduction == "max") | {"reduction": reduction}
    plain = arguments | {"blocks": arguments["blocks"].clone(), "scores": arguments["scores"].clone()}
    run("reference", plain)
    for _ in range(2):  # twice: the programs' meeting place must be left as it was found
        run("kernel", arguments, **options)
        for row in range(6):
            for head in range(2):
                got, want = found(arguments, row, head), found(plain, row, head)
                assert [block for block, _ in got] == [block for block, _ in want]
                assert [score for _, score in got] == pytest.approx([score for _, score in want], rel=1e-5)


@pytest.mark.parametrize("length", [129, 2049, 8192])
def test_long_contexts(implementation: str, device: str, length: int) -> None:
    shape = Shape(num_kv_heads=1, group=2, kind="mid", budget=128, max_blocks=8192, device=device, dtype=torch.float16)
    arguments = a_step(shape, [length], seed=6)
    run(implementation, arguments)
    query, layout = arguments["query"].double(), shape.layout
    request = int(arguments["rows"][0, 0])
    held = arguments["pages"].double().view(-1, layout.rows_per_page, layout.width)
    held = held[arguments["page_ids"][request].long()].flatten(0, 1)[:length]
    scores = (held @ query[request].mT).amax(1)
    scores[0] = math.inf
    order = sorted(range(length), key=lambda block: (-float(scores[block]), block))[:128]
    assert [block for block, _ in found(arguments, 0, 0)] == sorted(order)


@pytest.mark.parametrize("has_fp8_rows", [False, True])
def test_contexts_of_more_than_128k_tokens(implementation: str, device: str, has_fp8_rows: bool) -> None:
    shape = Shape(
        num_kv_heads=1, budget=9, max_blocks=12_000, device=device, dtype=torch.float16, has_fp8_rows=has_fp8_rows
    )
    length = 11_999
    arguments = a_step(shape, [length], seed=10)
    run(implementation, arguments, tile=256)
    layout, request = arguments["layout"], int(arguments["rows"][0, 0])
    rows, powers = parts(arguments["pages"], layout)
    held = arguments["page_ids"][request].long()
    lines = rows[held, 0].flatten(0, 1)[:length].cpu()
    if has_fp8_rows:
        scale = 2.0 ** (powers[held, 0, : layout.rows_per_page].flatten()[:length].double() - 127)
        lines = lines.view(torch.float8_e4m3fn).double() * scale.cpu()[:, None]
    query, upper, lower = arguments["query"][request, 0].double().cpu(), *lines.double().chunk(2, -1)
    scores = (upper + lower) @ query / 2 + 0.25 * ((upper - lower) @ query.abs()) / 2
    scores[0] = math.inf
    order = sorted(range(length), key=lambda block: (-float(scores[block]), block))[: shape.budget]
    assert found(arguments, 0, 0) == sorted((block, float(scores[block])) for block in order)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("has_fp8_rows", [False, True])
@pytest.mark.parametrize("reduction", ["max", "sum", "softmax"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_blocks_that_nothing_bounds_come_first_and_take_no_more_than_their_places(
    implementation: str, device: str, value: float, reduction: str, has_fp8_rows: bool
) -> None:
    shape = Shape(group=2, budget=4, device=device, has_fp8_rows=has_fp8_rows)
    arguments = a_step(shape, [30, 3], seed=11, whole=False) | {"reduction": reduction}
    arguments["query"].abs_()
    spoilt = [7, 8, 9, 20, 21, 22, 29]
    rows, _ = parts(arguments["pages"], shape.layout)
    page = arguments["page_ids"][int(arguments["rows"][0, 0])].long()
    for block in spoilt:
        at = rows[page[block // shape.layout.rows_per_page], :, block % shape.layout.rows_per_page]
        at[:, : shape.head_dim] = 127 if has_fp8_rows else value
    run(implementation, arguments)
    largest = torch.finfo(torch.float32).max
    for head in range(shape.num_kv_heads):
        blocks, scores = zip(*found(arguments, 0, head), strict=True)
        assert blocks == (0, 7, 8, 9)
        assert scores[0] == math.inf
        assert scores[1:] == pytest.approx([largest if reduction != "softmax" else 1 / len(spoilt)] * 3)
        assert [block for block, _ in found(arguments, 1, head)] == [-1, 0, 1, 2]


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, -3.0])
def test_among_equals_the_lowest_blocks_win(implementation: str, device: str, value: float) -> None:
    shape = Shape(num_kv_heads=1, budget=5, device=device)
    arguments = a_step(shape, [37], seed=7) | {"num_sinks": 0}
    arguments["query"].fill_(1.0)
    arguments["pages"].fill_(value)
    run(implementation, arguments)
    assert [block for block, _ in found(arguments, 0, 0)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("has_fp8_rows", [False, True])
def test_offsets_past_four_gigabytes(implementation: str, device: str, has_fp8_rows: bool) -> None:
    shape = Shape(num_kv_heads=2, device=device, dtype=torch.float16, has_fp8_rows=has_fp8_rows)
    arguments = a_step(shape, [40], seed=8)
    longer, move = far(arguments["pages"])
    run(implementation, arguments | {"pages": longer, "page_ids": arguments["page_ids"] + move})
    assert_exact(arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 2, 32)}, r"^query: expected shape \[\*, \*, 64\], got \[5, 2, 32\]"),
        ({"query": torch.zeros(5, 3, 64)}, "^query: expected a multiple of 2 query heads, got 3"),
        ({"query": torch.zeros(5, 2, 64).half()}, "^query: expected torch.float32, got torch.float16"),
        ({"rows": torch.zeros(3, 3, dtype=torch.int32)}, r"^rows: expected shape \[\*, 5\], got \[3, 3\]"),
        ({"page_ids": torch.zeros(4, 3, dtype=torch.int32)}, r"^page_ids: expected shape \[5, \*\], got \[4, 3\]"),
        ({"scores": torch.zeros(3, 2, 5)}, r"^scores: expected shape \[3, 2, 4\], got \[3, 2, 5\]"),
        ({"reduction": "mean"}, "^reduction: expected one of max, sum, softmax, got mean"),
        ({"num_sinks": -1}, "^num_sinks: expected at least 0, got -1"),
        ({"layout": Shape(kind="mid").layout, "alpha": 0.5}, "^alpha: expected 0 with summaries of kind mid, got 0.5"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    arguments = a_step(Shape(), [3, 2, 1], seed=9) | changes
    with pytest.raises(ConfigError, match=message):
        predict(**arguments)
    assert (arguments["blocks"] == 12345).all()
