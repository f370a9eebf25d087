from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from oasiskv.kernels.complete import complete, keep
from oasiskv.kernels.complete import reference as complete_reference
from oasiskv.kernels.fp8 import reference as fp8_reference
from oasiskv.kernels.fp8 import round_blocks
from oasiskv.kernels.predict import predict
from oasiskv.kernels.predict import reference as predict_reference
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.select import reference as select_reference
from oasiskv.kernels.select import select
from oasiskv.kernels.testing import Shape, counters, distinct, generator, host_units, numbers, step_rows
from oasiskv.kernels.transfer import reference as transfer_reference
from oasiskv.kernels.transfer import store, transfer

SHAPE = Shape(
    num_kv_heads=4, group=4, head_dim=128, budget=32, max_blocks=100, dtype=torch.bfloat16, device="cuda", num_layers=2
)
FP8 = pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
WRITTEN = ("kv_cache", "units", "resident", "stamp", "plan", "blocks", "counters")


class State:
    """What a layer of three requests holds; every step completes a block, predicts, selects and fetches."""

    def __init__(self, *, is_fp8: bool) -> None:
        shape, random = replace(SHAPE, is_fp8=is_fp8), generator(0)
        heads, num_pages = shape.num_kv_heads, shape.layout.num_pages(shape.max_blocks)
        places = distinct(3 * (32 + num_pages + 1), 300, random, "cuda").view(3, -1)
        self.layout: SummaryLayout = shape.layout
        self.slot_ids, self.page_ids = places[:, :32], places[:, 32:-1]
        self.kv_cache = numbers((300, *shape.unit), random, shape)
        self.units = host_units(3 * shape.max_blocks, shape, random)
        self.host_table = distinct(3 * shape.max_blocks, 3 * shape.max_blocks, random, "cuda").view(3, -1)
        self.query = numbers((3, heads * shape.group, shape.head_dim), random, shape)
        sources = places[:, -1].tolist()
        self.rows = step_rows([(2, 60, 5, sources[2]), (-1, 0, 5, -1), (0, 90, 5, -1)], "cuda", caps=[6, 0, 4])
        self.resident = torch.stack([distinct(32, 59, random, "cuda") for _ in range(3 * heads)]).view(3, heads, 32)
        self.stamp = torch.full_like(self.resident, 8)
        self.plan = torch.full((3, heads, 6, 2), -7, dtype=torch.int32, device="cuda")
        self.blocks = torch.full((3, heads, 32), -7, dtype=torch.int32, device="cuda")
        self.scores = torch.full(self.blocks.shape, float("nan"), device="cuda")
        self.counters = counters(shape)

    def step(self, *, plainly: bool) -> None:
        state = (self.resident, self.stamp)
        tables, kept = (self.slot_ids, self.page_ids), (self.resident, self.slot_ids, self.host_table)
        rounds = self.units.dtype == torch.uint8
        query, rows, layout = self.query, self.rows, self.layout
        found = (self.blocks, self.scores)
        source = (self.units, 1, self.kv_cache)
        chosen = (*found, rows, *state, self.plan, self.counters)
        if plainly:
            complete_reference.complete(
                self.kv_cache, rows, *state, *tables, self.counters, layout, 1, rounds=rounds
            )  # fmt: skip
            complete_reference.keep(self.kv_cache, self.units, 1, rows, *kept)
            predict_reference.predict(
                query, rows, self.kv_cache, self.page_ids, *found, layout, 0.25, "max", 1.0, 1
            )  # fmt: skip
            select_reference.select(*chosen)
            transfer_reference.transfer(*source, self.plan, rows, self.host_table, self.slot_ids)
        else:
            complete(
                self.kv_cache, rows, *state, *tables, self.counters, layout=layout, num_sinks=1, rounds=rounds
            )  # fmt: skip
            keep(self.kv_cache, self.units, 1, rows, *kept)
            predict(
                query, rows, self.kv_cache, self.page_ids, *found,
                layout=layout, alpha=0.25, reduction="max", scale=1.0, num_sinks=1,
            )  # fmt: skip
            select(*chosen)
            transfer(*source, self.plan, rows, self.host_table, self.slot_ids)


def assert_same(got: State, wanted: State) -> None:
    torch.cuda.synchronize()
    assert torch.equal(got.blocks.sort(-1).values, wanted.blocks.sort(-1).values)
    for name in WRITTEN:
        if name != "blocks":
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name


def captured(action: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        action()
    return graph


@FP8
def test_a_replayed_graph_does_what_the_references_do_step_after_step(is_fp8: bool) -> None:
    State(is_fp8=is_fp8).step(plainly=False)  # compiles
    torch.cuda.synchronize()
    got, wanted = State(is_fp8=is_fp8), State(is_fp8=is_fp8)
    graph = captured(lambda: got.step(plainly=False), torch.cuda.Stream())  # type: ignore[no-untyped-call]
    assert_same(got, State(is_fp8=is_fp8))
    for step in range(6, 14):
        for state in (got, wanted):
            state.rows[:, 2] = step
            if step > 6:
                state.rows[:, 3] = -1
            state.query.copy_(numbers(tuple(state.query.shape), generator(step), SHAPE))
        torch.cuda.synchronize()
        graph.replay()
        wanted.step(plainly=True)
        assert_same(got, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@FP8
def test_no_operation_waits_for_the_device(is_fp8: bool) -> None:
    state = State(is_fp8=is_fp8)
    state.step(plainly=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.step(plainly=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@FP8
@pytest.mark.parametrize("priority", [0, -1])
def test_work_goes_to_the_current_stream(priority: int, is_fp8: bool) -> None:
    state, wanted = State(is_fp8=is_fp8), State(is_fp8=is_fp8)
    state.step(plainly=False)
    state = State(is_fp8=is_fp8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        state.step(plainly=False)
    # Whatever ran on another stream would be done before the sleep is over.
    assert not stream.query()
    assert (state.plan[0, 0, 0].cpu() == -7).all()
    stream.synchronize()
    wanted.step(plainly=True)
    assert_same(state, wanted)


def test_in_a_graph_stored_fp8_units_come_back_as_rounding_leaves_them() -> None:
    shape, random = replace(SHAPE, is_fp8=True), generator(7)
    cache, units = numbers((40, *shape.unit), random, shape), host_units(20, shape, random)
    cache[:20] *= torch.logspace(-6, 6, 20, device="cuda")[:, None, None, None]
    cache[3, 1, 2, 5], cache[4, 0, 7, 200] = float("nan"), -float("inf")
    exact, ids = cache.clone(), torch.arange(20, dtype=torch.int32, device="cuda")
    plan = torch.stack([ids, ids], -1).expand(1, shape.num_kv_heads, 20, 2).contiguous()
    rows, slots = step_rows([(0, 20, 1, -1)], "cuda"), (ids + 20)[None]

    def there_and_back() -> None:
        store(cache, ids, units, 1, ids)
        transfer(units, 1, cache, plan, rows, ids[None], slots)
        round_blocks(cache, ids)

    there_and_back()  # compiles
    cache.copy_(exact)
    graph = captured(there_and_back, torch.cuda.Stream())  # type: ignore[no-untyped-call]
    wanted = exact[:20].clone()
    fp8_reference.round_blocks(wanted, ids)
    for _ in range(2):  # the second time they are rounded already
        graph.replay()
        torch.cuda.synchronize()
        for got in (cache[:20], cache[20:]):
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(got.nan_to_num(1, 2, 3).view(torch.int16), wanted.nan_to_num(1, 2, 3).view(torch.int16))
