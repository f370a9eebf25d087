"""Which engine blocks a sparse request holds: the one rule that the scheduler and the workers share without talking."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Places in a request's block table, which stays positional: entry i was given for block i.

    The first `budget_blocks` entries are the resident slots. Of the other complete blocks only those stay that became
    summary pages. The page with number j lies where block `page_position(j)` lay, a block that is complete, and out of
    the slots, at the time the page is first needed. So neither side needs a table of pages, and a page costs no new
    allocation.
    """

    budget_blocks: int
    rows_per_page: int
    """Blocks summarized by one page."""

    def num_pages(self, num_complete: int) -> int:
        """Summary pages of a request with `num_complete` complete blocks."""
        return -(-num_complete // self.rows_per_page)

    def page_position(self, page: int) -> int:
        """Block table entry that holds this summary page."""
        return max(self.budget_blocks + page, page * self.rows_per_page)

    def page_positions(self, num_complete: int) -> list[int]:
        """Entries of all summary pages of a request with `num_complete` complete blocks, ascending."""
        return [self.page_position(page) for page in range(self.num_pages(num_complete))]

    def may_switch(self, num_complete: int) -> bool:
        """Whether a dense request may become sparse: it would hold no more blocks, so the pages have a place."""
        return num_complete >= self.budget_blocks + self.num_pages(num_complete)

    @property
    def least_complete(self) -> int:
        """Fewest complete blocks with which a request may become sparse."""
        return -(-self.budget_blocks * self.rows_per_page // (self.rows_per_page - 1))

    def held_blocks(self, num_tokens: int, block_size: int) -> int:
        """Engine blocks of a sparse request with `num_tokens` in place: slots, pages and the active blocks."""
        num_complete = num_tokens // block_size
        return self.budget_blocks + self.num_pages(num_complete) + -(-num_tokens // block_size) - num_complete
