from collections.abc import Callable

import pytest
import torch

from oasiskv.kernels.complete import complete
from oasiskv.kernels.complete import reference as complete_reference
from oasiskv.kernels.predict import predict
from oasiskv.kernels.predict import reference as predict_reference
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.select import reference as select_reference
from oasiskv.kernels.select import select
from oasiskv.kernels.testing import Shape, counters, distinct, generator, host_units, numbers, step_rows
from oasiskv.kernels.transfer import reference as transfer_reference
from oasiskv.kernels.transfer import transfer

SHAPE = Shape(
    num_kv_heads=4, group=4, head_dim=128, budget=32, max_blocks=100, dtype=torch.bfloat16, device="cuda", num_layers=2
)
WRITTEN = ("kv_cache", "units", "resident", "stamp", "plan", "blocks", "counters")


class State:
    """What a layer of three requests holds; every step completes a block, predicts, selects and fetches."""

    def __init__(self) -> None:
        shape, random = SHAPE, generator(0)
        heads, num_pages = shape.num_kv_heads, shape.layout.num_pages(shape.max_blocks)
        places = distinct(3 * (32 + num_pages + 1), 300, random, "cuda").view(3, -1)
        self.layout: SummaryLayout = shape.layout
        self.slot_ids, self.page_ids = places[:, :32], places[:, 32:-1]
        self.kv_cache = numbers((300, *shape.unit), random, shape)
        self.units = host_units(3 * shape.max_blocks, shape, random)
        self.host_table = distinct(3 * shape.max_blocks, 3 * shape.max_blocks, random, "cuda").view(3, -1)
        self.query = numbers((3, heads * shape.group, shape.head_dim), random, shape)
        sources = places[:, -1].tolist()
        self.rows = step_rows([(2, 60, 5, sources[2]), (-1, 0, 5, -1), (0, 90, 5, -1)], "cuda")
        self.cap = torch.tensor([4, 0, 6], dtype=torch.int32, device="cuda")
        self.resident = torch.stack([distinct(32, 59, random, "cuda") for _ in range(3 * heads)]).view(3, heads, 32)
        self.stamp = torch.full_like(self.resident, 8)
        self.plan = torch.full((3, heads, 6, 2), -7, dtype=torch.int32, device="cuda")
        self.blocks = torch.full((3, heads, 32), -7, dtype=torch.int32, device="cuda")
        self.scores = torch.full(self.blocks.shape, float("nan"), device="cuda")
        self.counters = counters(shape)

    def step(self, *, plainly: bool) -> None:
        state = (self.resident, self.stamp)
        tables = (self.slot_ids, self.page_ids, self.host_table)
        query, rows, layout = self.query, self.rows, self.layout
        found = (self.blocks, self.scores)
        source = (self.units, 1, self.kv_cache)
        chosen = (*found, rows, self.cap, *state, self.plan, self.counters)
        if plainly:
            complete_reference.complete(
                self.kv_cache, self.units, 1, rows, *state, *tables, self.counters, layout, 1
            )  # fmt: skip
            predict_reference.predict(
                query, rows, self.kv_cache, self.page_ids, *found, layout, 0.25, "max", 1.0, 1
            )  # fmt: skip
            select_reference.select(*chosen)
            transfer_reference.transfer(*source, self.plan, rows, self.host_table, self.slot_ids)
        else:
            complete(
                self.kv_cache, self.units, 1, rows, *state, *tables, self.counters, layout=layout, num_sinks=1
            )  # fmt: skip
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


def test_a_replayed_graph_does_what_the_references_do_step_after_step() -> None:
    State().step(plainly=False)  # compiles
    torch.cuda.synchronize()
    got, wanted = State(), State()
    graph = captured(lambda: got.step(plainly=False), torch.cuda.Stream())  # type: ignore[no-untyped-call]
    assert_same(got, State())
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


def test_no_operation_waits_for_the_device() -> None:
    state = State()
    state.step(plainly=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.step(plainly=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("priority", [0, -1])
def test_work_goes_to_the_current_stream(priority: int) -> None:
    state, wanted = State(), State()
    state.step(plainly=False)
    state = State()
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
