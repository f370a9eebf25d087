"""Every operation is a torch custom op that says what it writes, and that torch.compile takes as one step."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import oasiskv.kernels
from oasiskv.core.layout import SparseLayout
from oasiskv.kernels.misses import Mailbox
from oasiskv.kernels.rows import Given, Row
from oasiskv.kernels.testing import Shape, counters, distinct, generator, host_units, numbers, step_rows

FOLDERS = sorted(path.parent.name for path in Path(next(iter(oasiskv.kernels.__path__))).glob("*/op.py"))
DOORS = {folder: import_module(f"oasiskv.kernels.{folder}") for folder in FOLDERS}
NAMES = sorted(
    name.removeprefix("oasiskv::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("oasiskv::")
)  # fmt: skip
"""All that are registered once the doors are imported, so that none can be forgotten here."""

SHAPE = Shape(num_requests=2, budget=3, max_blocks=6)
TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)
# Where nothing is lacking nobody is asked, so that nobody need answer.
MAILBOX = Mailbox.of(
    torch.zeros(2, 2, 2, 2, 2, dtype=torch.int32),
    torch.zeros(2, 2, 2, 3, dtype=torch.int32),
    torch.zeros(1, *SHAPE.unit),
)


def ids(*size: int, value: int = 0) -> torch.Tensor:
    return torch.full(size, value, dtype=torch.int32)


def a_layer(*, is_fp8: bool = False) -> dict[str, torch.Tensor]:
    """All that the operations of one layer read and write in a step of a sparse request and a padding row."""
    shape, random, layout = SHAPE, generator(0), SparseLayout(budget_blocks=3, rows_per_page=16)
    pool = host_units(8, Shape(is_fp8=is_fp8), random)
    return {
        "kv_cache": numbers((8, *shape.unit), random, shape),
        "pages": numbers((8, *shape.unit), random, shape),
        "units": pool,
        "query": numbers((4, 4, 64), random, shape),
        "queries": numbers((2, 4, 64), random, shape),
        "rows": step_rows([(1, 4, 2, 6), (-1, 0, 0, -1)], "cpu", caps=[2, 2]),
        "later_rows": step_rows([(0, 4, 2, 6), (1, 4, 2, -1)], "cpu", caps=[2, 2]),
        "blocks": torch.tensor([3, 1, 2], dtype=torch.int32).repeat(2, 2, 1),
        "scores": torch.zeros(2, 2, 3),
        "resident": distinct(4, 4, random, "cpu")[:3].repeat(2, 2, 1),
        "stamp": ids(2, 2, 3),
        "plan": ids(2, 2, 2, 2, value=-1),
        "counters": counters(shape),
        "slot_ids": TABLE[:, :3].contiguous(),
        "page_ids": TABLE,
        "host_table": TABLE.flip(0).contiguous(),
        "some": TABLE[0].contiguous(),
        "others": TABLE[1].contiguous(),
        "given": torch.tensor([[0, 1], [0, 0], [0, 0], [1, 0]], dtype=torch.int32).view(len(Given), 2),
        "query_start_loc": torch.arange(3, dtype=torch.int32),
        "seq_lens": torch.tensor([65, 9], dtype=torch.int32),
        "num_complete": ids(3, value=3),
        "request_pages": ids(3, layout.num_pages(8)),
        "block_table": torch.arange(16, dtype=torch.int32).view(2, 8),
        "slots": ids(2),
        "query_rows": ids(2),
        "drafter_rows": ids(2),
        "planned_rows": ids(2, len(Row)),
        "attended_table": ids(2, 9),
        "attended_lens": ids(2),
    }


def arguments_of(name: str) -> tuple[Any, ...]:
    """Arguments by an operation's schema."""
    x = a_layer()
    tables = x["slot_ids"], x["page_ids"], x["host_table"]
    state = x["resident"], x["stamp"]
    box = MAILBOX
    return {
        "ask": (
            x["plan"], x["rows"], x["host_table"], x["resident"], x["slot_ids"], x["kv_cache"], box.asked, box.answered,
            box.num_rows, box.sizes, box.rows[1], box.plan[1], box.resident[1], box.updates[1], box.bounced[1],
            box.units[1], box.counts, box.failed, box.told, 1, 1.0,
        ),
        "summarize": (x["kv_cache"], x["some"], x["pages"], x["others"], 0, False, False),
        "predict": (
            x["queries"], x["rows"], x["kv_cache"], TABLE, x["blocks"], x["scores"], True, False, 0.0, "max", 1.0, 1,
        ),
        "select": (x["blocks"], x["scores"], x["rows"], *state, x["plan"], x["counters"]),
        "transfer": (x["units"], 1, x["kv_cache"], x["plan"], x["rows"], x["host_table"], x["slot_ids"]),
        "store": (x["kv_cache"], x["some"], x["units"], 1, x["others"]),
        "round_blocks": (x["kv_cache"], x["others"]),
        "complete": (x["kv_cache"], x["rows"], *state, *tables[:2], x["counters"], False, False, 1, False),
        "keep": (x["kv_cache"], x["units"], 1, x["rows"], x["resident"], x["slot_ids"], x["host_table"]),
        "publish": (x["query"], x["query_rows"], x["slots"], x["rows"], x["queries"], x["later_rows"]),
        "plan": (
            x["given"], x["query_start_loc"], x["seq_lens"], x["block_table"], x["num_complete"], x["request_pages"],
            x["slots"], x["query_rows"], x["drafter_rows"], x["planned_rows"], x["attended_table"], x["attended_lens"],
            3, 16, 16, 2, 2,
        ),
    }[name]  # fmt: skip


