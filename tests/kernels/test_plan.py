from importlib import import_module
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.core.layout import SparseLayout
from oasiskv.kernels.plan import plan
from oasiskv.kernels.plan import reference as reference_module
from oasiskv.kernels.rows import Given, Row
from oasiskv.kernels.testing import generator

OUTPUTS = ("slots", "query_rows", "drafter_rows", "rows", "attended_table", "attended_lens")


def a_step(
    device: str, *, budget: int, block_size: int, rows_per_page: int, kinds: str, seed: int = 0
) -> dict[str, Any]:
    """Arguments of one step; kinds: p prefill chunk, d dense decode, s sparse, f sparse whose block just finished."""
    random, layout = generator(seed), SparseLayout(budget_blocks=budget, rows_per_page=rows_per_page)

    def pick(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=random))

    count, num_slots, max_blocks = len(kinds), len(kinds) + 3, 4 * budget + 9
    slots = torch.randperm(num_slots - 1, generator=random)[:count].tolist()
    given: list[list[int]] = []
    starts, lens, known = [0], [], [0] * num_slots
    for kind, slot in zip(kinds, slots, strict=True):
        drafts = pick(0, 1) if kind != "p" else 0
        queries = pick(1, 3 * block_size) if kind == "p" else 1 + drafts
        if kind in "sf":
            complete = pick(layout.least_complete + 1, 3 * budget + 5)
            # A block finishes when the first of its successor's tokens is computed.
            before = complete * block_size + (0 if kind == "f" else pick(1, block_size - 1))
            known[slot] = complete - (kind == "f")
        else:
            before = pick(0, 3 * budget * block_size) if kind == "p" else pick(1, budget * block_size - 2)
        starts.append(starts[-1] + queries)
        lens.append(before + queries)
        given.append([slot, drafts, pick(0, drafts), int(kind in "sf")])
    ids = torch.randint(1, 10**6, (count, max_blocks + 3), generator=random).int()
    return {
        "given": torch.tensor(given, dtype=torch.int32).view(count, len(Given)).T.contiguous().to(device),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "block_table": ids.to(device)[:, :max_blocks],
        "num_complete": torch.tensor(known, dtype=torch.int32, device=device),
        "page_ids": torch.zeros(num_slots, layout.num_pages(max_blocks), dtype=torch.int32, device=device),
        "slots": torch.full((count + 2,), -5, dtype=torch.int32, device=device),
        "query_rows": torch.full((count + 2,), -5, dtype=torch.int32, device=device),
        "drafter_rows": torch.full((count + 2,), -5, dtype=torch.int32, device=device),
        "rows": torch.full((count + 2, len(Row)), -5, dtype=torch.int32, device=device),
        "attended_table": torch.full((count + 2, max_blocks + 1), -5, dtype=torch.int32, device=device),
        "attended_lens": torch.full((count + 2,), -5, dtype=torch.int32, device=device),
        "budget": budget,
        "rows_per_page": rows_per_page,
        "block_size": block_size,
        "step": 17,
        "cap": 5,
    }


def oracle(step: dict[str, Any]) -> list[dict[str, Any]]:
    """What each row of the batch must become, in plain Python."""
    budget, size = step["budget"], step["block_size"]
    layout = SparseLayout(budget_blocks=budget, rows_per_page=step["rows_per_page"])
    starts, known = step["query_start_loc"].tolist(), step["num_complete"].tolist()
    expected = []
    for i, (slot, drafts, unusable, sparse) in enumerate(step["given"].T.tolist()):
        length, table = int(step["seq_lens"][i]), step["block_table"][i].tolist()
        complete, last = (length - (starts[i + 1] - starts[i])) // size, -(-length // size)
        blocks = table[:budget] + table[complete:last] if sparse else table[:last]
        newest = complete - 1
        expected.append(
            {
                "slot": slot,
                "query_row": starts[i + 1] - 1 - unusable,
                "drafter_row": starts[i + 1] - 1 - drafts,
                "row": [
                    slot if sparse else -1,
                    complete,
                    step["step"],
                    table[newest] if sparse and complete > known[slot] else -1,
                    step["cap"],
                ],
                "blocks": blocks,
                "len": length - (complete - budget) * size if sparse else length,
                "known": complete if sparse else known[slot],
                "page": (newest // step["rows_per_page"], table[layout.page_position(newest // step["rows_per_page"])])
                if sparse
                else None,
            }
        )
    return expected


@pytest.mark.parametrize(
    ("budget", "block_size", "rows_per_page"),
    [(4, 16, 16), (3, 32, 64), (128, 16, 16), (2048, 64, 127)],
    ids=["small", "mid", "real", "long"],
)
@pytest.mark.parametrize("kinds", ["", "s", "f", "d", "p", "pdsfsfdp", "ffff"])
def test_plan_gives_every_row_its_place_its_query_and_its_blocks(
    kinds: str, budget: int, block_size: int, rows_per_page: int, device: str, implementation: str
) -> None:
    step = a_step(device, budget=budget, block_size=block_size, rows_per_page=rows_per_page, kinds=kinds)
    expected = oracle(step)
    run = reference_module if implementation == "reference" else import_module("oasiskv.kernels.plan.kernel")
    run.plan(**step)
    for i, row in enumerate(expected):
        assert step["slots"][i] == row["slot"]
        assert step["query_rows"][i] == row["query_row"]
        assert step["drafter_rows"][i] == row["drafter_row"]
        assert step["rows"][i].tolist() == row["row"]
        assert step["attended_lens"][i] == row["len"]
        assert step["attended_table"][i, : len(row["blocks"])].tolist() == row["blocks"]
        assert step["num_complete"][row["slot"]] == row["known"]
        if row["page"] is not None:
            page, block = row["page"]
            assert step["page_ids"][row["slot"], page] == block


def test_plan_turns_the_rows_behind_the_batch_into_padding(device: str, implementation: str) -> None:
    step = a_step(device, budget=4, block_size=16, rows_per_page=16, kinds="ds")
    run = reference_module if implementation == "reference" else import_module("oasiskv.kernels.plan.kernel")
    run.plan(**step)
    spare = len(step["num_complete"]) - 1
    assert step["slots"][2:].tolist() == [spare, spare]
    assert step["rows"][2:, [Row.REQUEST, Row.FINISHED_BLOCK]].tolist() == [[-1, -1]] * 2
    assert step["attended_lens"][2:].tolist() == [0, 0]
    assert step["query_rows"][2:].tolist() == [0, 0]


def test_plan_leaves_the_pages_and_counts_of_dense_requests_alone(device: str, implementation: str) -> None:
    step = a_step(device, budget=4, block_size=16, rows_per_page=16, kinds="pd")
    run = reference_module if implementation == "reference" else import_module("oasiskv.kernels.plan.kernel")
    run.plan(**step)
    assert not step["page_ids"].any()
    assert not step["num_complete"].any()


def test_plan_refuses_outputs_that_are_too_small(device: str) -> None:
    step = a_step(device, budget=4, block_size=16, rows_per_page=16, kinds="dd")
    narrow = step | {"attended_table": step["attended_table"][:, :5].contiguous()}
    with pytest.raises(ConfigError, match=r"^attended_table: expected at least"):
        plan(**narrow)
    few = step | {name: step[name][:1] for name in OUTPUTS}
    with pytest.raises(ConfigError, match=r"^rows: expected at least 2, got 1"):
        plan(**few)
