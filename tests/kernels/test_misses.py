from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch

from oasiskv.kernels.misses import ABSENT, Mailbox, ask
from oasiskv.kernels.misses.op import Answer
from oasiskv.kernels.rows import Row

HEADS, CAP, BUDGET, BLOCKS, LAYERS, REQUESTS = 3, 4, 8, 40, 2, 5
LAYER = 1


class Asker:
    """One layer of a step with random plans, and the mailbox beside it."""

    def __init__(self, num_rows: int, seed: int, device: str, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(seed)

        def ints(high: int, *size: int) -> torch.Tensor:
            return torch.randint(0, high, size, generator=random, dtype=torch.int32)

        self.kv_cache = torch.randn(60, HEADS, 16, 64, generator=random).to(dtype).to(device)
        self.table = ints(90, REQUESTS, BLOCKS).to(device)
        self.resident = ints(BLOCKS, LAYERS, REQUESTS, HEADS, BUDGET).to(device)
        slots = torch.randperm(59, generator=random)[: REQUESTS * BUDGET] + 1
        self.slot_ids = slots.view(REQUESTS, BUDGET).int().to(device)
        plan = torch.stack([ints(BLOCKS, num_rows, HEADS, CAP), ints(BUDGET, num_rows, HEADS, CAP)], -1)
        plan[torch.rand(plan.shape[:3], generator=random) < 0.3] = -1
        self.plan = plan.to(device)
        self.rows = torch.zeros(num_rows, len(Row), dtype=torch.int32)
        self.rows[:, Row.REQUEST] = torch.randperm(REQUESTS, generator=random)[:num_rows].int()
        self.rows[:, Row.STEP] = 9
        if num_rows > 2:
            self.rows[1, Row.REQUEST] = -1
            self.plan[1] = -1
        self.rows = self.rows.to(device)
        self.mailbox = Mailbox.of(torch.zeros(LAYERS, REQUESTS, HEADS, CAP, 2, device=device).int(), self.resident,
                                  self.kv_cache)  # fmt: skip

    def lose(self, *blocks: int) -> None:
        """Let blocks of all requests be absent."""
        self.table[:, list(blocks)] = ABSENT

    def absent_entries(self) -> list[tuple[int, int, int]]:
        """Return (row, head, entry) of the copies whose block is not here."""
        plan, rows, table = self.plan.cpu(), self.rows.cpu(), self.table.cpu()
        return [
            (row, head, entry)
            for row in range(len(plan))
            for head in range(HEADS)
            for entry in range(CAP)
            if plan[row, head, entry, 0] >= 0 and table[rows[row, Row.REQUEST], plan[row, head, entry, 0]] < 0
        ]

    def run(self, implementation: str, timeout_s: float = 20) -> None:
        """Ask, by one implementation or the other."""
        arguments = (self.plan, self.rows, self.table, self.resident[LAYER], self.slot_ids, self.kv_cache)
        if implementation == "op":
            ask(self.mailbox, LAYER, *arguments, timeout_s=timeout_s)
            return
        box, at = self.mailbox, LAYER
        import_module(f"oasiskv.kernels.misses.{implementation}").ask(
            *arguments, box.asked, box.answered, box.num_rows, box.sizes, box.rows[at], box.plan[at], box.resident[at],
            box.updates[at], box.bounced[at], box.units[at], box.counts, box.failed, box.told, at, timeout_s,
        )  # fmt: skip

    def wait_for_question(self) -> None:
        """Wait until the device has asked; it always does here."""
        while int(self.mailbox.asked[LAYER]) == int(self.mailbox.answered[LAYER]):
            pass

    def answer(self, updates: list[tuple[int, int]], bounced: list[int], units: torch.Tensor) -> None:
        """Answer a question."""
        box = self.mailbox
        box.updates[LAYER, : len(updates)] = torch.tensor(updates, dtype=torch.int32).view(-1, 2)
        box.bounced[LAYER, : len(bounced)] = torch.tensor(bounced, dtype=torch.int32)
        box.units[LAYER, : len(bounced)] = units.to(box.units.dtype)
        box.sizes[LAYER, Answer.UPDATES], box.sizes[LAYER, Answer.BOUNCED] = len(updates), len(bounced)
        box.answered[LAYER] = box.asked[LAYER]


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_where_nothing_is_absent_nobody_is_asked(
    device: str, dtype: torch.dtype, implementation: str, num_rows: int
) -> None:
    asker = Asker(num_rows, 3, device, dtype)
    before = asker.plan.clone()
    asker.run(implementation)
    finish(device)
    assert torch.equal(asker.plan, before)
    assert int(asker.mailbox.asked.sum()) == int(asker.mailbox.told[0]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_absent_is_asked_for_and_the_answer_carried_out(
    device: str, dtype: torch.dtype, implementation: str, seed: int
) -> None:
    asker = Asker(4, seed, device, dtype)
    asker.lose(*range(0, BLOCKS, 3))
    plan, rows, table, cache = (one.cpu().clone() for one in (asker.plan, asker.rows, asker.table, asker.kv_cache))
    lacking = asker.absent_entries()
    assert lacking
    # One third gets a place, one third comes without one, and one third does not come.
    placed = {(int(rows[r, Row.REQUEST]), int(plan[r, h, e, 0])) for r, h, e in lacking[::3]}
    updates = [(request * BLOCKS + block, 1000 + block) for request, block in sorted(placed)]
    request_of = [int(rows[row, Row.REQUEST]) for row in range(4)]
    bounced = [it for it in lacking[1::3] if (request_of[it[0]], int(plan[it[0], it[1], it[2], 0])) not in placed]
    bounced = list(
        {(row, head, int(plan[row, head, entry, 1])): (row, head, entry) for row, head, entry in bounced}.values()
    )
    units = torch.randn(len(bounced), 16, 64, generator=torch.Generator().manual_seed(seed))
    asked: dict[str, Any] = {}

    def host() -> None:
        asker.wait_for_question()
        box = asker.mailbox
        asked["num_rows"] = int(box.num_rows[LAYER])
        asked["rows"], asked["plan"] = box.rows[LAYER, :4].clone(), box.plan[LAYER, :4].clone()
        asked["resident"] = box.resident[LAYER, :4].clone()
        asker.answer(updates, [(row * HEADS + head) * CAP + entry for row, head, entry in bounced], units)

    with ThreadPoolExecutor(1) as thread:
        answered = thread.submit(host)
        asker.run(implementation)
        finish(device)
        answered.result()
    assert asked["num_rows"] == 4
    assert torch.equal(asked["rows"], rows)
    assert torch.equal(asked["plan"], plan)
    for row in {row for row, _, _ in lacking}:
        assert torch.equal(asked["resident"][row], asker.resident[LAYER, request_of[row]].cpu())
    for place, value in updates:
        table.view(-1)[place] = value
    assert torch.equal(asker.table.cpu(), table)
    for (row, head, entry), unit in zip(bounced, units, strict=True):
        cache[int(asker.slot_ids[request_of[row], plan[row, head, entry, 1]]), head] = unit.to(dtype)
    assert torch.equal(asker.kv_cache.cpu(), cache)
    for row, head, entry in lacking:
        if table[request_of[row], plan[row, head, entry, 0]] < 0:
            plan[row, head, entry] = -1
    assert torch.equal(asker.plan.cpu(), plan)


def test_the_second_question_is_answered_by_the_second_answer(device: str, implementation: str) -> None:
    asker = Asker(1, 5, device, torch.float32)
    for number in (1, 2):
        asker.plan[0, 0, 0] = torch.tensor([7, 2], dtype=torch.int32)
        asker.lose(7)
        place = int(asker.rows[0, Row.REQUEST]) * BLOCKS + 7

        def host(place: int = place, value: int = 50 + number) -> None:
            asker.wait_for_question()
            asker.answer([(place, value)], [], torch.zeros(0, 16, 64))

        with ThreadPoolExecutor(1) as thread:
            answered = thread.submit(host)
            asker.run(implementation)
            finish(device)
            answered.result()
        assert int(asker.table.view(-1)[place]) == 50 + number
        assert asker.plan[0, 0, 0].tolist() == [7, 2]


def test_a_wait_for_nobody_is_given_up_and_so_are_later_ones() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asker = Asker(2, 6, device, torch.float32)
    asker.lose(*range(BLOCKS))
    asker.run("op", timeout_s=0.05)
    finish(device)
    assert int(asker.mailbox.told[0]) == 1 + LAYER
    assert bool((asker.plan < 0).all())
    asker.plan[0, 0, 0] = torch.tensor([7, 2], dtype=torch.int32)
    asker.run("op", timeout_s=1e6)
    finish(device)
    assert bool((asker.plan < 0).all())
