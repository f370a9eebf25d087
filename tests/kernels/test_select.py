from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.rows import FRESH, Counter, stamp_of
from oasiskv.kernels.select import select
from oasiskv.kernels.testing import Shape, counters, distinct, generator, step_rows


def a_step(shape: Shape, predicted: list[int | None], seed: int, *, cap: int, max_cap: int) -> dict[str, Any]:
    """Arguments of one call; `predicted` holds the number of predicted blocks of each row, None for a padding row."""
    random, budget, heads = generator(seed), shape.budget, shape.num_kv_heads
    num_rows, num_requests = len(predicted), len(predicted) + 2
    blocks = torch.full((num_rows, heads, budget), -1, dtype=torch.int32)
    scores = torch.full(blocks.shape, float("-inf"))
    resident = torch.empty(num_requests, heads, budget, dtype=torch.int32)
    for head in range(heads):
        for row, count in enumerate(predicted):
            places = torch.randperm(budget, generator=random)[: count or 0]
            blocks[row, head, places] = distinct(count or 0, shape.max_blocks, random, "cpu")
            # Few different scores, so that ties are many; both zeros and both signs among them.
            drawn = torch.tensor([-2.0, -0.5, -0.0, 0.0, 1.0, 1.5, float("inf")])
            scores[row, head, places] = drawn[torch.randint(0, 7, (count or 0,), generator=random)]
        for request in range(num_requests):
            resident[request, head] = distinct(budget, shape.max_blocks, random, "cpu")
    requests = distinct(num_rows, num_requests, random, "cpu").tolist()
    rows = [(-1 if n is None else r, shape.max_blocks, 9, -1) for r, n in zip(requests, predicted, strict=True)]
    arguments = {
        "blocks": blocks,
        "scores": scores,
        "rows": step_rows(rows, "cpu", caps=[cap + row for row in range(num_rows)]),
        "resident": resident,
        "stamp": torch.randint(0, 18, resident.shape, generator=random).int(),
        "plan": torch.full((num_rows, heads, max_cap, 2), 12345, dtype=torch.int32),
        "counters": counters(shape).cpu() + 5,
    }
    return {name: value.to(shape.device) for name, value in arguments.items()}


@dataclass
class Outcome:
    resident: list[Any]
    stamp: list[Any]
    plan: list[Any]
    counters: list[Any]


