"""Which staged block of a handover holds what; prefill and decode share this rule and exchange no table."""

from dataclasses import dataclass
from typing import Self

from oasiskv.core.layout import SparseLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverLayout:
    """Places of a request's KV among the blocks of its lease: complete blocks, active block, summary pages, map.

    The map says which block each slot of the first working set holds: its unit of a layer and KV head begins with one
    little-endian int32 per slot.
    """

    num_complete: int
    """Complete blocks; they have the block indices that they have in the request."""

    num_pages: int
    """Summary pages."""

    has_active: bool
    """Whether the active block holds tokens; its place is there either way."""

    @classmethod
    def of(cls, num_tokens: int, block_size: int, layout: SparseLayout) -> Self:
        """Return the places of a request with this many tokens."""
        num_complete, rest = divmod(num_tokens, block_size)
        return cls(num_complete=num_complete, num_pages=layout.num_pages(num_complete), has_active=rest > 0)

    @property
    def active(self) -> int:
        """Block index of the active block."""
        return self.num_complete

    @property
    def pages(self) -> range:
        """Block indices of the summary pages."""
        return range(self.active + 1, self.active + 1 + self.num_pages)

    @property
    def map(self) -> int:
        """Block index of the map."""
        return self.pages.stop

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.map + 1
