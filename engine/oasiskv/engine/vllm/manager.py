"""The KV cache spec and the scheduler-side manager of sparse requests.

The spec travels from the workers to the scheduler, where vLLM makes a manager for it. The manager keeps vLLM's block
tables positional and frees what the ledger says; the connector carries the ledger's orders to the workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from oasiskv.core.errors import UnsupportedError
from oasiskv.core.layout import SparseLayout
from oasiskv.core.ledger import RequestLedger


@dataclass(frozen=True, kw_only=True)
class LookaheadSpec(FullAttentionSpec):
    """A full-attention layer whose requests hold a bounded number of blocks once they decode sparsely."""

    budget_blocks: int
    rows_per_page: int

    @classmethod
    def of(cls, spec: KVCacheSpec, layout: SparseLayout) -> "LookaheadSpec":
        """Turn a layer's full-attention spec into one of ours.

        Raises:
            UnsupportedError: the layer has another kind of KV cache.
        """
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
            raise UnsupportedError(
                f"model: expected full-attention layers only, got {type(spec).__name__}; "
                "serve this model without OasisKV"
            )
        values = {field.name: getattr(spec, field.name) for field in fields(spec)}
        return cls(**values, budget_blocks=layout.budget_blocks, rows_per_page=layout.rows_per_page)

    @classmethod
    def merge(cls, specs: list["LookaheadSpec"]) -> "LookaheadSpec":
        """Return the one spec of all layers; the parent would rebuild it without our fields."""
        if any(spec != specs[0] for spec in specs):
            raise UnsupportedError(
                "speculative_config.model: expected the target's number of KV heads, head size and dtype; "
                "choose another draft model, or method 'ngram'"
            )
        return specs[0]


class LookaheadManager(FullAttentionManager):
    """vLLM's manager of full-attention blocks, bounded for sparse requests.

    Prefix caching stays off in this group: resident slots are rewritten, so no hash of theirs may live.
    """

    def __init__(self, kv_cache_spec: LookaheadSpec, **kwargs: Any) -> None:
        """Start without a ledger; the connector brings it before the first request."""
        super().__init__(kv_cache_spec, **kwargs)
        self.ledger: RequestLedger | None = None

    @property
    def _ledger(self) -> RequestLedger:
        if self.ledger is None:
            raise UnsupportedError(
                "kv_transfer_config.kv_connector: expected OasisKVConnector, which brings the ledger"
            )
        return self.ledger

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the blocks to allocate; more than there are when host memory is short, so that the request waits."""
        ledger = self._ledger
        has_blocks = bool(self.req_to_blocks.get(request_id))
        if apply_admission_cap and not has_blocks:
            ledger.admit(request_id, num_tokens, total_computed_tokens - num_local_computed_tokens)
        if not ledger.can_grow(request_id, num_tokens):
            return self.block_pool.num_gpu_blocks + 1
        if not has_blocks and ledger.begins_staged(request_id):
            num_external_blocks = cdiv(total_computed_tokens, self.block_size)
            return len(ledger.first_entries(request_id)) + cdiv(num_tokens, self.block_size) - num_external_blocks
        needed = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        if apply_admission_cap:
            needed += ledger.reserved_blocks()
        if (shortage := needed - self.block_pool.get_num_free_blocks()) > 0:
            ledger.note_shortage(shortage)
        return needed

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Allocate what a request needs of its tokens in staging: slots, summary pages and the active block."""
        if not self._ledger.begins_staged(request_id):  # a prefix that is loaded, all of it
            super().allocate_external_computed_blocks(
                request_id, num_local_computed_tokens, num_external_computed_tokens, record_for_zeroing
            )
            return
        blocks, needed = self.req_to_blocks[request_id], self._ledger.first_entries(request_id)
        num_entries = cdiv(num_local_computed_tokens + num_external_computed_tokens, self.block_size)
        blocks.extend([self._null_block] * num_entries)
        for entry, block in zip(needed, self.block_pool.get_new_blocks(len(needed)), strict=True):
            blocks[entry] = block

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Allocate engine blocks, and host blocks for the same tokens."""
        self._ledger.grow(request_id, num_tokens)
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks of a sparse request that its workers no longer need."""
        ledger, blocks = self._ledger, self.req_to_blocks.get(request_id)
        entries = ledger.advance(request_id, processed_computed_tokens)
        if not blocks:
            return
        freed = []
        for entry in entries:
            if not blocks[entry].is_null and not ledger.is_page(request_id, entry):
                freed.append(blocks[entry])
                blocks[entry] = self._null_block
        self.block_pool.free_blocks(reversed(freed))

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Make the request's host blocks findable by content; engine blocks are not cached."""
        self._ledger.seal(request.request_id, request.block_hashes)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find nothing: engine blocks are not cached."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Give up everything of a request that finished or was preempted."""
        if self.ledger is not None:
            self.ledger.release(request_id)
        return super().pop_blocks_for_free(request_id)


def install() -> None:
    """Make the spec known to vLLM in this process.

    vLLM fills its registry with the built-in specs only while it is empty, so those come first.
    """
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(LookaheadSpec, LookaheadManager, uniform_type_base_spec=LookaheadSpec)
