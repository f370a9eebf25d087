"""The prefill side of a handover from a GPU: blocks are copied in the order of its stream, then put by a thread."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch

from oasiskv.core.handover import HandoverLayout
from oasiskv.engine import handover
from oasiskv.engine.handover import Outbox, StagedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.side import Side
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.kernels.transfer import store


class DeviceOutbox(Outbox):
    """What is stored for a request is put into its staged blocks, and at its switch the rest; see `Outbox`.

    Nothing waits for the device but a thread, and a request's blocks may become another's at once: the copies are made
    by then, in the order of the stream.

    Args:
        shape: This process's KV cache.
        sets: The working sets.
        kv_caches: One tensor per layer.
        pool: Where write-through put the blocks.
        executor: Puts what has been copied; None for a thread.
    """

    def __init__(
        self,
        shape: CacheShape,
        sets: WorkingSets,
        kv_caches: Sequence[torch.Tensor],
        pool: HostPool,
        executor: Executor | None = None,
    ) -> None:
        """Start with nothing under way."""
        super().__init__(shape, sets, kv_caches, pool)
        self._side = Side(sets.resident.device, "oasiskv-outbox", executor)

    def store(
        self, blocks: StagedBlocks, request_id: str, slot: int, table: torch.Tensor, first: int, end: int
    ) -> None:
        """Put complete blocks."""
        step = max(1, handover.MAX_UNDERWAY_BYTES // 4 // self._shape.host_block_bytes)
        for start in range(max(first, self._num_there[request_id]), end, step):
            indices = range(start, min(start + step, end))
            copied = self._buffer(len(indices), self._shape.num_layers)
            for layer in range(self._shape.num_layers):
                self._copy(layer, table[indices.start : indices.stop], copied, layer)
            self._put_later(blocks, request_id, indices, 0, copied)

    def stream(self, wanted: Mapping[str, tuple[int, int]], tables: Mapping[str, torch.Tensor]) -> None:
        """Stream nothing: `store` puts all layers of these blocks."""

    def export(
        self, blocks: StagedBlocks, request_id: str, slot: int, table: torch.Tensor, layout: HandoverLayout
    ) -> None:
        """Put the active block, the summary pages and the map of a request that just switched; see `Outbox.export`."""
        sets = self._sets
        sources = torch.cat([table[layout.active : layout.active + 1], sets.page_ids[slot, : layout.num_pages]])
        chosen = torch.empty_like(sets.resident[:, slot], device="cpu", pin_memory=sets.resident.is_cuda)
        chosen.copy_(sets.resident[:, slot], non_blocking=True)
        for layer in range(self._shape.num_layers):
            copied = self._buffer(len(sources) + 1, 1)
            self._copy(layer, sources, copied, 0)

            def add_map(copied: torch.Tensor = copied, mine: torch.Tensor = chosen[layer]) -> None:
                units = copied[-1, 0].zero_().view(torch.uint8).view(self._shape.num_kv_heads, -1)
                units[:, : mine.shape[1] * 4] = mine.view(torch.uint8)

            self._put_later(blocks, request_id, range(layout.active, layout.num_blocks), layer, copied, before=add_map)
        self._complete.add(self._leases[request_id])

    def stop(self) -> None:
        """End the thread."""
        self._side.close()

    def _copy(self, layer: int, block_ids: torch.Tensor, target: torch.Tensor, target_layer: int) -> None:
        places = torch.arange(len(block_ids), dtype=torch.int32, device=block_ids.device)
        store(self._kv_caches[layer], block_ids, target, target_layer, places)

    def _put_later(
        self,
        blocks: StagedBlocks,
        request_id: str,
        indices: Sequence[int],
        first_layer: int,
        data: torch.Tensor,
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        """Put data once the device has made it."""
        write: Future[None] = Future()
        lease = self._leases[request_id]

        def put() -> None:
            try:
                before()
                under_way = blocks.put(lease, indices, first_layer, data)
            except BaseException as error:
                write.set_exception(error)
                return
            under_way.add_done_callback(end)

        def end(under_way: "Future[None]") -> None:
            if (error := under_way.exception()) is None:
                write.set_result(None)
            else:
                write.set_exception(error)

        self._side.submit(self._side.mark(), put)
        self._note(lease, write, data.nbytes)

    def _buffer(self, num_blocks: int, num_layers: int) -> torch.Tensor:
        shape = self._shape
        size = (num_blocks, num_layers, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        with torch.inference_mode(False):  # else no other thread might write to it
            return torch.empty(size, dtype=shape.dtype, pin_memory=self._sets.resident.is_cuda)
