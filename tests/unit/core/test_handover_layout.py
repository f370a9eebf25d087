from oasiskv.core.handover import HandoverLayout
from oasiskv.core.layout import SparseLayout

LAYOUT = SparseLayout(budget_blocks=4, rows_per_page=8)


def test_every_block_of_a_handover_has_one_place() -> None:
    for num_tokens in range(16 * 5, 16 * 40, 7):
        places = HandoverLayout.of(num_tokens, 16, LAYOUT)
        assert places.num_complete == num_tokens // 16
        assert places.num_pages == LAYOUT.num_pages(places.num_complete)
        assert [*range(places.num_complete), places.active, *places.pages, places.map] == [*range(places.num_blocks)]


def test_the_active_block_has_a_place_even_where_it_holds_nothing() -> None:
    full, more = HandoverLayout.of(16 * 9, 16, LAYOUT), HandoverLayout.of(16 * 9 + 1, 16, LAYOUT)
    assert (full.has_active, more.has_active) == (False, True)
    assert full.active == more.active == 9
    assert full.num_blocks == more.num_blocks == 9 + 1 + 2 + 1