def whole_step(x: dict[str, torch.Tensor]) -> torch.Tensor:
    """Call the door of every operation between two steps that a compiler would like to join."""
    layout = SHAPE.layout
    state, rows, tables = (x["resident"], x["stamp"]), x["rows"], (x["slot_ids"], x["page_ids"], x["host_table"])
    x["queries"] = x["queries"] * 2
    DOORS["plan"].plan(
        x["given"], x["query_start_loc"], x["seq_lens"], x["block_table"], x["num_complete"], x["request_pages"],
        slots=x["slots"], query_rows=x["query_rows"], drafter_rows=x["drafter_rows"], rows=x["planned_rows"],
        attended_table=x["attended_table"], attended_lens=x["attended_lens"],
        budget=3, rows_per_page=16, block_size=16, step=2, cap=2,
    )  # fmt: skip
    DOORS["publish"].publish(x["query"], x["query_rows"], x["slots"], rows, x["queries"], x["later_rows"])
    DOORS["complete"].complete(
        x["kv_cache"], rows, *state, *tables[:2], x["counters"], layout=layout, num_sinks=1, rounds=False
    )
    DOORS["complete"].keep(x["kv_cache"], x["units"], 1, rows, x["resident"], x["slot_ids"], x["host_table"])
    DOORS["summarize"].summarize(x["kv_cache"], x["some"], x["pages"], x["others"], 0, layout)
    DOORS["predict"].predict(
        x["queries"], rows, x["pages"], x["page_ids"], x["blocks"], x["scores"],
        layout=layout, alpha=0.25, reduction="max", scale=0.125, num_sinks=1,
    )  # fmt: skip
    DOORS["select"].select(x["blocks"], x["scores"], rows, *state, x["plan"], x["counters"])
    DOORS["misses"].ask(
        MAILBOX, 1, x["plan"], rows, x["host_table"], x["resident"], x["slot_ids"], x["kv_cache"], timeout_s=1.0
    )
    DOORS["transfer"].transfer(x["units"], 1, x["kv_cache"], x["plan"], rows, x["host_table"], x["slot_ids"])
    DOORS["transfer"].store(x["kv_cache"], x["some"], x["units"], 0, x["others"])
    DOORS["fp8"].round_blocks(x["kv_cache"], x["others"])
    return x["queries"] + 1


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_says_what_is_written_and_shapes_can_be_traced(name: str) -> None:
    operation = getattr(torch.ops.oasiskv, name).default
    results = torch.library.opcheck(
        operation,
        arguments_of(name),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_compiled_step_calls_every_operation_and_changes_what_a_plain_one_changes(is_fp8: bool) -> None:
    called: list[str] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        called.extend(name.split(".")[1] for name in names if name.startswith("oasiskv."))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(whole_step, backend=note, fullgraph=True)
    got, wanted = a_layer(is_fp8=is_fp8), a_layer(is_fp8=is_fp8)
    assert torch.equal(compiled(got), whole_step(wanted))
    assert sorted(called) == NAMES
    changed = [name for name, value in a_layer(is_fp8=is_fp8).items() if not torch.equal(value, wanted[name])]
    assert {"kv_cache", "units", "pages", "blocks", "plan", "resident", "planned_rows", "later_rows"} <= set(changed)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
