"""Operations on a cache of fp8: what they do on the same numbers as float32, with every byte copied as it is."""

import math
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.complete import complete, keep
from oasiskv.kernels.formats import FP8
from oasiskv.kernels.fp8 import round_blocks
from oasiskv.kernels.predict import predict
from oasiskv.kernels.publish import publish
from oasiskv.kernels.rows import FRESH, Reduction, Row
from oasiskv.kernels.summarize import summarize
from oasiskv.kernels.testing import Shape, counters, distinct, generator, number_of, numbers, step_rows
from oasiskv.kernels.transfer import store, transfer

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1, group=1, budget=5, dtype=FP8),
    Shape(block_size=16, head_dim=128, num_kv_heads=3, group=4, budget=8, dtype=FP8, kind="mid"),
    Shape(block_size=32, head_dim=96, num_kv_heads=2, group=3, budget=7, dtype=FP8),
]
EACH_SHAPE = pytest.mark.parametrize(
    "base", SHAPES, ids=lambda shape: f"{shape.kind}-{shape.block_size}x{shape.head_dim}"
)
NUMBERS = torch.tensor([number_of(code) for code in range(256)])
"""By code; 127 and 255 are NaN."""
NUMBERS[[127, 255]] = math.nan


def module_of(operation: str, implementation: str) -> ModuleType:
    return import_module(f"oasiskv.kernels.{operation}.{implementation}")


