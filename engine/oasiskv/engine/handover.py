"""A request's KV on its way between two engines: out of the one that prefilled, into the one that decodes.

`Outbox` and `Inbox` belong to a `Runtime`; the bytes move through a `StagedBlocks`, which the process that owns the
engine brings. `core.handover` says which staged block holds what.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from oasiskv.core.errors import (
    CorruptBlockError,
    InvalidRequestError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
)
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.kernels.rows import Row

MAX_UNDERWAY_BYTES = 256 * 2**20
"""Copies of staged bytes that wait to be written; the engine waits when there are more, so that they stay bounded."""


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
        self._writes: dict[str, list[Future[None]]] = {}
        self._complete: set[str] = set()
        self._underway: deque[tuple[Future[None], int]] = deque()
        self._underway_bytes = 0
        self.staged_bytes = 0
        """Handed to staging since the start."""

    def open(self, request_id: str, lease: str) -> None:
        """Let what is stored for a request from now on go to staging; what was put under the lease before is void."""
        self._leases[request_id] = lease
        self._writes[lease] = []
        self._complete.discard(lease)

    def close(self, request_id: str) -> None:
        """Forget a request that ended here; its writes go on, and `take` tells of them."""
        self._leases.pop(request_id, None)

    def has(self, request_id: str) -> bool:
        """Say whether the request's KV goes to staging."""
        return request_id in self._leases

    def store(self, blocks: StagedBlocks, request_id: str, slot: int, first: int, end: int) -> None:
        """Put blocks that were just written through."""
        step = max(1, MAX_UNDERWAY_BYTES // 4 // self._shape.host_block_bytes)
        for start in range(first, end, step):
            indices = range(start, min(start + step, end))
            host_ids = self._sets.host_table[slot, indices.start : indices.stop].long().cpu()
            self._put(blocks, request_id, indices, 0, self._pool.units[host_ids])

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
        return {"staged_bytes": self.staged_bytes}

    def discard(self, lease: str) -> None:
        """Forget a handover that nobody waits for any more."""
        self._writes.pop(lease, None)
        self._complete.discard(lease)

    def _put(self, blocks: StagedBlocks, request_id: str, indices: range, first_layer: int, data: torch.Tensor) -> None:
        write = blocks.put(self._leases[request_id], indices, first_layer, data)
        self._writes[self._leases[request_id]].append(write)
        self._underway.append((write, data.nbytes))
        self._underway_bytes += data.nbytes
        self.staged_bytes += data.nbytes
        while self._underway and (self._underway_bytes > MAX_UNDERWAY_BYTES or self._underway[0][0].done()):
            oldest, num_bytes = self._underway.popleft()
            oldest.exception()  # waits; whoever takes the handover hears of it
            self._underway_bytes -= num_bytes


class Inbox:
    """The decode side: which (layer, block) of admitted requests is on this host, and how the others come.

    A request whose blocks cannot be had is failed: its rows go on, as numbers that mean nothing, until the engine has
    heard of it by `take_failed`; their tokens must be dropped.

    Args:
        shape: This process's KV cache.
        sets: The working sets.
        kv_caches: One tensor per layer.
        pool: This host's memory, where fetched blocks go.
    """

    def __init__(self, shape: CacheShape, sets: WorkingSets, kv_caches: Sequence[torch.Tensor], pool: HostPool) -> None:
        """Start with nothing absent."""
        self._shape = shape
        self._sets = sets
        self._kv_caches = kv_caches
        self._pool = pool
        self._leases: dict[int, str] = {}
        self._failed: dict[int, OasisError] = {}
        self._told: set[int] = set()
        self.absent = torch.zeros(shape.num_layers, *sets.host_table.shape, dtype=torch.bool)
        """By layer, request slot and block index: in staging, and not on this host."""
        self.num_admitted = 0
        self.admitted_bytes = 0
        """Fetched when requests were admitted."""
        self.missed_bytes = [0] * shape.num_layers
        """Fetched because a block was selected that was absent, by layer."""
        self.missed_blocks = [0] * shape.num_layers
        self.full_bytes = 0
        """What the admitted requests would have brought with all their KV."""

    def close(self, slot: int) -> str | None:
        """Forget the request in a slot, and return the lease that it read under, if any."""
        lease = self._leases.pop(slot, None)
        self._failed.pop(slot, None)
        self._told.discard(slot)
        self.absent[:, slot] = False
        return lease

    def admit(
        self,
        blocks: StagedBlocks,
        slot: int,
        lease: str,
        table: torch.Tensor,
        layout: HandoverLayout,
        sinks: int,
        *,
        brings_all: bool = False,
    ) -> None:
        """Lay out a request's first working set, its summary pages and its active block, and remember what is absent.

        `slot_ids`, `page_ids` and `host_table` of the slot are in place. If not all comes, the request is failed.

        Args:
            blocks: The way to staging.
            slot: The request's slot.
            lease: What its blocks are read under.
            table: `int32[max_blocks]`: its block table.
            layout: Its handover.
            sinks: Blocks that every working set holds.
            brings_all: Fetch every block, not the first set alone.
        """
        self.num_admitted += 1
        self._leases[slot] = lease
        self.absent[:, slot, : layout.num_complete] = True
        self.full_bytes += (layout.num_complete + layout.has_active) * self._shape.host_block_bytes
        resident = self._sets.resident[:, slot]
        try:
            self._fetch_map(blocks, slot, lease, layout, sinks)
            self._fetch_pages(blocks, slot, lease, table, layout)
            every = torch.arange(layout.num_complete)
            first_set = [
                (layer, slot, every if brings_all else _distinct(resident[layer].long()))
                for layer in range(self._shape.num_layers)
            ]
            self.admitted_bytes += self._fetch_blocks(blocks, first_set)
        except OasisError as error:
            self._failed[slot] = error
            # Any distinct complete blocks: what is attended to from now on is dropped.
            resident[:] = torch.arange(resident.shape[-1], dtype=torch.int32)
        heads = torch.arange(self._shape.num_kv_heads)[:, None]
        for layer, kv_cache in enumerate(self._kv_caches):
            host_ids = self._sets.host_table[slot][resident[layer].long()].long()
            kv_cache[self._sets.slot_ids[slot].long()[None], heads] = self._pool.units[host_ids, layer, heads]

    def bring(self, blocks: StagedBlocks, layer: int, plan: torch.Tensor, rows: torch.Tensor) -> None:
        """Fetch what a layer's transfer is about to copy and this host lacks, of all requests at once.

        Args:
            blocks: The way to staging.
            layer: The layer.
            plan: `int32[n, num_kv_heads, cap, 2]`: block and slot of each copy, -1 for none.
            rows: `int32[n, len(Row)]`.
        """
        if not self._leases:
            return
        row, head, entry = torch.nonzero(plan[..., 0] >= 0, as_tuple=True)
        owners, indices = rows[row, Row.REQUEST].long(), plan[row, head, entry, 0].long()
        is_absent = self.absent[layer, owners, indices]
        owners, indices = owners[is_absent], indices[is_absent]
        slots = [slot for slot in _distinct(owners).tolist() if slot not in self._failed]
        wanted = [(layer, slot, _distinct(indices[owners == slot])) for slot in slots]
        if wanted:
            self.missed_blocks[layer] += sum(len(indices) for _, _, indices in wanted)
            self.missed_bytes[layer] += self._fetch_blocks(blocks, wanted)

    def counts(self) -> dict[str, int]:
        """Return what was counted since the start."""
        return {
            "handovers": self.num_admitted,
            "handover_bytes": self.full_bytes,
            "admitted_bytes": self.admitted_bytes,
            "missed": sum(self.missed_blocks),
            "missed_bytes": sum(self.missed_bytes),
        }

    def is_failed(self, slot: int) -> bool:
        """Say whether the request in a slot could not get its blocks."""
        return slot in self._failed

    def take_failed(self) -> dict[int, OasisError]:
        """Return the slots that failed since the last call, and why."""
        new = {slot: error for slot, error in self._failed.items() if slot not in self._told}
        self._told |= new.keys()
        return new

    def _fetch_map(self, blocks: StagedBlocks, slot: int, lease: str, layout: HandoverLayout, sinks: int) -> None:
        shape, resident = self._shape, self._sets.resident
        held = self._read(blocks, lease, [layout.map], 0, shape.num_layers)
        budget = resident.shape[-1]
        units = held[0].view(torch.uint8).view(shape.num_layers, shape.num_kv_heads, -1)
        chosen = units[..., : 4 * budget].contiguous().view(torch.int32)
        ordered = chosen.sort(-1).values
        is_distinct = bool((ordered[..., 1:] > ordered[..., :-1]).all())
        has_sinks = bool((ordered[..., :sinks] == torch.arange(sinks)).all())
        if not is_distinct or not has_sinks or int(ordered.min()) < 0 or int(ordered.max()) >= layout.num_complete:
            raise CorruptBlockError(
                f"map: expected {budget} distinct blocks below {layout.num_complete} with the first {sinks} among them"
            )
        resident[:, slot] = chosen
        self.admitted_bytes += held.nbytes

    def _fetch_pages(
        self, blocks: StagedBlocks, slot: int, lease: str, table: torch.Tensor, layout: HandoverLayout
    ) -> None:
        targets = self._sets.page_ids[slot, : layout.num_pages].long()
        indices = list(layout.pages)
        if layout.has_active:
            targets = torch.cat([targets, table[layout.active : layout.active + 1].long()])
            indices.append(layout.active)
        held = self._read(blocks, lease, indices, 0, self._shape.num_layers)
        for layer, kv_cache in enumerate(self._kv_caches):
            kv_cache[targets] = held[:, layer]
        self.admitted_bytes += held.nbytes

    def _read(
        self, blocks: StagedBlocks, lease: str, indices: Sequence[int], first_layer: int, num_layers: int
    ) -> torch.Tensor:
        out = self._buffer(len(indices), num_layers)
        blocks.fetch(lease, indices, first_layer, out).result()
        return out

    def _fetch_blocks(self, blocks: StagedBlocks, wanted: Sequence[tuple[int, int, torch.Tensor]]) -> int:
        """Fetch blocks into host memory, all reads at once, and return the bytes; requests that lack some are failed.

        Args:
            blocks: The way to staging.
            wanted: Layer, request slot and block indices, `int64[n]` on the CPU.
        """
        reads = []
        for layer, slot, indices in wanted:
            out = self._buffer(len(indices), 1)
            reads.append((layer, slot, indices, out, blocks.fetch(self._leases[slot], indices.tolist(), layer, out)))
        num_bytes = 0
        for layer, slot, indices, out, read in reads:
            if (error := read.exception()) is None:
                host_ids = self._sets.host_table[slot].long().cpu()[indices]
                self._pool.units[host_ids, layer] = out[:, 0]
                self.absent[layer, slot, indices] = False
                num_bytes += out.nbytes
            elif isinstance(error, OasisError):
                self._failed.setdefault(slot, error)
            else:
                raise error
        return num_bytes

    def _buffer(self, num_blocks: int, num_layers: int) -> torch.Tensor:
        shape = self._shape
        size = (num_blocks, num_layers, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        return torch.empty(size, dtype=shape.dtype)


def _distinct(values: torch.Tensor) -> torch.Tensor:
    """Return the distinct values, ascending."""
    found: torch.Tensor = torch.unique(values)
    return found
