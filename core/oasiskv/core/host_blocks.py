"""Which request owns which host block and which block holds which content; workers move the bytes by these ids.

A host block is all layers' and heads' units of one logical block. One id serves all layers and ranks, so a single owner
on the scheduler side gives the ids out, and a worker never allocates.
"""

from collections.abc import Callable, Iterable, Sequence

from oasiskv.core.errors import ConfigError, InvalidRequestError, PoolExhaustedError
from oasiskv.core.eviction import EvictionOrder


class HostBlockManager:
    """Give out the host block ids [0, num_blocks), counted by reference and found by content.

    A block is free, referenced by the tables of one or more requests, or cached: referenced by none, but sealed under a
    block key and findable until its room is needed. Every operation costs O(1) per block it touches.

    A released block may be given out again at once. So whoever releases makes sure that a copy still under way to or
    from the block is ordered before those of its next owner.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[bytes], None] | None = None,
        on_cached: Callable[[bytes], None] | None = None,
        on_free: Callable[[int], None] | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            num_blocks: Capacity of the host pool of every rank, in host blocks.
            on_evict: Called with the block key of a block that is evicted, before its id is given out.
            on_cached: Called with the block key of a block that no request references any more.
            on_free: Called with the id of a block that nobody references or finds any more; not of one that is evicted,
                which has its next owner at once.
        """
        if num_blocks <= 0:
            raise ConfigError(f"num_blocks: expected a positive number, got {num_blocks}")
        self._num_blocks = num_blocks
        # A stack, so that memory touched last is written again first; 0 is given out first.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Half of the room at most is for what was found again, so that new prompts always have the other half.
        self._cached: EvictionOrder[int] = EvictionOrder(num_blocks // 2)
        self._found_again: set[int] = set()
        """Referenced blocks that were found by their key since they were last cached or given out."""
        self._reference_counts = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._on_evict = on_evict
        self._on_cached = on_cached
        self._on_free = on_free

    @property
    def num_blocks(self) -> int:
        """Capacity, in host blocks."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given out: the free ones and the cached ones, which are evicted for it."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request references, kept because their content can be found."""
        return len(self._cached)

    def table(self, request_id: str) -> Sequence[int]:
        """Return the block ids of a request by block index; empty for an unknown request.

        The result is no copy: it is valid until the next call that changes this request.
        """
        return self._tables.get(request_id, ())

    def find(self, block_key: bytes) -> int | None:
        """Return the block that is sealed under the key; None if there is none. It may be evicted by the next call."""
        return self._block_of.get(block_key)

    def key_of(self, block_id: int) -> bytes | None:
        """Return the key under which a block is sealed; None if it is not."""
        return self._key_of.get(block_id)

    def can_extend(self, request_id: str, num_blocks: int) -> bool:
        """Whether `extend` with the same arguments would succeed now."""
        return num_blocks - len(self.table(request_id)) <= self.num_free

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Make the request own at least `num_blocks` blocks and return the new ids, in order of their block index.

        Free blocks are taken first; then cached ones are evicted: those that were never found before those that were,
        and among each the least recently released first (`EvictionOrder`).

        Raises:
            PoolExhaustedError: Too few blocks are free or evictable; none is taken.
        """
        num_new = num_blocks - len(self.table(request_id))
        if num_new <= 0:
            return []
        if num_new > self.num_free:
            raise PoolExhaustedError(
                f"num_blocks: expected at most {self.num_free} more host blocks for {request_id!r}, got {num_new}"
            )
        new = [self._take() for _ in range(num_new)]
        self._tables.setdefault(request_id, []).extend(new)
        return new

    def seal(self, request_id: str, block_index: int, block_key: bytes) -> None:
        """Record that the content of a block of the request is final and is what `block_key` names.

        Sealing again under the same key changes nothing. If another block already holds the key, that older one stays
        the one to be found, and this block stays unsealed.

        Raises:
            InvalidRequestError: The request has no such block, or it is sealed under another key; nothing changes.
        """
        table = self.table(request_id)
        if not 0 <= block_index < len(table):
            raise InvalidRequestError(
                f"block_index: expected one of the {len(table)} blocks of {request_id!r}, got {block_index}"
            )
        block_id = table[block_index]
        sealed_key = self._key_of.get(block_id)
        if sealed_key is not None:
            if sealed_key != block_key:
                raise InvalidRequestError(
                    f"block_key: expected {sealed_key.hex()}, under which host block {block_id} is sealed, "
                    f"got {block_key.hex()}"
                )
        elif block_key not in self._block_of:
            self._key_of[block_id] = block_key
            self._block_of[block_key] = block_id

    def seal_or_share(self, request_id: str, block_index: int, block_key: bytes) -> int:
        """Seal as `seal` does; if another block already holds the key, the request references that one from now on.

        Its own block is then given back, so the request must not write to it any more.

        Returns:
            The block that holds the key, which is now the one of this index.

        Raises:
            InvalidRequestError: As `seal`; nothing changes.
        """
        self.seal(request_id, block_index, block_key)
        table = self._tables[request_id]
        own, holder = table[block_index], self._block_of[block_key]
        if holder != own:
            self._reference(holder)
            table[block_index] = holder
            self._drop_reference(own)
        return holder

    def forget(self, block_id: int) -> None:
        """Let a sealed block not be found any more; who references it keeps it. An unsealed block is left as it is."""
        block_key = self._key_of.pop(block_id, None)
        if block_key is None:
            return
        del self._block_of[block_key]
        if block_id in self._cached:
            self._cached.discard(block_id)
            self._set_free(block_id)

    def adopt(self, request_id: str, block_keys: Iterable[bytes]) -> list[int]:
        """Start a request with the longest prefix of blocks whose keys are found, and return their ids.

        The blocks are shared: the request references them and must never write to them. Cached ones among them no
        longer count in `num_free`.

        Args:
            request_id: A request that owns no block yet.
            block_keys: Keys by block index; read only up to the first that is not found.

        Raises:
            InvalidRequestError: The request owns blocks already; nothing changes.
        """
        if request_id in self._tables:
            raise InvalidRequestError(
                f"request_id: expected a request without host blocks, got {request_id!r} "
                f"with {len(self._tables[request_id])}"
            )
        found: list[int] = []
        for block_key in block_keys:
            block_id = self._block_of.get(block_key)
            if block_id is None:
                break
            found.append(block_id)
        for block_id in found:
            self._reference(block_id)
        if found:
            self._tables[request_id] = found
        return list(found)

    def continue_prefix(
        self, request_id: str, block_keys: Iterable[bytes], num_blocks: int
    ) -> tuple[list[int], list[int]]:
        """Start a request with a prefix of found blocks and new ones behind it; return the ids of both.

        Raises:
            InvalidRequestError: As `adopt`.
            PoolExhaustedError: As `extend`; nothing is taken.
        """
        held = self.adopt(request_id, block_keys)
        try:
            return held, self.extend(request_id, num_blocks)
        except PoolExhaustedError:
            self.release(request_id)
            raise

    def rename(self, request_id: str, new_request_id: str) -> None:
        """Let a request go on under another id, which must own no block.

        Raises:
            InvalidRequestError: There is a request of the new id, or none of the old; nothing changes.
        """
        if new_request_id in self._tables or request_id not in self._tables:
            raise InvalidRequestError(f"request_id: expected one with host blocks and a new one, got {request_id!r}")
        self._tables[new_request_id] = self._tables.pop(request_id)

    def fork(self, request_id: str, new_request_id: str) -> None:
        """Let a new request reference all blocks of another, as they are now.

        Raises:
            InvalidRequestError: There is a request of the new id, or none of the other; nothing changes.
        """
        if new_request_id in self._tables or request_id not in self._tables:
            raise InvalidRequestError(f"request_id: expected one with host blocks and a new one, got {request_id!r}")
        self._tables[new_request_id] = list(self._tables[request_id])
        for block_id in self._tables[request_id]:
            self._reference_counts[block_id] += 1

    def sealed_keys(self) -> list[bytes]:
        """Return the keys of all sealed blocks: those that requests reference, then the others, evicted last first."""
        referenced = [key for block_id, key in self._key_of.items() if block_id not in self._cached]
        return referenced + [self._key_of[block_id] for block_id in reversed(list(self._cached))]

    def owners(self) -> set[str]:
        """Return the requests that own blocks."""
        return set(self._tables)

    def truncate(self, request_id: str, num_blocks: int) -> None:
        """Give back the blocks of the request from index `num_blocks` on, as `release` does; it keeps those before."""
        if num_blocks < 0:
            raise InvalidRequestError(f"num_blocks: expected a number of blocks to keep, got {num_blocks}")
        table = self._tables.get(request_id, [])
        # From the tail, so that a prefix outlives what continues it: without its head no tail can be adopted.
        while len(table) > num_blocks:
            self._drop_reference(table.pop())
        if not table:
            self._tables.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Give back all blocks of the request; an unknown request changes nothing.

        A sealed block that nobody else references stays findable until its room is needed, the tail of a request going
        before its head. An unsealed one is free.
        """
        self.truncate(request_id, 0)

    def check_invariants(self) -> None:
        """Assert what always holds; costs O(num_blocks)."""
        counts = [0] * self._num_blocks
        for table in self._tables.values():
            assert table, "a request without blocks has a table"
            for block_id in table:
                counts[block_id] += 1
        assert counts == self._reference_counts, "reference counts differ from the tables"
        referenced = [block_id for block_id, count in enumerate(counts) if count]
        assert sorted([*self._free, *self._cached, *referenced]) == list(range(self._num_blocks)), (
            "a block is not in exactly one of free, cached, referenced"
        )
        assert self._block_of == {block_key: block_id for block_id, block_key in self._key_of.items()}
        assert len(self._block_of) == len(self._key_of), "two blocks hold one key"
        self._cached.check_invariants()
        assert set(self._cached) <= self._key_of.keys(), "a cached block cannot be found"
        assert self._found_again <= set(referenced), "a block that nobody references is marked as in use"
        assert self._key_of.keys().isdisjoint(self._free), "a free block can be found"

    def _take(self) -> int:
        """Return a block for a new owner, evicting if none is free; the caller made sure that there is one."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = self._cached.pop()
            block_key = self._key_of.pop(block_id)
            del self._block_of[block_key]
            if self._on_evict is not None:
                self._on_evict(block_key)
        self._reference_counts[block_id] = 1
        return block_id

    def _reference(self, block_id: int) -> None:
        """Count one more owner of a block that was found by its key."""
        self._reference_counts[block_id] += 1
        self._cached.discard(block_id)
        self._found_again.add(block_id)

    def _drop_reference(self, block_id: int) -> None:
        self._reference_counts[block_id] -= 1
        if self._reference_counts[block_id]:
            return
        is_again = block_id in self._found_again
        self._found_again.discard(block_id)
        if block_id in self._key_of:
            self._cached.add(block_id, is_again=is_again)
            if self._on_cached is not None:
                self._on_cached(self._key_of[block_id])
        else:
            self._set_free(block_id)

    def _set_free(self, block_id: int) -> None:
        self._free.append(block_id)
        if self._on_free is not None:
            self._on_free(block_id)
