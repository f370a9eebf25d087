from collections.abc import Callable
from typing import Any

import pytest
import torch

import oasiskv.kernels.complete
import oasiskv.kernels.fp8
import oasiskv.kernels.predict
import oasiskv.kernels.select
import oasiskv.kernels.summarize
import oasiskv.kernels.transfer
from oasiskv.kernels.testing import Shape, counters, step_rows

TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)


def arguments_of(name: str) -> tuple[Any, ...]:
    shape = Shape(num_requests=2, budget=3)
    cache, units = torch.randn(8, *shape.unit), torch.randn(8, 2, *shape.unit)
    rows = step_rows([(1, 4, 2, 6), (-1, 0, 0, -1)], "cpu", caps=[2, 2])
    blocks, scores = torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros(2, 2, 3)
    blocks[:] = torch.tensor([3, 1, 2])
    state = TABLE[:, None, :3].repeat(1, 2, 1).contiguous()
    plan = torch.full((2, 2, 2, 2), -1, dtype=torch.int32)
    return {
        "summarize": (cache, TABLE[0], torch.randn(8, *shape.unit), TABLE[1], 0, False, False),
        "predict": (
            torch.randn(2, 4, 64), rows, cache, TABLE, blocks, scores, True, False, 0.0, "max", 1.0, 1,
        ),
        "select": (
            blocks, scores, rows, state, state.clone(), plan, counters(shape),
        ),
        "transfer": (units, 1, cache, plan, rows, TABLE, TABLE[:, :3]),
        "store": (cache, TABLE[0], units, 1, TABLE[1]),
        "round_blocks": (cache, TABLE[1]),
        "complete": (
            cache, units, 1, rows, state, state.clone(), TABLE[:, :3], TABLE, TABLE, counters(shape), False, False, 1,
        ),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["summarize", "predict", "select", "transfer", "store", "complete", "round_blocks"])
def test_the_schema_says_what_is_written_and_shapes_can_be_traced(name: str) -> None:
    operation = getattr(torch.ops.oasiskv, name).default
    results = torch.library.opcheck(
        operation, arguments_of(name), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    assert set(results.values()) == {"SUCCESS"}


def test_a_compiled_function_calls_the_operation_as_one_step() -> None:
    def keep(cache: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        doubled = cache * 2
        oasiskv.kernels.transfer.store(doubled, TABLE[0], units, 0, TABLE[1])
        return doubled + 1

    compiled: Callable[..., torch.Tensor] = torch.compile(keep, backend="aot_eager", fullgraph=True)
    shape = Shape()
    cache = torch.randn(4, *shape.unit)
    units = torch.zeros(8, 2, *shape.unit)
    assert torch.equal(compiled(cache, units), cache * 2 + 1)
    assert torch.equal(units[4:, 0], cache * 2)
