from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.complete import complete, keep
from oasiskv.kernels.fp8.reference import narrow, views, widen
from oasiskv.kernels.rows import FRESH, Counter, stamp_of
from oasiskv.kernels.testing import (
    Shape,
    counters,
    distinct,
    far,
    fp8_row,
    generator,
    host_units,
    numbers,
    step_rows,
)

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1, budget=5),
    Shape(block_size=16, head_dim=128, num_kv_heads=3, budget=8, kind="mid"),
    Shape(block_size=32, head_dim=96, num_kv_heads=2, budget=7),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, budget=3, kind="mid"),
    Shape(block_size=16, head_dim=128, num_kv_heads=3, budget=8, is_fp8=True),
    Shape(block_size=32, head_dim=96, num_kv_heads=2, budget=7, kind="mid", is_fp8=True),
    Shape(block_size=16, head_dim=64, num_kv_heads=2, budget=5, has_fp8_rows=True),
    Shape(block_size=32, head_dim=96, num_kv_heads=1, budget=5, kind="mid", has_fp8_rows=True),
    Shape(block_size=16, head_dim=128, num_kv_heads=1, budget=8, is_fp8=True, has_fp8_rows=True),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, budget=3, is_fp8=True, has_fp8_rows=True),
]
WRITTEN = ("kv_cache", "units", "resident", "stamp", "counters")


