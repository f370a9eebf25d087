"""The working sets on the device: dense tensors indexed by layer and request slot. `runtime` changes them."""

from dataclasses import dataclass

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import UnsupportedError
from oasiskv.core.host_memory import FP8_SCALE_BYTES, HostPoolConfig
from oasiskv.core.layout import SparseLayout
from oasiskv.engine.upload import upload
from oasiskv.kernels.formats import FP8
from oasiskv.kernels.rows import Counter, Row, SummaryLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of this process's KV cache: its own layers and heads, those of the drafter included."""

    num_layers: int
    """Attention layers, the target's first, then the drafter's."""
    num_target_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Of the numbers in the cache."""
    scale: float
    """Softmax scale of attention."""
    query_dtype: torch.dtype | None = None
    """Of published queries; None where it is that of the cache."""
    key_scales: tuple[float, ...] = ()
    """By layer: what the product of a published query and a key of the cache is to be multiplied by, where their
    numbers are fp8; else empty."""
    is_fp8: bool = False
    """Whether the host holds units as fp8 with scales of their own."""
    tp_rank: int = 0
    """Tensor-parallel rank of this process, counted from 0; KV heads are split evenly, in order."""
    tp_size: int = 1
    """Tensor-parallel ranks of the engine."""

    @property
    def host_dtype(self) -> torch.dtype:
        """Type of the host pool's tensor: bytes where units have scales, which lie between them."""
        return torch.uint8 if self.is_fp8 else self.dtype

    @property
    def published_dtype(self) -> torch.dtype:
        """Type of published queries."""
        return self.query_dtype or self.dtype

    @property
    def unit_bytes(self) -> int:
        """Bytes of one (layer, block, head) on the link, its scales included."""
        scale_bytes = FP8_SCALE_BYTES if self.is_fp8 else 0
        return self.block_size * 2 * self.head_dim * self.host_dtype.itemsize + scale_bytes

    @property
    def host_block_bytes(self) -> int:
        """Bytes in host memory of one block over all layers and heads of this process."""
        return self.host_pool(1).block_bytes

    def score_scale(self, layer: int) -> float:
        """Return what a layer's scores are multiplied by to be logits of attention."""
        return self.scale * self.key_scales[layer] if self.key_scales else self.scale

    def host_pool(self, num_blocks: int) -> HostPoolConfig:
        """Return the shape of this process's host pool.

        Raises:
            ConfigError: units of this shape cannot be stored.
        """
        return HostPoolConfig(
            num_blocks=num_blocks,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            dtype_bytes=self.host_dtype.itemsize,
            is_fp8_cache=self.dtype == FP8,
        )


class WorkingSets:
    """All device tensors of the backend.

    R is the number of request slots: one per running or arriving request and a spare one for padding rows.

    Attributes:
        resident: `int32[num_layers, R, num_kv_heads, budget]`: block index in each slot.
        stamp: `int32`, same shape: when the slot was last selected, see `kernels.rows.stamp_of`.
        num_complete: `int32[R]`: complete blocks the working sets know of.
        slot_ids: `int32[R, budget]`: slot to engine block.
        page_ids: `int32[R, max_pages]`: summary page to engine block.
        host_table: `int32[R, max_blocks]`: block index to host block.
        query: `[num_layers, R, num_query_heads, head_dim]`: the last published lookahead query.
        rows: `int32[num_layers, >= R, len(Row)]`: the last published step metadata, by batch row.
        blocks, scores: `int32`, `float32[num_layers, R, num_kv_heads, budget]`: what was predicted, by batch row.
        plan: `int32[num_layers, R, num_kv_heads, most_cap, 2]`: what the running step fetches, by batch row.
        counters: `int64[num_layers, num_kv_heads, len(Counter)]`.
        attended_table: `int32[R, at least max_blocks]`: the block table that attention reads, by batch row.
        switch_pages: One layer's summary pages while a request switches, `[max_pages, ...]` shaped as engine blocks.
        layer_tables: `int32[num_layers, R, max_blocks]`: as `host_table`, by layer, and `ABSENT` where a layer's part
            of a block is in staging alone; None where the device is not to ask for such blocks.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        max_requests: int,
        max_blocks: int,
        device: torch.device,
        *,
        asks: bool = False,
    ) -> None:
        """Allocate everything.

        Args:
            config: The backend's settings.
            shape: This process's KV cache.
            max_requests: Requests that run or arrive at a time.
            max_blocks: Blocks of the longest request, the draft token's included.
            device: Where attention runs.
            asks: Whether the device asks for blocks that are in staging.

        Raises:
            UnsupportedError: stamps of this many steps, or fp8 rows of this head_dim, would not fit.
        """
        if max_blocks >= 2**30:
            raise UnsupportedError(f"max_model_len: expected fewer than 2**30 blocks, got {max_blocks}")
        self.summaries = SummaryLayout.of(config, shape.block_size, shape.head_dim, shape.dtype.itemsize)
        self.layout = SparseLayout(budget_blocks=config.budget_blocks, rows_per_page=self.summaries.rows_per_page)
        layers, heads, budget = shape.num_layers, shape.num_kv_heads, config.budget_blocks
        max_pages = self.summaries.num_pages(max_blocks)
        max_requests += 1

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.resident = ints(layers, max_requests, heads, budget)
        self.stamp = ints(layers, max_requests, heads, budget)
        self.num_complete = ints(max_requests)
        self.slot_ids = ints(max_requests, budget)
        self.page_ids = ints(max_requests, max_pages)
        self.host_table = ints(max_requests, max_blocks)
        self.layer_tables = ints(layers, max_requests, max_blocks) if asks else None
        self.plan = ints(layers, max_requests, heads, max(1, config.most_cap), 2)
        heads_of_queries = (shape.num_query_heads, shape.head_dim)
        self.query = torch.zeros(layers, max_requests, *heads_of_queries, dtype=shape.published_dtype, device=device)
        # Rounded up, so that the rows of each layer begin at a multiple of 16 bytes: kernels are compiled for that.
        self.rows = ints(layers, -(-max_requests // 4) * 4, len(Row))
        self.blocks = ints(layers, max_requests, heads, budget)
        self.scores = torch.zeros(layers, max_requests, heads, budget, dtype=torch.float32, device=device)
        self.counters = torch.zeros(layers, heads, len(Counter), dtype=torch.int64, device=device)
        self.attended_table = ints(max_requests, max(max_blocks, budget + 2))
        page = (heads, shape.block_size, 2 * shape.head_dim)
        self.switch_pages = torch.zeros(max_pages, *page, dtype=shape.dtype, device=device)

    def seat(self, slot: int, table: torch.Tensor, num_complete: int) -> int:
        """Note where a request that becomes sparse has its slots and pages, and return how many pages it has.

        Args:
            slot: Its request slot.
            table: `int32[n]`: its block table.
            num_complete: Its complete blocks.
        """
        positions = upload(self.layout.page_positions(num_complete), table.device)
        self.slot_ids[slot] = table[: self.slot_ids.shape[1]]
        self.page_ids[slot, : len(positions)] = table[positions]
        self.num_complete[slot] = num_complete
        return len(positions)

    def clear(self, slot: int) -> None:
        """Forget the request in a slot, so that the next one there starts from the same state whatever came before."""
        for tensor in (self.resident, self.stamp, self.query):
            tensor[:, slot] = 0
        for tensor in (self.num_complete, self.slot_ids, self.page_ids, self.host_table):
            tensor[slot] = 0
