"""Where a decode host keeps what it fetched from staging: layer by layer, for layers fetch different blocks.

A request's room is a number of host blocks. Each layer uses its own parts of them as places for the blocks that it
fetched, whichever these are. When a layer has no place left, a block gives its place up that can be fetched again.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oasiskv.engine.host_pool import HostPool


@dataclass(slots=True)
class _Room:
    num_blocks: int
    """Blocks in staging."""
    host_ids: torch.Tensor
    """`int64[num_blocks]`: host block of each place, `size` of which there are."""
    held: torch.Tensor
    """`int64[num_layers, num_blocks]`: block in each place, -1 for none."""
    used_at: torch.Tensor
    """`int64[num_layers, num_blocks]`: when the block in each place was last resident; the longer ago, the less."""
    was_fetched: torch.Tensor
    """`bool[num_layers, num_blocks]`: by block."""
    num_fetched: list[int]
    """Blocks that were fetched, by layer."""
    size: int = 0
    told: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class FetchedBlocks:
    """The rooms of one worker. A layer of a request is used by one thread at a time.

    Args:
        num_layers: Of the model and the drafter.
        host_table: `int32[R, max_blocks]`: block index to host block, of blocks that were computed here.
        pool: Host memory.
    """

    def __init__(self, num_layers: int, host_table: torch.Tensor, pool: HostPool) -> None:
        """Start without rooms; memory for tables is taken with the first one."""
        self._num_layers = num_layers
        self._pool = pool
        self._host_table = host_table
        self._tables: torch.Tensor | None = None
        self._rooms: dict[int, _Room] = {}
        self._clock = 0
        self.absent = torch.zeros(num_layers, *host_table.shape, dtype=torch.bool)
        """By layer, request slot and block index: in staging, and not on this host."""

    def table(self, layer: int) -> torch.Tensor:
        """Return a layer's `int32[R, max_blocks]`: block index to host block, of what is on this host."""
        return self._host_table if self._tables is None else self._tables[layer]

    def note_own(self, places: torch.Tensor, host_ids: torch.Tensor) -> None:
        """Note host blocks of blocks that are computed here.

        Args:
            places: `int32[n]`: places in the flattened host table.
            host_ids: `int32[n]`.
        """
        if self._tables is not None:
            self._tables.view(self._num_layers, -1)[:, places] = host_ids

    def open(self, slot: int, num_blocks: int) -> None:
        """Take a request, all of whose blocks are absent, with an empty room."""
        if self._tables is None:
            self._tables = self._host_table.expand(self._num_layers, -1, -1).contiguous()
        size = (self._num_layers, num_blocks)
        self._rooms[slot] = _Room(
            num_blocks=num_blocks,
            host_ids=torch.zeros(num_blocks, dtype=torch.int64),
            held=torch.full(size, -1),
            used_at=torch.zeros(size, dtype=torch.int64),
            was_fetched=torch.zeros(size, dtype=torch.bool),
            num_fetched=[0] * self._num_layers,
        )
        self.absent[:, slot, :num_blocks] = True

    def resize(self, slot: int, num_kept: int | None, host_ids: Sequence[int]) -> None:
        """Change a request's room. Where it shrinks, each layer keeps what was resident last, in the places that stay.

        Host blocks that are not kept must hold what they held until this returns.

        Args:
            slot: The request's slot.
            num_kept: Host blocks that stay; None for all.
            host_ids: Those after them.
        """
        room = self._rooms[slot]
        num_kept = room.size if num_kept is None else num_kept
        with room.lock:
            if num_kept < room.size:
                for layer in range(self._num_layers):
                    self._shrink(room, slot, layer, num_kept)
            room.size = num_kept + len(host_ids)
            room.host_ids[num_kept : room.size] = torch.tensor(host_ids, dtype=torch.int64)

    def close(self, slot: int) -> None:
        """Forget a request; it may have no room."""
        self._rooms.pop(slot, None)
        self.absent[:, slot] = False

    def keep(self, layer: int, slot: int, indices: torch.Tensor, blocks: torch.Tensor, resident: torch.Tensor) -> None:
        """Take blocks that were fetched into host memory, as many of them as there are places for.

        Others give their places up for them: those that no KV head has resident, for the longest time first.

        Args:
            layer: The layer.
            slot: The request's slot.
            indices: `int64[n]`: distinct absent blocks.
            blocks: `[n, num_kv_heads, block_size, 2 * head_dim]`.
            resident: `int64[m]`: blocks that some KV head has resident, or is about to have.
        """
        room = self._rooms[slot]
        # Whoever takes a host block back waits until nothing is written to it.
        with room.lock:
            room.num_fetched[layer] += int((~room.was_fetched[layer, indices]).sum())
            room.was_fetched[layer, indices] = True
            held, used_at = room.held[layer, : room.size], room.used_at[layer, : room.size]
            self._clock += 1
            is_resident = torch.isin(held, resident)
            used_at[is_resident] = self._clock
            free = torch.nonzero(held < 0).flatten()
            if (num_missing := len(indices) - len(free)) > 0:
                taken = torch.nonzero((held >= 0) & ~is_resident).flatten()
                victims = taken[used_at[taken].argsort(stable=True)][:num_missing]
                self._note_absent(layer, slot, held[victims])
                held[victims] = -1
                free = torch.cat([free, victims])
            places = free[: len(indices)]
            kept = indices[: len(places)]
            held[places], used_at[places] = kept, self._clock
            self._pool.units[room.host_ids[places], layer] = blocks[: len(places)]
            self._note(layer, slot, kept, room.host_ids[places])
            self.absent[layer, slot, kept] = False

    def _shrink(self, room: _Room, slot: int, layer: int, num_kept: int) -> None:
        """Leave a layer as many places as given, with what was used last."""
        held, used_at = room.held[layer, : room.size], room.used_at[layer, : room.size]
        filled = torch.nonzero(held >= 0).flatten()
        filled = filled[used_at[filled].argsort(descending=True, stable=True)]
        self._note_absent(layer, slot, held[filled[num_kept:]])
        moved = filled[:num_kept][filled[:num_kept] >= num_kept]
        is_free = torch.ones(num_kept, dtype=torch.bool)
        is_free[filled[:num_kept][filled[:num_kept] < num_kept]] = False
        places = torch.nonzero(is_free).flatten()[: len(moved)]
        units = self._pool.units
        units[room.host_ids[places], layer] = units[room.host_ids[moved], layer]
        self._note(layer, slot, held[moved], room.host_ids[places])
        is_free[places] = False
        held[places], used_at[places] = held[moved], used_at[moved]
        held[:num_kept][is_free] = -1
        held[num_kept:] = -1

    def _note(self, layer: int, slot: int, indices: torch.Tensor, host_ids: torch.Tensor) -> None:
        """Note where a layer's parts of blocks lie, `int64[n]` both."""
        self.table(layer)[slot, indices] = host_ids.int()

    def _note_absent(self, layer: int, slot: int, indices: torch.Tensor) -> None:
        """Note that a layer's parts of blocks are not here any more, `int64[n]`."""
        self.absent[layer, slot, indices] = True

    def take_wanted(self) -> dict[int, int]:
        """Return the most blocks that a layer fetched so far, of the slots where it is more than at the last call."""
        changed = {}
        for slot, room in self._rooms.items():
            if (wanted := max(room.num_fetched)) > room.told:
                changed[slot] = room.told = wanted
        return changed
