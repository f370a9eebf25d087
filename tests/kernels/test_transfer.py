from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.fp8 import round_blocks
from oasiskv.kernels.fp8.reference import narrow, views, widen
from oasiskv.kernels.testing import Shape, distinct, far, generator, host_units, numbers, step_rows
from oasiskv.kernels.transfer import store, transfer

SHAPES = [
    Shape(block_size=16, head_dim=64, num_kv_heads=1),
    Shape(block_size=32, head_dim=96, num_kv_heads=3),
    Shape(block_size=64, head_dim=256, num_kv_heads=2),
    Shape(block_size=16, head_dim=128, num_kv_heads=8),
    Shape(block_size=16, head_dim=64, num_kv_heads=1, is_fp8=True),
    Shape(block_size=32, head_dim=96, num_kv_heads=3, is_fp8=True),
    Shape(block_size=16, head_dim=128, num_kv_heads=8, is_fp8=True),
    Shape(block_size=64, head_dim=256, num_kv_heads=1, is_fp8=True),
]


def name_of(shape: Shape) -> str:
    return f"{shape.num_kv_heads}-{shape.block_size}x{shape.head_dim}" + ("-fp8" if shape.is_fp8 else "")


def a_plan(shape: Shape, filled: list[int | None], seed: int, *, max_cap: int) -> dict[str, Any]:
    """Arguments of one transfer; `filled` holds the entries of each row's plan, None for a padding row."""
    random, num_rows, num_requests = generator(seed), len(filled), len(filled) + 1
    num_host, num_blocks = num_requests * 9 + 2, num_requests * shape.budget + 3
    host_table = distinct(num_requests * 9, num_host, random, "cpu").view(num_requests, 9)
    slot_ids = distinct(num_requests * shape.budget, num_blocks, random, "cpu").view(num_requests, shape.budget)
    plan = torch.full((num_rows, shape.num_kv_heads, max_cap, 2), -1, dtype=torch.int32)
    for row, count in enumerate(filled):
        for head in range(shape.num_kv_heads):
            entries = torch.randperm(max_cap, generator=random)[: count or 0]
            plan[row, head, entries, 0] = torch.randint(0, 9, (len(entries),), generator=random).int()
            plan[row, head, entries, 1] = distinct(len(entries), shape.budget, random, "cpu")
    requests = distinct(num_rows, num_requests, random, "cpu").tolist()
    rows = [(-1 if n is None else r, 9, 1, -1) for r, n in zip(requests, filled, strict=True)]
    wide = torch.full((num_requests, shape.budget + 3), 10**6, dtype=torch.int32)
    wide[:, : shape.budget] = slot_ids
    return {
        "units": host_units(num_host, shape, random),
        "layer": 1,
        "kv_cache": numbers((num_blocks, *shape.unit), random, shape),
        "plan": plan.to(shape.device),
        "rows": step_rows(rows, shape.device),
        "host_table": host_table.to(shape.device),
        "slot_ids": wide.to(shape.device)[:, : shape.budget],
    }