def a_step(shape: Shape, finished: list[int | None], seed: int, *, page_is_source: bool = False) -> dict[str, Any]:
    """Arguments of one call; `finished` names the block_index each row finished, None a padding row, -1 no block."""
    random, num_requests = generator(seed), len(finished) + 1
    num_pages, num_host = shape.layout.num_pages(shape.max_blocks), num_requests * shape.max_blocks
    per_request = shape.budget + num_pages + 1
    ids = distinct(num_requests * per_request, num_requests * per_request + 2, random, "cpu").view(num_requests, -1)
    page_ids, sources = ids[:, shape.budget : -1].clone(), ids[:, -1]
    requests = distinct(len(finished), num_requests, random, "cpu").tolist()
    rows = []
    for request, block in zip(requests, finished, strict=True):
        if block is not None and block >= 0 and page_is_source:
            page_ids[request, block // shape.layout.rows_per_page] = sources[request]
        is_padding, is_idle = block is None, block == -1
        rows.append((-1 if is_padding else request, (block or 0) + 1, 6, -1 if is_idle else int(sources[request])))
    resident = torch.stack(
        [
            distinct(shape.budget, shape.max_blocks - 1, random, "cpu")
            for _ in range(num_requests * shape.num_kv_heads)
        ]
    ).view(num_requests, shape.num_kv_heads, shape.budget)  # fmt: skip
    for request, block in zip(requests, finished, strict=True):
        if block is not None and block >= 0:  # nobody holds it yet
            resident[request] += resident[request] >= block
    arguments: dict[str, Any] = {
        "kv_cache": numbers((len(ids) * per_request + 2, *shape.unit), random, shape),
        "units": host_units(num_host, shape, random),
        "layer": 1,
        "rows": step_rows(rows, shape.device),
        "resident": resident.to(shape.device),
        "stamp": torch.randint(0, 8, resident.shape, generator=random).int().to(shape.device),
        "slot_ids": ids.to(shape.device)[:, : shape.budget],
        "page_ids": page_ids.to(shape.device),
        "host_table": distinct(num_host, num_host, random, shape.device).view(num_requests, shape.max_blocks),
        "counters": counters(shape) + 3,
        "layout": shape.layout,
        "num_sinks": 1,
        "rounds": shape.is_fp8,
    }
    return arguments


KEPT = ("kv_cache", "units", "layer", "rows", "resident", "slot_ids", "host_table")
TAKEN = (
    "kv_cache", "rows", "resident", "stamp", "slot_ids", "page_ids", "counters", "layout", "num_sinks", "rounds"
)  # fmt: skip


def run(module: Any, arguments: dict[str, Any]) -> None:
    """Take the blocks in and write them to the host, by a module or its like."""
    module.complete(**{name: arguments[name] for name in TAKEN})
    module.keep(**{name: arguments[name] for name in KEPT})
    if arguments["kv_cache"].is_cuda:
        torch.cuda.synchronize()


def oracle(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything written, afterwards, one head at a time."""
    out = {name: arguments[name].cpu().clone() for name in WRITTEN}
    layout, before = arguments["layout"], arguments["kv_cache"].cpu()
    for request, num_complete, step, source, *_ in arguments["rows"].tolist():
        if request < 0 or source < 0:
            continue
        block = num_complete - 1
        for head in range(before.shape[1]):
            held, stamp = out["resident"][request, head], out["stamp"][request, head]
            open_slots = [s for s in range(len(held)) if int(held[s]) >= arguments["num_sinks"]]
            victim = min(open_slots, key=(stamp // 2).tolist().__getitem__, default=0)
            content, host = before[source, head], int(arguments["host_table"][request, block])
            if out["units"].dtype == torch.uint8:
                content = widen(*narrow(content), before.dtype)
                # The host's scale is that of the rounded numbers, which may be the next smaller one.
                for view, values in zip(views(out["units"], tuple(before.shape[1:])), narrow(content), strict=True):
                    view[host, arguments["layer"], head] = values
                assert torch.equal(widen(*narrow(content), before.dtype).nan_to_num(), content.nan_to_num())
            else:
                out["units"][host, arguments["layer"], head] = content
            out["kv_cache"][int(arguments["slot_ids"][request, victim]), head] = content
            out["counters"][head, Counter.EVICTED] += 1
            out["counters"][head, Counter.WASTED] += int(stamp[victim]) & FRESH
            held[victim], stamp[victim] = block, stamp_of(step)
            keys = content[:, : layout.head_dim].double().tolist()
            page, row = int(arguments["page_ids"][request, block // layout.rows_per_page]), block % layout.rows_per_page
            if layout.is_fp8:
                *codes, exponent = fp8_row(keys, layout.kind)
                flat = out["kv_cache"][page, head].view(torch.uint8).flatten()
                flat[row * layout.width : (row + 1) * layout.width] = torch.tensor(codes, dtype=torch.uint8)
                flat[layout.rows_per_page * layout.width + row] = exponent
                continue
            upper = [max(column) for column in zip(*keys, strict=True)]
            lower = [min(column) for column in zip(*keys, strict=True)]
            middle = [(a + b) / 2 for a, b in zip(upper, lower, strict=True)]
            line = torch.tensor(upper + lower if layout.kind == "minmax" else middle).to(before.dtype)
            start = row * layout.width
            out["kv_cache"][page, head].view(-1)[start : start + layout.width] = line
    return out


def check(implementation: str, arguments: dict[str, Any]) -> None:
    wanted = oracle(arguments)
    run(import_module(f"oasiskv.kernels.complete.{implementation}"), arguments)
    for name in WRITTEN:
        got, plain = arguments[name].cpu(), wanted[name]
        if name == "kv_cache" and arguments["layout"].is_fp8:
            # By bytes, some of which are NaN as numbers of the cache; but for the sign of a zero.
            got, plain = (
                torch.where(part.view(torch.uint8) == 128, 0, part.view(torch.uint8)) for part in (got, plain)
            )
        assert torch.equal(got, plain), name


@pytest.mark.parametrize(
    "base",
    SHAPES,
    ids=lambda s: f"{s.kind}-{s.block_size}x{s.head_dim}" + "-fp8" * s.is_fp8 + "-fp8rows" * s.has_fp8_rows,
)
def test_a_finished_block_joins_every_head_its_page_and_host_memory(
    implementation: str, dtype: torch.dtype, device: str, base: Shape
) -> None:
    shape = replace(base, device=device, dtype=dtype)
    check(implementation, a_step(shape, [39, None, -1, 15, 16], seed=1))


@pytest.mark.parametrize("block", [0, 16, 33])
@pytest.mark.parametrize("has_fp8_rows", [False, True])
@pytest.mark.parametrize("kind", ["minmax", "mid"])
def test_the_finished_block_may_become_the_page_of_its_own_summary(
    implementation: str, device: str, kind: Literal["minmax", "mid"], block: int, has_fp8_rows: bool
) -> None:
    shape = Shape(kind=kind, num_kv_heads=2, device=device, has_fp8_rows=has_fp8_rows)
    check(implementation, a_step(shape, [block], seed=2, page_is_source=True))


def test_the_last_block_of_a_long_context(implementation: str, device: str) -> None:
    shape = Shape(num_kv_heads=1, head_dim=16, num_layers=2, max_blocks=8192, device=device, dtype=torch.float16)
    check(implementation, a_step(shape, [8191, 0], seed=7))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("where", ["kv_cache", "units"])
def test_offsets_past_four_gigabytes(implementation: str, device: str, where: str, is_fp8: bool) -> None:
    shape = Shape(num_kv_heads=2, device=device, dtype=torch.float16, is_fp8=is_fp8, has_fp8_rows=is_fp8)
    arguments = a_step(shape, [39, None, -1, 16], seed=8)
    wanted = oracle(arguments)
    longer, move = far(arguments[where])
    moved = {where: longer}
    if where == "units":
        moved["host_table"] = arguments["host_table"] + move
    else:
        moved |= {name: arguments[name] + move for name in ("slot_ids", "page_ids")}
        moved["rows"] = arguments["rows"].clone()
        moved["rows"][:, 3] += torch.where(arguments["rows"][:, 3] < 0, 0, move)
    run(import_module(f"oasiskv.kernels.complete.{implementation}"), arguments | moved)
    got = arguments | {where: longer[move:]}
    for name in WRITTEN:
        first, second = (part.cpu().contiguous().view(torch.uint8) for part in (got[name], wanted[name]))
        if name == "kv_cache" and is_fp8:
            # But for the sign of a zero.
            first, second = torch.where(first == 128, 0, first), torch.where(second == 128, 0, second)
        assert torch.equal(first, second), name


@pytest.mark.parametrize("num_sinks", [0, 2, 20, 40])
def test_sink_blocks_are_no_victims_while_there_is_another(implementation: str, device: str, num_sinks: int) -> None:
    arguments = a_step(Shape(budget=6, num_kv_heads=4, device=device), [20, 21], seed=3) | {"num_sinks": num_sinks}
    check(implementation, arguments)


def test_among_equally_old_slots_the_lowest_goes(implementation: str, device: str) -> None:
    arguments = a_step(Shape(budget=6, device=device), [20], seed=4) | {"num_sinks": 0}
    arguments["stamp"].fill_(4)
    arguments["stamp"][..., 0] = 5
    check(implementation, arguments)


@pytest.mark.parametrize("finished", [[], [None], [-1, None]])
def test_without_a_finished_block_nothing_changes(implementation: str, device: str, finished: list[int | None]) -> None:
    check(implementation, a_step(Shape(device=device), finished, seed=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resident": torch.zeros(2, 3, 4, dtype=torch.int32)}, r"^resident: expected shape \[\*, 2, \*\], got"),
        ({"stamp": torch.zeros(2, 2, 5, dtype=torch.int32)}, r"^stamp: expected shape \[2, 2, 4\], got \[2, 2, 5\]"),
        ({"slot_ids": torch.zeros(2, 5, dtype=torch.int32)}, r"^slot_ids: expected shape \[2, 4\], got \[2, 5\]"),
        ({"page_ids": torch.zeros(3, 5, dtype=torch.int32)}, r"^page_ids: expected shape \[2, \*\], got \[3, 5\]"),
        ({"num_sinks": -1}, "^num_sinks: expected at least 0, got -1"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    arguments = a_step(Shape(), [20], seed=6)
    before = {name: arguments[name].clone() for name in WRITTEN}
    with pytest.raises(ConfigError, match=message):
        complete(**{name: (arguments | changes)[name] for name in TAKEN})
    assert all(torch.equal(arguments[name], before[name]) for name in WRITTEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": -1}, "^layer: expected 0 to 1, got -1"),
        ({"resident": torch.zeros(2, 3, 4, dtype=torch.int32)}, r"^resident: expected shape \[\*, 2, \*\], got"),
        ({"slot_ids": torch.zeros(2, 5, dtype=torch.int32)}, r"^slot_ids: expected shape \[2, 4\], got \[2, 5\]"),
        ({"host_table": torch.zeros(3, 5, dtype=torch.int32)}, r"^host_table: expected shape \[2, \*\], got \[3, 5\]"),
    ],
)
def test_nothing_reaches_the_host_by_an_argument_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments = a_step(Shape(), [20], seed=6)
    before = arguments["units"].clone()
    with pytest.raises(ConfigError, match=message):
        keep(**{name: (arguments | changes)[name] for name in KEPT})
    assert torch.equal(arguments["units"], before)
