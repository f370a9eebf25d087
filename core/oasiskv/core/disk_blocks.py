"""Which block is in which slot of a file on SSD; a service moves the bytes, `tiers` decides when."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from oasiskv.core.eviction import EvictionOrder


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A slot and the generation of what is in it."""

    slot: int
    generation: int
    """Grows with every write to any slot, so that of two copies of a key the newer is known."""


class DiskBlocks:
    """Give out the slots [0, num_slots), found by block key; `EvictionOrder` says which key makes room.

    A slot is free, being written, held or retired. It is retired when the device failed on it, so that nothing is tried
    there again before the next start. Nobody pins a slot to read it: who has read compares `find` with what it was
    before, and the bytes with their checksums. Every operation costs O(1).
    """

    def __init__(self, num_slots: int, on_change: Callable[[bytes, bool], None] | None = None) -> None:
        """Start with all slots free.

        Args:
            num_slots: Capacity, in host blocks; 0 for no disk.
            on_change: Called with a block key and whether it is held from now on.
        """
        self._num_slots = num_slots
        self._on_change = on_change or (lambda block_key, is_held: None)
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[bytes, DiskBlock] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder(num_slots // 2)
        self._writing: dict[bytes, DiskBlock] = {}
        self._retired: set[int] = set()
        self._generation = 0
        self.num_evicted = 0
        """Blocks that went because their slot was needed, since the start."""

    @property
    def num_slots(self) -> int:
        """Capacity, in host blocks, the retired slots among them."""
        return self._num_slots

    @property
    def num_held(self) -> int:
        """Blocks that can be found."""
        return len(self._held)

    @property
    def num_retired(self) -> int:
        """Slots that the device failed on."""
        return len(self._retired)

    @property
    def has_room(self) -> bool:
        """Whether `prepare_write` finds a slot for a new key."""
        return bool(self._free or self._held)

    def restore(self, found: Iterable[tuple[int, bytes, int]]) -> None:
        """Take over what an earlier process wrote; only at the start.

        Args:
            found: Slot, block key and generation of every root record; of one key the newest counts.
        """
        newest: dict[bytes, DiskBlock] = {}
        for slot, block_key, generation in sorted(found, key=lambda one: one[2]):
            newest.pop(block_key, None)  # so that the order is that of the generations
            newest[block_key] = DiskBlock(slot, generation)
            self._generation = generation
        for block_key, block in newest.items():
            self._hold(block_key, block)
        used = {block.slot for block in newest.values()}
        self._free = [slot for slot in self._free if slot not in used]

    def find(self, block_key: bytes) -> DiskBlock | None:
        """Return where a block is; None if it is not held. Its slot may be written anew at any later call."""
        return self._held.get(block_key)

    def is_writing(self, block_key: bytes) -> bool:
        """Whether a write of the block is under way."""
        return block_key in self._writing

    def touch(self, block_key: bytes) -> None:
        """Note that a block was used again, so that it goes late; an unknown one is passed over."""
        if block_key in self._held:
            self._order.add(block_key, is_again=True)

    def prepare_write(self, block_key: bytes) -> DiskBlock | None:
        """Return where to write a block, evicting one if no slot is free; `complete_write` must follow.

        None where the block is held or being written already, or every slot is being written or retired.
        """
        if block_key in self._held or block_key in self._writing or not self.has_room:
            return None
        if self._free:
            slot = self._free.pop()
        else:
            evicted_key = self._order.pop()
            slot = self._held.pop(evicted_key).slot
            self.num_evicted += 1
            self._on_change(evicted_key, False)
        self._generation += 1
        block = DiskBlock(slot, self._generation)
        self._writing[block_key] = block
        return block

    def complete_write(self, block_key: bytes, *, is_written: bool, is_bad: bool = False) -> None:
        """End a write: the block can be found from now on, or the slot is free again.

        Args:
            block_key: As given to `prepare_write`.
            is_written: Whether data and root record are in the slot.
            is_bad: Whether the device failed on the slot.
        """
        block = self._writing.pop(block_key)
        if is_written:
            self._hold(block_key, block)
        else:
            self._give_back(block.slot, is_bad)

    def drop(self, block_key: bytes, *, is_bad: bool = False) -> None:
        """Let a block that cannot be read back not be found any more; an unknown one is passed over."""
        block = self._held.pop(block_key, None)
        if block is not None:
            self._order.discard(block_key)
            self._give_back(block.slot, is_bad)
            self._on_change(block_key, False)

    def check_invariants(self) -> None:
        """Assert what always holds; costs O(slots)."""
        blocks = [*self._held.values(), *self._writing.values()]
        slots = [*self._free, *self._retired, *(block.slot for block in blocks)]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is not in exactly one state"
        assert self._held.keys().isdisjoint(self._writing), "a block is held and being written"
        self._order.check_invariants()
        assert set(self._order) == self._held.keys(), "a held block is never evicted, or the reverse"
        generations = [block.generation for block in blocks]
        assert len(set(generations)) == len(generations), "two blocks share a generation"
        assert max(generations, default=0) <= self._generation

    def _hold(self, block_key: bytes, block: DiskBlock) -> None:
        self._held[block_key] = block
        self._order.add(block_key, is_again=False)
        self._on_change(block_key, True)

    def _give_back(self, slot: int, is_bad: bool) -> None:
        if is_bad:
            self._retired.add(slot)
        else:
            self._free.append(slot)