def oracle(arguments: dict[str, Any]) -> Outcome:
    """What must come out, one block at a time."""
    out = Outcome(**{name: arguments[name].tolist() for name in ("resident", "stamp", "plan", "counters")})
    blocks, scores = arguments["blocks"].tolist(), arguments["scores"].tolist()
    for row, (request, _, step, _, cap) in enumerate(arguments["rows"].tolist()):
        for head in range(len(out.counters)):
            plan = out.plan[row][head]
            plan[:] = [[-1, -1] for _ in plan]
            if request < 0:
                continue
            held, stamp, count = out.resident[request][head], out.stamp[request][head], out.counters[head]
            predicted = [(b, s) for b, s in zip(blocks[row][head], scores[row][head], strict=True) if b >= 0]
            wanted = {block for block, _ in predicted}
            for slot, block in enumerate(held):
                if block in wanted:
                    stamp[slot] = stamp_of(step)
            missing = sorted((pair for pair in predicted if pair[0] not in held), key=lambda pair: (-pair[1], pair[0]))
            victims = sorted((s for s in range(len(held)) if held[s] not in wanted), key=lambda s: (stamp[s] // 2, s))
            room = max(0, min(cap, len(plan)))
            admitted = missing[:room]
            for i, ((block, _), slot) in enumerate(zip(admitted, victims, strict=False)):
                count[Counter.WASTED] += stamp[slot] & FRESH
                plan[i] = [block, slot]
                held[slot], stamp[slot] = block, stamp_of(step, fresh=True)
            count[Counter.PREDICTED] += len(predicted)
            count[Counter.HIT] += len(predicted) - len(missing)
            count[Counter.FETCHED] += len(admitted)
            count[Counter.EVICTED] += len(admitted)
            count[Counter.DEFERRED] += len(missing) - len(admitted)
    return out


def run(implementation: str, arguments: dict[str, Any]) -> None:
    import_module(f"oasiskv.kernels.select.{implementation}").select(**arguments)


def assert_as(wanted: Outcome, arguments: dict[str, Any]) -> None:
    for name in ("plan", "resident", "stamp", "counters"):
        assert arguments[name].tolist() == getattr(wanted, name), name


@pytest.mark.parametrize("max_cap", [1, 3, 7])
@pytest.mark.parametrize("cap", [-1, 0, 1, 2, 99])
@pytest.mark.parametrize(("budget", "heads"), [(7, 1), (8, 3)])
def test_plan_residency_stamps_and_counters(
    implementation: str, device: str, budget: int, heads: int, cap: int, max_cap: int
) -> None:
    shape = Shape(budget=budget, num_kv_heads=heads, max_blocks=16, device=device)
    arguments = a_step(shape, [budget, None, 0, 1, budget - 1], seed=cap + 10 * max_cap, cap=cap, max_cap=max_cap)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert_as(wanted, arguments)


@pytest.mark.parametrize(("budget", "max_cap"), [(128, 6), (128, 128), (192, 8), (320, 5)])
def test_working_sets_of_ordinary_size(implementation: str, device: str, budget: int, max_cap: int) -> None:
    shape = Shape(budget=budget, num_kv_heads=2, max_blocks=2 * budget, device=device)
    arguments = a_step(shape, [budget, budget // 2], seed=budget, cap=max_cap, max_cap=max_cap)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert_as(wanted, arguments)


@pytest.mark.parametrize("predicted", [[], [None], [0]])
def test_nothing_predicted_fetches_nothing(implementation: str, device: str, predicted: list[int | None]) -> None:
    arguments = a_step(Shape(budget=5, max_blocks=8192, device=device), predicted, seed=6, cap=2, max_cap=2)
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert_as(wanted, arguments)
    assert (arguments["plan"] == -1).all()


def test_steps_far_into_a_long_run_keep_their_order(implementation: str, device: str) -> None:
    shape = Shape(budget=8, max_blocks=20, device=device)
    arguments = a_step(shape, [8, 8], seed=3, cap=8, max_cap=8)
    arguments["rows"][:, 2] = 1_000_000_000
    arguments["stamp"] += 1_999_999_900
    wanted = oracle(arguments)
    run(implementation, arguments)
    assert_as(wanted, arguments)


def test_many_steps_in_a_row_agree(implementation: str, device: str) -> None:
    shape = Shape(budget=6, max_blocks=12, device=device)
    state = a_step(shape, [6, 6], seed=0, cap=2, max_cap=3)
    for step in range(10, 18):
        fresh = a_step(shape, [6, 5], seed=step, cap=2, max_cap=3)
        state |= {"blocks": fresh["blocks"], "scores": fresh["scores"]}
        state["rows"][:, 2] = step
        wanted = oracle(state)
        run(implementation, state)
        assert_as(wanted, state)


def test_uncapped_the_working_set_becomes_the_predicted_set(implementation: str, device: str) -> None:
    shape = Shape(budget=8, max_blocks=30, device=device)
    arguments = a_step(shape, [8, 8], seed=4, cap=8, max_cap=8)
    run(implementation, arguments)
    for row, (request, *_) in enumerate(arguments["rows"].tolist()):
        held, predicted = arguments["resident"][request], arguments["blocks"][row]
        assert held.sort(-1).values.tolist() == predicted.sort(-1).values.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": torch.zeros(3, 2, 4, dtype=torch.int64)}, "^blocks: expected torch.int32, got torch.int64"),
        ({"scores": torch.zeros(3, 2, 5)}, r"^scores: expected shape \[3, 2, 4\], got \[3, 2, 5\]"),
        ({"resident": torch.zeros(5, 2, 3, dtype=torch.int32)}, r"^resident: expected shape \[\*, 2, 4\], got"),
        ({"stamp": torch.zeros(5, 2, 4)}, "^stamp: expected torch.int32, got torch.float32"),
        ({"plan": torch.zeros(3, 2, 5, 2, dtype=torch.int32)}, "^plan: expected room for 1 to 4 admissions, got 5"),
        ({"counters": torch.zeros(2, 5, dtype=torch.int64)}, r"^counters: expected shape \[2, 6\], got \[2, 5\]"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_nothing_is_written(changes: dict[str, Any], message: str) -> None:
    arguments = a_step(Shape(), [3, 2, 1], seed=9, cap=2, max_cap=2)
    before = arguments["resident"].clone()
    with pytest.raises(ConfigError, match=message):
        select(**(arguments | changes))
    assert torch.equal(arguments["resident"], before)