def widened(units: torch.Tensor, unit: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A pool's units as the engine's numbers."""
    return widen(*views(units, unit), dtype) if units.dtype == torch.uint8 else units


def oracle(arguments: dict[str, Any]) -> torch.Tensor:
    """The cache afterwards, one unit at a time."""
    cache: torch.Tensor = arguments["kv_cache"].cpu().clone()
    units = widened(arguments["units"], tuple(cache.shape[1:]), cache.dtype)
    plan, rows = arguments["plan"].tolist(), arguments["rows"].tolist()
    for row, heads in enumerate(plan):
        for head, entries in enumerate(heads):
            for block, slot in entries:
                if block >= 0:
                    request = rows[row][0]
                    host = int(arguments["host_table"][request, block])
                    engine = int(arguments["slot_ids"][request, slot])
                    cache[engine, head] = units[host, arguments["layer"], head]
    return cache


def run(implementation: str, arguments: dict[str, Any], **options: int) -> None:
    module = import_module(f"oasiskv.kernels.transfer.{implementation}")
    module.transfer(**arguments, **(options if implementation == "kernel" else {}))


@pytest.mark.parametrize("base", SHAPES, ids=name_of)
@pytest.mark.parametrize("max_cap", [1, 3, 4])
def test_every_planned_unit_arrives_and_nothing_else_is_written(
    implementation: str, dtype: torch.dtype, device: str, base: Shape, max_cap: int
) -> None:
    shape = replace(base, device=device, dtype=dtype)
    arguments = a_plan(shape, [max_cap, None, 0, 1], seed=max_cap, max_cap=max_cap)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert torch.equal(arguments["kv_cache"].cpu(), wanted)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 999])
@pytest.mark.parametrize(("depth", "is_fp8"), [(2, False), (4, False), (8, False), (3, True)])
def test_programs_share_a_plan_with_gaps(device: str, num_programs: int, depth: int, is_fp8: bool) -> None:
    shape = Shape(num_kv_heads=2, budget=6, device=device, is_fp8=is_fp8)
    arguments = a_plan(shape, [5, 2, None, 5, 0, 1, 5], seed=1, max_cap=5)
    wanted = oracle(arguments)
    run("kernel", arguments, num_programs=num_programs, depth=depth)
    assert torch.equal(arguments["kv_cache"].cpu(), wanted)


def test_a_plan_larger_than_one_lookup(implementation: str, device: str) -> None:
    shape = Shape(num_kv_heads=4, budget=40, device=device)
    arguments = a_plan(shape, [3, 6, 0, None, 6, 6, 1] * 8, seed=5, max_cap=6)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert torch.equal(arguments["kv_cache"].cpu(), wanted)


@pytest.mark.parametrize("filled", [[], [None, None], [0]])
def test_an_empty_plan_changes_nothing(implementation: str, device: str, filled: list[int | None]) -> None:
    arguments = a_plan(Shape(device=device), filled, seed=2, max_cap=2)
    before = arguments["kv_cache"].clone()
    run(implementation, arguments)
    assert torch.equal(arguments["kv_cache"], before)


@pytest.mark.parametrize("where", ["units", "kv_cache", "fp8 units"])
def test_offsets_past_four_gigabytes(implementation: str, device: str, where: str) -> None:
    is_fp8 = where == "fp8 units"
    shape = Shape(
        num_kv_heads=1, head_dim=128, num_layers=1, budget=4, device=device, dtype=torch.float16, is_fp8=is_fp8
    )
    arguments = a_plan(shape, [2], seed=3, max_cap=2) | {"layer": 0}
    table, near = ("slot_ids", "kv_cache") if where == "kv_cache" else ("host_table", "units")
    move = 1_050_000 - len(arguments[near])
    wanted = oracle(arguments)
    source = arguments[near]
    pinned = near == "units" and device != "cpu"
    far = torch.empty(1_050_000, *source.shape[1:], dtype=source.dtype, device=source.device, pin_memory=pinned)
    far[move:] = source
    run(implementation, arguments | {near: far, table: arguments[table] + move})
    got = far[move:] if where == "kv_cache" else arguments["kv_cache"]
    assert torch.equal(got.cpu(), wanted)


def test_blocks_at_both_ends_of_a_long_context(implementation: str, device: str) -> None:
    shape = Shape(num_kv_heads=1, head_dim=16, num_layers=1, device=device, dtype=torch.float16)
    arguments = a_plan(shape, [2, 2], seed=6, max_cap=2) | {"layer": 0}
    arguments["units"] = host_units(3 * 8192, shape, generator(7))
    arguments["host_table"] = distinct(3 * 8192, 3 * 8192, generator(8), device).view(3, 8192)
    arguments["plan"][:, :, :, 0] = torch.tensor([0, 8191], dtype=torch.int32)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert torch.equal(arguments["kv_cache"].cpu(), wanted)


def test_bytes_arrive_as_they_are_over_nan_and_leave_the_rest_nan(implementation: str, device: str) -> None:
    shape = Shape(device=device, dtype=torch.float16)
    arguments = a_plan(shape, [2, None, 3], seed=8, max_cap=3)
    arguments["kv_cache"].fill_(float("nan"))
    units = arguments["units"].view(torch.int16)
    # Any 16 bits, NaN with payloads among them.
    units.copy_(torch.randint(-(2**15), 2**15, units.shape, generator=generator(9)))
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert torch.equal(arguments["kv_cache"].cpu().view(torch.int16), wanted.view(torch.int16))
    back, ids = torch.zeros_like(arguments["units"]), torch.arange(5, dtype=torch.int32, device=device)
    back = back if device == "cpu" else back.pin_memory()
    import_module(f"oasiskv.kernels.transfer.{implementation}").store(arguments["kv_cache"], ids, back, 1, ids)
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(back[:5, 1].view(torch.int16), wanted[:5].view(torch.int16))


@pytest.mark.parametrize("where", ["units", "kv_cache", "fp8 units"])
def test_store_reaches_past_four_gigabytes(implementation: str, device: str, where: str) -> None:
    shape = Shape(num_kv_heads=2, num_layers=2, device=device, dtype=torch.float16, is_fp8=where == "fp8 units")
    random = generator(10)
    cache, units = numbers((4, *shape.unit), random, shape), host_units(5, shape, random)
    block_ids, host_ids = distinct(3, 4, random, device), distinct(3, 5, random, device)
    store = import_module(f"oasiskv.kernels.transfer.{implementation}").store
    longer, move = far(cache if where == "kv_cache" else units)
    wanted = units.clone() if device == "cpu" else units.clone().pin_memory()
    store(cache, block_ids, wanted, 1, host_ids)
    if where == "kv_cache":
        store(longer, block_ids + move, units, 1, host_ids)
    else:
        store(cache, block_ids, longer, 1, host_ids + move)
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(units if where == "kv_cache" else longer[move:], wanted)


@pytest.mark.parametrize("base", SHAPES, ids=name_of)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_store_writes_whole_blocks_of_one_layer(
    implementation: str, dtype: torch.dtype, device: str, base: Shape, count: int
) -> None:
    shape, random = replace(base, device=device, dtype=dtype), generator(count)
    cache, units = numbers((9, *shape.unit), random, shape), host_units(11, shape, random)
    block_ids, host_ids = distinct(count, 9, random, device), distinct(count, 11, random, device)
    wanted = units.clone()
    for block, host in zip(block_ids.tolist(), host_ids.tolist(), strict=True):
        if shape.is_fp8:
            for view, values in zip(views(wanted, shape.unit), narrow(cache[block].cpu()), strict=True):
                view[host, 1] = values
        else:
            wanted[host, 1] = cache[block].cpu()
    import_module(f"oasiskv.kernels.transfer.{implementation}").store(cache, block_ids, units, 1, host_ids)
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(units, wanted)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_what_was_stored_comes_back(device: str, is_fp8: bool) -> None:
    shape, random = Shape(device=device, is_fp8=is_fp8), generator(4)
    cache, units = numbers((6, *shape.unit), random, shape), host_units(6, shape, random)
    ids = torch.arange(6, dtype=torch.int32, device=device)
    store(cache, ids, units, 0, ids)
    back = torch.zeros_like(cache)
    plan = torch.stack([ids, ids], -1).view(1, 1, 6, 2).expand(1, 2, 6, 2).contiguous()
    transfer(units, 0, back, plan, step_rows([(0, 6, 1, -1)], device), ids[None], ids[None])
    if is_fp8:
        assert not torch.equal(back, cache)  # the engine's own blocks stay exact
        round_blocks(cache, ids)
    assert torch.equal(back, cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": torch.zeros(4, 2, 2, 16, 64)}, r"^units: expected shape \[\*, \*, 2, 16, 128\], got"),
        ({"units": torch.zeros(4, 2, 2, 16, 128).half()}, "^units: expected torch.float32, got torch.float16"),
        ({"units": torch.zeros(4, 2, 4096, dtype=torch.uint8)}, r"^units: expected shape \[\*, \*, 4224\], got"),
        ({"layer": 2}, "^layer: expected 0 to 1, got 2"),
        ({"plan": torch.zeros(2, 2, 2, 2, dtype=torch.int32)}, r"^plan: expected shape \[1, 2, \*, 2\], got"),
        ({"slot_ids": torch.zeros(3, 4, dtype=torch.int32)}, r"^slot_ids: expected shape \[2, \*\], got \[3, 4\]"),
        ({"host_table": torch.zeros(4, 2, dtype=torch.int32).mT}, "^host_table: expected contiguous memory, got str"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    arguments = a_plan(Shape(), [2], seed=9, max_cap=2)
    before = arguments["kv_cache"].clone()
    with pytest.raises(ConfigError, match=message):
        transfer(**(arguments | changes))
    assert torch.equal(arguments["kv_cache"], before)


def test_store_refuses_lists_of_different_length() -> None:
    shape, ids = Shape(), torch.zeros(3, dtype=torch.int32)
    units = host_units(4, shape, generator(0))
    with pytest.raises(ConfigError, match=r"^host_ids: expected shape \[3\], got \[2\]"):
        store(torch.zeros(4, *shape.unit), ids, units, 0, ids[:2])
