"""A request's KV on its way between two engines: out of the one that prefilled, into the one that decodes.

`Outbox`, and `inbox.Inbox`, belong to a `Runtime`; the bytes move through a `StagedBlocks`, which the process that owns
the engine brings. `core.handover` says which staged block holds what.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import (
    InvalidRequestError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.kernels.formats import FP8

IndicesT = TypeVar("IndicesT", range, list[int])

NONE = range(0)

MAX_UNDERWAY_BYTES = 256 * 2**20
"""Copies of staged bytes that wait to be written; the engine waits when there are more, so that they stay bounded."""


def check_can_hand_over(config: LookaheadConfig, shape: CacheShape, device: torch.device, *, asks: bool) -> None:
    """Refuse handovers where they do not work.

    Raises:
        UnsupportedError: They do not.
    """
    if device.type != "cpu" and not asks:
        raise UnsupportedError(
            "kv_connector_extra_config: expected handover = true, without which no request is handed over on "
            f"{device.type}, got none"
        )
    if shape.is_fp8:
        raise UnsupportedError("host_dtype: expected auto where requests are handed over, got fp8")
    if shape.dtype == FP8:
        raise UnsupportedError("--kv-cache-dtype: expected auto where requests are handed over, got fp8")
    if 4 * config.budget_blocks > shape.unit_bytes:
        raise UnsupportedError(
            f"budget_blocks: expected at most {shape.unit_bytes // 4}, whose map fits into a unit, "
            f"got {config.budget_blocks}"
        )


class StagedBlocks(Protocol):
    """This worker's part of leased blocks in staging: its layers of them, and its KV heads.

    A tensor is `[n, k, num_kv_heads, block_size, 2 * head_dim]` on the CPU, contiguous: `k` layers of `n` blocks. It
    belongs to the transfer until the future is done.
    """

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Write layers of blocks; the future raises an `OasisError` if not all of it was."""

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Read layers of blocks; the future raises an `OasisError` if `out` is not what their writer wrote."""

    def receipt(self, lease: str) -> bytes:
        """Return what the lease's owner needs so that blocks that were put here can be declared final."""

    def forget(self, lease: str) -> None:
        """Drop what is remembered of a lease; the lease itself is its owner's."""

    def close(self) -> None:
        """End every transfer under way and give up what this way holds."""


