"""Which block table entries a sparse request holds, against brute force."""

import pytest

from oasiskv.core.layout import SparseLayout

BUDGETS = [1, 2, 3, 7, 16, 17, 31, 32, 33, 128]
ROWS = [1, 2, 3, 16, 32, 64]
SHAPES = [(budget, rows) for budget in BUDGETS for rows in ROWS if rows > 1 or budget == 1]
MAX_BLOCKS = 700


def layout_of(budget_blocks: int, rows_per_page: int) -> SparseLayout:
    return SparseLayout(budget_blocks=budget_blocks, rows_per_page=rows_per_page)


@pytest.mark.parametrize(("budget_blocks", "rows_per_page"), [shape for shape in SHAPES if shape[1] > 1])
def test_every_page_lies_in_an_entry_of_its_own_out_of_the_slots_that_is_complete(
    budget_blocks: int, rows_per_page: int
) -> None:
    layout = layout_of(budget_blocks, rows_per_page)
    for num_complete in range(layout.least_complete, MAX_BLOCKS):
        positions = layout.page_positions(num_complete)
        assert len(set(positions)) == len(positions) == -(-num_complete // rows_per_page)
        assert positions == sorted(positions)
        assert all(budget_blocks <= position < num_complete for position in positions)


@pytest.mark.parametrize(("budget_blocks", "rows_per_page"), [shape for shape in SHAPES if shape[1] > 1])
def test_a_page_that_a_sparse_request_gains_lies_where_the_block_that_needs_it_lay(
    budget_blocks: int, rows_per_page: int
) -> None:
    layout = layout_of(budget_blocks, rows_per_page)
    for num_complete in range(layout.least_complete, MAX_BLOCKS):
        before, after = layout.page_positions(num_complete), layout.page_positions(num_complete + 1)
        assert after in (before, [*before, num_complete])


@pytest.mark.parametrize(("budget_blocks", "rows_per_page"), [shape for shape in SHAPES if shape[1] > 1])
def test_a_request_may_switch_from_the_first_count_at_which_it_gains_nothing_on(
    budget_blocks: int, rows_per_page: int
) -> None:
    layout = layout_of(budget_blocks, rows_per_page)
    may = [layout.may_switch(num_complete) for num_complete in range(MAX_BLOCKS)]
    assert may == [n >= budget_blocks + -(-n // rows_per_page) for n in range(MAX_BLOCKS)]
    assert may.index(True) == layout.least_complete > budget_blocks
    assert all(may[layout.least_complete :])


@pytest.mark.parametrize(("budget_blocks", "rows_per_page"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_held_blocks_are_slots_pages_and_the_block_being_filled(
    budget_blocks: int, rows_per_page: int, block_size: int
) -> None:
    layout = layout_of(budget_blocks, rows_per_page)
    for num_complete in range(1, 140):
        pages = sum(1 for _ in range(0, num_complete, rows_per_page))
        for num_active in range(block_size):
            held = layout.held_blocks(num_complete * block_size + num_active, block_size)
            assert held == budget_blocks + pages + (num_active > 0)


def test_a_draft_token_that_opens_a_block_makes_it_two_active_ones() -> None:
    layout = layout_of(4, 16)
    # 20 complete blocks as of this step's tokens; the normal token fills the 21st, the draft token opens the 22nd.
    num_complete, num_tokens = 20, 21 * 16 + 1
    active = -(-num_tokens // 16) - num_complete
    assert active == 2
    assert layout.budget_blocks + layout.num_pages(num_complete) + active == 4 + 2 + 2