def cache_of(num_blocks: int, shape: Shape, random: torch.Generator, *, has_nan: bool = False) -> torch.Tensor:
    """A cache of any codes, but for NaN unless wanted."""
    codes = torch.randint(0, 256, (num_blocks, *shape.unit), generator=random).byte()
    if not has_nan:
        codes[codes & 127 == 127] -= 1
    return codes.view(FP8).to(shape.device)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of fp8, read from a table of all codes."""
    return NUMBERS[bytes_of(tensor).long()]


@EACH_SHAPE
@pytest.mark.parametrize(("first", "count"), [(0, 1), (15, 40)])
def test_summaries_are_the_largest_and_least_keys_themselves_or_the_nearest_number_to_their_middle(
    implementation: str, device: str, base: Shape, first: int, count: int
) -> None:
    shape, random = replace(base, device=device), generator(first + count)
    cache = cache_of(50, shape, random)
    block_ids, page_ids = distinct(count, 50, random, device), distinct(9, 12, random, device)
    pages = cache_of(12, shape, random)
    wanted = wide(pages)
    layout = shape.layout
    module_of("summarize", implementation).summarize(cache, block_ids, pages, page_ids, first, layout)
    for index, block in enumerate(block_ids.tolist(), start=first):
        page, row = int(page_ids[index // layout.rows_per_page]), index % layout.rows_per_page
        keys = wide(cache[block])[..., : shape.head_dim]  # [H, B, D]
        upper, lower = keys.amax(1), keys.amin(1)
        written = torch.cat([upper, lower], -1) if layout.kind == "minmax" else nearest((upper + lower) / 2)
        rows = wanted[page].view(shape.num_kv_heads, layout.rows_per_page, layout.width)
        rows[:, row] = written
    assert torch.equal(wide(pages), wanted)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """Round to numbers of fp8, of two that are as near to the even code."""
    finite = NUMBERS[:127]
    distance = (finite - values.abs()[..., None]).abs()
    is_even = torch.arange(127) % 2 == 0
    code = (2 * (distance == distance.amin(-1, keepdim=True)).int() + is_even.int()).argmax(-1)
    return torch.copysign(finite[code], values)


@EACH_SHAPE
@pytest.mark.parametrize(
    ("reduction", "query_dtype"), [("max", torch.float16), ("sum", torch.float32), ("softmax", torch.float32)]
)
def test_the_best_blocks_are_those_of_the_same_numbers_as_float32(
    implementation: str, device: str, base: Shape, reduction: Reduction, query_dtype: torch.dtype
) -> None:
    shape, random = replace(base, device=device), generator(3)
    lengths = [40, None, 0, 1, base.budget]
    num_requests, num_pages = len(lengths) + 1, shape.layout.num_pages(40)
    # Whole numbers whose sums of products are exact, so that equal scores are the rule.
    drawn = torch.randint(-4, 5, (num_requests * num_pages, *shape.unit), generator=random).float()
    query = torch.randint(-2, 3, (num_requests, shape.num_kv_heads * shape.group, shape.head_dim), generator=random)
    rows = [(-1 if n is None else request, n or 0, 1, -1) for request, n in enumerate(lengths)]
    arguments: dict[str, Any] = {
        "query": query.to(device, query_dtype),
        "rows": step_rows(rows, device),
        "page_ids": distinct(num_requests * num_pages, len(drawn), random, device).view(num_requests, num_pages),
        "layout": shape.layout,
        "alpha": 0.0 if shape.kind == "mid" else 0.5,
        "reduction": reduction,
        "scale": 1e-2,
        "num_sinks": 1,
    }

    def found(operation: str, pages: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.full((len(lengths), shape.num_kv_heads, shape.budget), -7, dtype=torch.int32, device=device)
        scores = torch.zeros(blocks.shape, device=device)
        given = arguments | {"pages": pages, "query": query, "blocks": blocks, "scores": scores}
        module_of("predict", operation).predict(**given)
        order = blocks.sort(-1)
        return order.values.cpu(), scores.gather(-1, order.indices).cpu()

    blocks, scores = found(implementation, drawn.to(FP8).to(device), arguments["query"])
    wanted, wanted_scores = found("reference", drawn.to(device), arguments["query"].float())
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-5 if reduction == "softmax" else 0, atol=0)
    if reduction != "softmax":  # shares that are equal in truth may differ in their last bit
        assert torch.equal(blocks, wanted)


@pytest.mark.parametrize("reduction", ["max", "sum"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_scales_of_queries_and_keys_change_no_choice(device: str, reduction: Reduction, alpha: float) -> None:
    shape, random = Shape(group=3, budget=6, device=device, dtype=FP8), generator(8)
    pages = cache_of(9, shape, random)
    query = numbers((3, 6, 64), random, replace(shape, dtype=torch.float32))
    page_ids = distinct(9, 9, random, device).view(3, 3)

    def chosen(pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        layout = replace(shape.layout, dtype_bytes=pages.element_size())
        blocks = torch.zeros(1, 2, 6, dtype=torch.int32, device=device)
        predict(
            query,
            step_rows([(1, 40, 1, -1)], device),
            pages,
            page_ids,
            blocks,
            torch.zeros(1, 2, 6, device=device),
            layout=layout,
            alpha=alpha,
            reduction=reduction,
            scale=0.1,
            num_sinks=2,
        )
        return blocks.sort(-1).values

    assert torch.equal(chosen(pages, query), chosen(0.125 * wide(pages).to(device), 4 * query))


@EACH_SHAPE
@pytest.mark.parametrize("page_is_source", [False, True])
def test_a_finished_block_is_copied_byte_by_byte_and_summarized(
    implementation: str, device: str, base: Shape, page_is_source: bool
) -> None:
    shape, random = replace(base, device=device), generator(11)
    layout, num_requests, max_blocks = shape.layout, 3, 40
    num_pages = layout.num_pages(max_blocks)
    cache = cache_of(num_requests * (shape.budget + num_pages) + 5, shape, random)
    ids = torch.randperm(len(cache), generator=random).int()
    slot_ids = ids[: num_requests * shape.budget].view(num_requests, -1)
    page_ids = ids[num_requests * shape.budget :][: num_requests * num_pages].view(num_requests, -1)
    sources = ids[-3:].tolist()
    resident = torch.stack(
        [distinct(shape.budget, 30, random, "cpu") for _ in range(num_requests * shape.num_kv_heads)]
    ).view(num_requests, shape.num_kv_heads, -1)
    finished = {0: 31, 2: 38}
    rows = [(request, block + 1, 7, sources[request]) for request, block in finished.items()] + [(-1, 3, 7, 1)]
    if page_is_source:
        for request, block in finished.items():
            page_ids[request, block // layout.rows_per_page] = sources[request]
    units = bytes_of(cache_of(num_requests * max_blocks * 2, shape, random))
    units = units.view(-1, 2, *shape.unit).view(FP8)
    units = units if device == "cpu" else units.pin_memory()
    arguments: dict[str, Any] = {
        "kv_cache": cache,
        "units": units,
        "layer": 1,
        "rows": step_rows(rows, device),
        "resident": resident.to(device),
        "stamp": (2 * torch.randint(0, 5, resident.shape, generator=random).int() + FRESH).to(device),
        "slot_ids": slot_ids.to(device),
        "page_ids": page_ids.to(device),
        "host_table": distinct(num_requests * max_blocks, len(units), random, device).view(num_requests, -1),
        "counters": counters(shape),
        "layout": layout,
        "num_sinks": 1,
    }
    # The reference on float32 numbers is what the tests of complete are about.
    plain = arguments | {name: wide(arguments[name]).to(device) for name in ("kv_cache", "units")}
    plain |= {name: arguments[name].clone() for name in ("resident", "stamp", "counters")}
    plain["layout"] = replace(layout, dtype_bytes=4)
    for module, given in (
        (module_of("complete", "reference"), plain),
        (module_of("complete", implementation), arguments),
    ):
        host = {name: given.pop(name) for name in ("units", "layer", "host_table")}
        module.complete(**given, rounds=False)
        module.keep(**{name: given[name] for name in ("kv_cache", "rows", "resident", "slot_ids")}, **host)
        given |= host
    if device != "cpu":
        torch.cuda.synchronize()
    for name in ("resident", "stamp", "counters"):
        assert torch.equal(arguments[name], plain[name])
    assert torch.equal(wide(units), plain["units"].cpu())
    held, wanted = wide(cache), plain["kv_cache"].cpu()
    is_page = torch.zeros(len(cache), dtype=torch.bool)
    is_page[page_ids.flatten().long()] = True
    assert torch.equal(held[~is_page], wanted[~is_page])
    assert torch.equal(held[is_page], nearest(wanted[is_page]) if shape.kind == "mid" else wanted[is_page])


@EACH_SHAPE
def test_units_go_to_host_memory_and_back_as_they_are_whatever_bytes_they_are(
    implementation: str, device: str, base: Shape
) -> None:
    shape, random = replace(base, device=device), generator(5)
    cache = cache_of(12, shape, random, has_nan=True)
    before = bytes_of(cache)
    units = torch.zeros(12, 2, *shape.unit, dtype=torch.uint8)
    units = (units if device == "cpu" else units.pin_memory()).view(FP8)
    block_ids, host_ids = distinct(7, 12, random, device), distinct(7, 12, random, device)
    module = module_of("transfer", implementation)
    module.store(cache, block_ids, units, 1, host_ids)
    if device != "cpu":
        torch.cuda.synchronize()
    wanted = torch.zeros(12, 2, *shape.unit, dtype=torch.uint8)
    wanted[host_ids.long().cpu(), 1] = before[block_ids.long().cpu()]
    assert torch.equal(bytes_of(units), wanted)
    plan = torch.full((2, shape.num_kv_heads, 3, 2), -1, dtype=torch.int32)
    for head in range(shape.num_kv_heads):
        plan[0, head, head % 3] = torch.tensor([head % 7, 1])
        plan[1, head, 2] = torch.tensor([6 - head, 0])
    slot_ids = (torch.arange(2 * shape.budget, device=device).int() % 12).view(2, -1)
    rows = step_rows([(0, 7, 1, -1), (1, 7, 1, -1)], device)
    host_table = host_ids[None].repeat(2, 1)
    module.transfer(units, 1, cache, plan.to(device), rows, host_table, slot_ids)
    wanted = before.clone()
    for row, heads in enumerate(plan.tolist()):
        for head, entries in enumerate(heads):
            for block, slot in entries:
                if block >= 0:
                    wanted[int(slot_ids[row, slot]), head] = before[int(block_ids[block]), head]
    assert torch.equal(bytes_of(cache), wanted)


@pytest.mark.parametrize("published", [torch.float32, torch.float16])
def test_queries_that_come_as_fp8_are_published_as_the_numbers_that_they_are(
    implementation: str, device: str, published: torch.dtype
) -> None:
    random = generator(2)
    shape = Shape(device=device, dtype=FP8)
    query = cache_of(9, replace(shape, num_kv_heads=1, block_size=5, head_dim=12), random, has_nan=True)[:, 0]
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    query_rows = torch.tensor([8, 8, 3], dtype=torch.int32, device=device)
    out = torch.zeros(5, 5, 24, dtype=published, device=device)
    rows = torch.arange(3 * len(Row), dtype=torch.int32, device=device).view(3, -1)
    out_rows = torch.zeros_like(rows)
    module_of("publish", implementation).publish(query, query_rows, slots, rows, out, out_rows)
    wanted = torch.zeros(5, 5, 24)
    wanted[slots.long().cpu()] = wide(query)[query_rows.long().cpu()]
    assert torch.equal(out.cpu().float().nan_to_num(999), wanted.nan_to_num(999))
    assert torch.equal(out_rows, rows)


def test_doors_take_fp8_caches_and_name_what_does_not_go_with_them() -> None:
    shape = Shape(dtype=FP8, budget=2)
    cache, ids = torch.zeros(4, *shape.unit, dtype=FP8), torch.arange(2, dtype=torch.int32)
    wide_units = torch.zeros(4, 1, *shape.unit)
    scaled = torch.zeros(4, 1, 2 * 16 * 128 + 128, dtype=torch.uint8)
    for units, got in ((wide_units, "torch.float32"), (scaled, r"\[4, 1, 4224\]|torch.uint8")):
        with pytest.raises(ConfigError, match=f"^units: expected .*got ({got})"):
            store(cache, ids, units, 0, ids)
    with pytest.raises(ConfigError, match=r"^kv_cache: expected numbers to round, got fp8"):
        round_blocks(cache, ids)
    with pytest.raises(ConfigError, match=r"^pages: expected torch.float8_e4m3fn, got torch.float32"):
        summarize(cache, ids, cache.float(), ids, 0, shape.layout)
    rows = step_rows([(0, 2, 1, -1)], "cpu")
    tables = ids.view(1, 2)
    places = torch.zeros(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2)
    settings: dict[str, Any] = {"alpha": 0.0, "reduction": "max", "scale": 1.0, "num_sinks": 0}
    with pytest.raises(ConfigError, match=r"^query: expected torch.float32 or .*, got torch.float8_e4m3fn"):
        predict(torch.zeros(1, 2, 64, dtype=FP8), rows, cache, tables, *places, layout=shape.layout, **settings)
    with pytest.raises(ConfigError, match=r"^published_query: expected torch.float32 or"):
        publish(torch.zeros(1, 2, 64).to(FP8), ids[:1], ids[:1], rows, torch.zeros(1, 2, 64, dtype=FP8), rows)
    # The doors themselves, once each.
    units = torch.zeros(4, 1, *shape.unit, dtype=FP8)
    store(cache, ids, units, 0, ids)
    transfer(units, 0, cache, torch.full((1, 2, 1, 2), -1).int(), rows, tables, tables)
    state = torch.zeros(1, 2, 2, dtype=torch.int32)
    places_of = (state, state.clone(), tables, tables)
    complete(cache, rows, *places_of, counters(shape), layout=shape.layout, num_sinks=0, rounds=False)
    keep(cache, units, 0, rows, state, tables, tables)
    predict(torch.zeros(1, 2, 64), rows, cache, tables, *places, layout=shape.layout, **settings)
    assert places[0].tolist() == [[[0, 1], [0, 1]]]