class Unattached:
    """The way to staging of an engine that was given none."""

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Fail."""
        return self._fail()

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Fail."""
        return self._fail()

    def receipt(self, lease: str) -> bytes:
        """Return nothing: nothing was put."""
        return b""

    def forget(self, lease: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _fail(self) -> "Future[None]":
        failed: Future[None] = Future()
        failed.set_exception(PeerUnavailableError("staging: expected an engine that was attached to it, got none"))
        return failed


class Ways:
    """Ways to several staging services, each under a name: the leases of one are `name/text`, where `text` is its own.

    Leases of the way without a name are their text alone.
    """

    def __init__(self) -> None:
        """Know no way."""
        self._ways: dict[str, StagedBlocks] = {}

    @property
    def is_attached(self) -> bool:
        """Whether there is any way."""
        return bool(self._ways)

    def attach(self, name: str, staged: StagedBlocks) -> None:
        """Take a way, in the place of one of that name."""
        before, self._ways[name] = self._ways.get(name), staged
        if before is not None:
            before.close()

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Write by the way of the lease."""
        staged, text = self._way(lease)
        return staged.put(text, block_indices, first_layer, data)

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Read by the way of the lease."""
        staged, text = self._way(lease)
        return staged.fetch(text, block_indices, first_layer, out)

    def receipt(self, lease: str) -> bytes:
        """Return the receipt of the way of the lease."""
        staged, text = self._way(lease)
        return staged.receipt(text)

    def forget(self, lease: str) -> None:
        """Have the way of the lease forget it."""
        staged, text = self._way(lease)
        staged.forget(text)

    def close(self) -> None:
        """Close all of them."""
        for staged in self._ways.values():
            staged.close()

    def _way(self, lease: str) -> tuple[StagedBlocks, str]:
        name, mark, text = lease.rpartition("/")
        return self._ways.get(name if mark else "", UNATTACHED), text


UNATTACHED = Unattached()


class Outbox:
    """The prefill side: what is stored for a request is put into its staged blocks, and at its switch the rest.

    Args:
        shape: This process's KV cache.
        sets: The working sets.
        kv_caches: One tensor per layer.
        pool: Where write-through put the blocks.
    """

    def __init__(self, shape: CacheShape, sets: WorkingSets, kv_caches: Sequence[torch.Tensor], pool: HostPool) -> None:
        """Start with nothing under way."""
        self._shape = shape
        self._sets = sets
        self._kv_caches = kv_caches
        self._pool = pool
        self._leases: dict[str, str] = {}
        self._num_there: dict[str, int] = {}
        self._writes: dict[str, list[Future[None]]] = {}
        self._complete: set[str] = set()
        self._streaming: dict[str, tuple[range, torch.Tensor]] = {}
        self._streamed: dict[str, range] = {}
        self._underway: deque[tuple[Future[None], int]] = deque()
        self._underway_bytes = 0
        self.staged_bytes = 0
        """Handed to staging since the start."""
        self.streamed_bytes = 0
        """Of these, while the pass that computed them went on."""

    def open(self, request_id: str, lease: str, num_there: int = 0) -> None:
        """Let what is stored for a request from now on go to staging; what was put under the lease before is void.

        Args:
            request_id: The request.
            lease: Where to.
            num_there: Blocks at its beginning that are there already.
        """
        self._leases[request_id] = lease
        self._num_there[request_id] = num_there
        self._streamed[request_id] = NONE
        self._writes[lease] = []
        self._complete.discard(lease)

    def close(self, request_id: str) -> None:
        """Forget a request that ended here; its writes go on, and `take` tells of them."""
        self._leases.pop(request_id, None)
        self._num_there.pop(request_id, None)
        self._streaming.pop(request_id, None)
        self._streamed.pop(request_id, None)

    def has(self, request_id: str) -> bool:
        """Say whether the request's KV goes to staging."""
        return request_id in self._leases

    def store(
        self, blocks: StagedBlocks, request_id: str, slot: int, table: torch.Tensor, first: int, end: int
    ) -> None:
        """Put blocks that were just written through; of those that were streamed, what the drafter's layers hold.

        Args:
            blocks: The way to staging.
            request_id: The request.
            slot: Its slot.
            table: `int32[max_blocks]`: its block table.
            first: Of the blocks.
            end: Of the blocks.
        """
        indices = range(max(first, self._num_there[request_id]), end)
        streamed, host_ids = self._streamed[request_id], self._sets.host_table[slot].long().cpu()
        for first_layer, chosen in (
            (0, [index for index in indices if index not in streamed]),
            (self._shape.num_target_layers, [index for index in indices if index in streamed]),
        ):
            if first_layer < self._shape.num_layers:
                for few in _pieces(chosen, self._shape.host_block_bytes):
                    units = self._pool.units[host_ids[few], first_layer:]
                    self._put(blocks, request_id, few, first_layer, units)

    def stream(self, wanted: Mapping[str, tuple[int, int]], tables: Mapping[str, torch.Tensor]) -> None:
        """Note what `put_layer` is to put in the pass that begins.

        Args:
            wanted: First block and end of those that become final in the pass, by request.
            tables: Block tables of these requests, each `int32[max_blocks]`.
        """
        self._streaming = {}
        for request_id, (first, end) in wanted.items():
            if self.has(request_id):
                self._streamed[request_id] = range(first, end)
                self._streaming[request_id] = (range(first, end), tables[request_id][first:end].long())

    def put_layer(self, blocks: StagedBlocks, layer: int) -> None:
        """Put a layer of the target that was just computed; the drafter's are final after its own pass alone."""
        if layer >= self._shape.num_target_layers:
            return
        layer_bytes = self._shape.num_kv_heads * self._shape.unit_bytes
        for request_id, (indices, block_ids) in self._streaming.items():
            for few in _pieces(range(len(indices)), layer_bytes):
                units = self._kv_caches[layer][block_ids[few.start : few.stop], None]
                self._put(blocks, request_id, indices[few.start : few.stop], layer, units)
                self.streamed_bytes += units.nbytes

    def export(
        self, blocks: StagedBlocks, request_id: str, slot: int, table: torch.Tensor, layout: HandoverLayout
    ) -> None:
        """Put the active block, the summary pages and the map of a request that just switched.

        Args:
            blocks: The way to staging.
            request_id: The request.
            slot: Its slot.
            table: `int32[max_blocks]`: its block table.
            layout: Its handover.
        """
        sets = self._sets
        pages = sets.page_ids[slot, : layout.num_pages].long()
        sources = torch.cat([table[layout.active : layout.active + 1].long(), pages])
        for layer, kv_cache in enumerate(self._kv_caches):
            held = torch.cat([kv_cache[sources], torch.zeros_like(kv_cache[:1])])
            units = held[-1].view(torch.uint8).view(self._shape.num_kv_heads, -1)
            chosen = sets.resident[layer, slot].contiguous().view(torch.uint8)
            units[:, : chosen.shape[1]] = chosen
            self._put(blocks, request_id, range(layout.active, layout.num_blocks), layer, held[:, None].cpu())
        self._complete.add(self._leases[request_id])

    def take(self, lease: str) -> bool:
        """Say whether all KV of a request that ended is in staging, and forget it if so; False while it is under way.

        Raises:
            PoolExhaustedError: The request was preempted after its prompt, so not all was handed over; it is forgotten.
            OasisError: A write failed, or there is no such request; it is forgotten.
        """
        writes = self._writes.get(lease)
        if writes is None:
            raise InvalidRequestError("lease: expected that of a request that was prefilled here, got another")
        if not all(write.done() for write in writes):
            return False
        is_complete = lease in self._complete
        self.discard(lease)
        if not is_complete:
            raise PoolExhaustedError(
                "kv_cache: expected room for the whole prefill, got a preemption; nothing is staged"
            )
        for write in writes:
            write.result()
        return True

    def take_receipt(self, blocks: StagedBlocks, lease: str) -> bytes | None:
        """Take a handover, and return what the lease's owner needs to declare it final; None while it is under way.

        Raises:
            OasisError: As `take`.
        """
        try:
            if not self.take(lease):
                return None
            receipt = blocks.receipt(lease)
        except OasisError:
            blocks.forget(lease)
            raise
        blocks.forget(lease)
        return receipt

    def counts(self) -> dict[str, int]:
        """Return what was counted since the start."""
        return {"staged_bytes": self.staged_bytes, "streamed_bytes": self.streamed_bytes}

    def stop(self) -> None:
        """End what runs beside the steps."""

    def discard(self, lease: str) -> None:
        """Forget a handover that nobody waits for any more."""
        self._writes.pop(lease, None)
        self._complete.discard(lease)

    def _put(
        self, blocks: StagedBlocks, request_id: str, indices: Sequence[int], first_layer: int, data: torch.Tensor
    ) -> None:
        lease = self._leases[request_id]
        self._note(lease, blocks.put(lease, indices, first_layer, data), data.nbytes)

    def _note(self, lease: str, write: "Future[None]", num_bytes: int) -> None:
        """Take note of a write, and wait for older ones while too much is under way."""
        self._writes[lease].append(write)
        self._underway.append((write, num_bytes))
        self._underway_bytes += num_bytes
        self.staged_bytes += num_bytes
        while self._underway and (self._underway_bytes > MAX_UNDERWAY_BYTES or self._underway[0][0].done()):
            oldest, num_bytes = self._underway.popleft()
            oldest.exception()  # waits; whoever takes the handover hears of it
            self._underway_bytes -= num_bytes


def _pieces(indices: IndicesT, piece_bytes: int) -> Iterator[IndicesT]:
    """Cut what each index stands for so many bytes of into parts of which several may be under way."""
    step = max(1, MAX_UNDERWAY_BYTES // 4 // piece_bytes)
    for start in range(0, len(indices), step):
        yield indices[start : start + step]
