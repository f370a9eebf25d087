"""The words that all operations share: the fields of a row of step metadata, the layout of summaries, the counters."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Self

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import UnsupportedError

Reduction = Literal["max", "sum", "softmax"]
"""How the scores of the query heads that share a KV head become one score."""


class Row(IntEnum):
    """Columns of `rows: int32[num_rows, len(Row)]`, one row per sparse request of a batch."""

    REQUEST = 0
    """Request slot, the index into all request-indexed tensors; -1 marks a padding row that every operation skips."""
    NUM_COMPLETE = 1
    """Complete blocks of the request in this step; blocks from here on are active."""
    STEP = 2
    """Number of this step, for stamps; grows by one per step."""
    FINISHED_BLOCK = 3
    """Engine block that holds block NUM_COMPLETE - 1 if that became complete in this step, else -1."""
    CAP = 4
    """Most blocks that each KV head may fetch in this step."""


class Given(IntEnum):
    """Rows of `given: int32[len(Given), num_rows]`: what the host knows of each row of a batch."""

    SLOT = 0
    """Request slot."""
    NUM_DRAFTS = 1
    """Draft tokens at the row's end."""
    NUM_UNUSABLE = 2
    """Those of them that no query should look ahead with, placeholders."""
    IS_SPARSE = 3
    """1 if the request is sparse."""


class Counter(IntEnum):
    """Columns of `counters: int64[num_kv_heads, len(Counter)]` of one layer, summed over sparse rows."""

    PREDICTED = 0
    HIT = 1
    """Predicted and resident."""
    FETCHED = 2
    """Predicted, absent, admitted."""
    DEFERRED = 3
    """Predicted, absent, over the cap."""
    WASTED = 4
    """Fetched earlier and evicted before another prediction named it."""
    EVICTED = 5
    """Resident blocks that gave their slot to a fetched or a completed block."""


class Waited(IntEnum):
    """Columns of `waited: int64[num_layers, len(Waited)]`: what the foreground waited for on the device, and why."""

    PASSES = 0
    """Waits that were not over at once."""
    UNITS = 1
    """Units fetched that such a wait was for."""
    NANOSECONDS = 2
    """Time of such waits."""
    TRANSFER_NANOSECONDS = 3
    """Time in which transfers were under way, where that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLayout:
    """Where the summary of a block lies in a summary page.

    A page is an engine block of shape `[num_kv_heads, block_size, 2 * head_dim]`. A page of one head is read as
    `rows_per_page` rows: `[max | min]` of width `2 * head_dim`, or the midpoint alone of width `head_dim`. The summary
    of `block_index` is row `block_index % rows_per_page` of page `block_index // rows_per_page`.

    Rows of fp8 are bytes. Behind all rows of a page lie `rows_per_page` bytes more: with which power of two the numbers
    of a row are to be multiplied, as the exponent of a float32.
    """

    kind: Literal["minmax", "mid"]
    block_size: int
    head_dim: int
    is_fp8: bool = False
    """Whether rows are fp8; else they have the dtype of the cache."""
    dtype_bytes: int = 2
    """Bytes of an element of the cache. They count for fp8 alone: so many rows have room in a page."""

    def __post_init__(self) -> None:
        """Check that rows begin where a GPU reads 16 bytes at a time.

        Raises:
            UnsupportedError: Those of this head_dim do not.
        """
        if self.is_fp8 and self.width % 16:
            raise UnsupportedError(
                f"summary_dtype: expected auto with head_dim {self.head_dim} and summary {self.kind!r}, whose fp8 rows "
                f"are {self.width} bytes and not a multiple of 16, got fp8"
            )

    @classmethod
    def of(cls, config: LookaheadConfig, block_size: int, head_dim: int, dtype_bytes: int) -> Self:
        """Return the layout of an engine's summaries.

        Args:
            config: The backend's settings.
            block_size: Tokens per block.
            head_dim: Width of K per token and KV head.
            dtype_bytes: Bytes of an element of the cache.

        Raises:
            UnsupportedError: Rows of this head_dim cannot be fp8.
        """
        return cls(
            kind=config.summary,
            block_size=block_size,
            head_dim=head_dim,
            is_fp8=config.summary_dtype == "fp8",
            dtype_bytes=dtype_bytes,
        )

    @property
    def rows_per_page(self) -> int:
        """Blocks summarized by one page."""
        if self.is_fp8:
            return self.block_size * 2 * self.head_dim * self.dtype_bytes // (self.width + 1)
        return self.block_size if self.kind == "minmax" else 2 * self.block_size

    @property
    def width(self) -> int:
        """Elements of one summary row."""
        return 2 * self.head_dim if self.kind == "minmax" else self.head_dim

    def num_pages(self, num_blocks: int) -> int:
        """Pages that hold the summaries of `num_blocks` blocks."""
        return -(-num_blocks // self.rows_per_page)


FRESH = 1
"""Lowest bit of a stamp: the slot's block was fetched and no later prediction has named it yet."""


def stamp_of(step: int, *, fresh: bool = False) -> int:
    """Return the stamp of a slot last selected in `step`; stamps order by step, the lowest bit aside."""
    return 2 * step + (FRESH if fresh else 0)
