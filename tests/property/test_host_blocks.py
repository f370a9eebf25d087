"""Any order of calls on `HostBlockManager` gives what a model that searches lists gives."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oasiskv.core.errors import InvalidRequestError, PoolExhaustedError
from oasiskv.core.host_blocks import HostBlockManager

NUM_BLOCKS = 6
REQUEST_IDS = st.sampled_from(["a", "b", "c", "d"])
COUNTS = st.integers(min_value=0, max_value=6)
# Two chains with a common head and one key out of place: one content is often sealed in two blocks.
PREFIXES = st.sampled_from([[b"h", b"x1", b"x2", b"x3"], [b"h", b"y1", b"y2"], [b"h"], [b"y1", b"h", b"h"]])
BLOCK_KEYS = st.sampled_from([b"h", b"x1", b"y1", b"z"])


class HostBlockModel(RuleBasedStateMachine):
    """Tables, keys and what happened to blocks, each in the plainest form; everything else is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = HostBlockManager(NUM_BLOCKS)
        self.tables: dict[str, list[int]] = {}
        self.keys: dict[int, bytes] = {}
        self.events: list[tuple[str, int]] = []
        """What happened to each block, in order: given to a new owner, found by its key, or released by its last."""

    def referenced(self) -> set[int]:
        return {block_id for table in self.tables.values() for block_id in table}

    def evictable(self) -> list[int]:
        """Sealed blocks without an owner, in the order in which they must be evicted: all that happened, replayed."""
        once: list[int] = []
        again: list[int] = []
        was_found: dict[int, bool] = {}
        for event, block_id in self.events:
            once, again = [i for i in once if i != block_id], [i for i in again if i != block_id]
            if event == "released":
                (again if was_found.get(block_id) else once).append(block_id)
                once += again[: max(0, len(again) - NUM_BLOCKS // 2)]
                again = again[max(0, len(again) - NUM_BLOCKS // 2) :]
            was_found[block_id] = event == "found"
        return once + again

    def release_last(self, block_id: int) -> None:
        if block_id not in self.referenced() and block_id in self.keys:
            self.events.append(("released", block_id))

    def unsealed(self) -> set[int]:
        return set(range(NUM_BLOCKS)) - self.referenced() - self.keys.keys()

    def cut(self, request_id: str, num_blocks: int) -> None:
        table = self.tables.pop(request_id, [])
        for last in range(len(table) - 1, num_blocks - 1, -1):
            self.tables[request_id] = table[:last]
            self.release_last(table[last])
        if table[:num_blocks]:
            self.tables[request_id] = table[:num_blocks]
        else:
            self.tables.pop(request_id, None)

    @rule(request_id=REQUEST_IDS, num_blocks=COUNTS)
    def extend(self, request_id: str, num_blocks: int) -> None:
        num_new = max(0, num_blocks - len(self.tables.get(request_id, [])))
        unsealed, evictable = self.unsealed(), self.evictable()
        fits = num_new <= len(unsealed) + len(evictable)
        assert self.manager.can_extend(request_id, num_blocks) is fits
        if not fits:
            with pytest.raises(PoolExhaustedError):
                self.manager.extend(request_id, num_blocks)
            return
        new = self.manager.extend(request_id, num_blocks)
        num_unsealed = min(num_new, len(unsealed))
        assert len(set(new[:num_unsealed])) == num_unsealed
        assert set(new[:num_unsealed]) <= unsealed
        assert new[num_unsealed:] == evictable[: num_new - num_unsealed]
        for block_id in new[num_unsealed:]:
            del self.keys[block_id]
        self.events += [("given", block_id) for block_id in new]
        if new:
            self.tables.setdefault(request_id, []).extend(new)

    @rule(request_id=REQUEST_IDS, block_index=COUNTS, block_key=BLOCK_KEYS)
    def seal(self, request_id: str, block_index: int, block_key: bytes) -> None:
        table = self.tables.get(request_id, [])
        block_id = table[block_index] if block_index < len(table) else None
        if block_id is None or self.keys.get(block_id, block_key) != block_key:
            with pytest.raises(InvalidRequestError):
                self.manager.seal(request_id, block_index, block_key)
            return
        self.manager.seal(request_id, block_index, block_key)
        if block_key not in self.keys.values():
            self.keys[block_id] = block_key

    @rule(request_id=REQUEST_IDS, block_keys=PREFIXES)
    def prefill(self, request_id: str, block_keys: list[bytes]) -> None:
        """Extend and seal as a prompt does: single calls of `seal` rarely leave much to evict."""
        self.extend(request_id, len(block_keys))
        for block_index, block_key in enumerate(block_keys):
            self.seal(request_id, block_index, block_key)

    @rule(request_id=REQUEST_IDS, block_keys=PREFIXES)
    def adopt(self, request_id: str, block_keys: list[bytes]) -> None:
        if request_id in self.tables:
            with pytest.raises(InvalidRequestError):
                self.manager.adopt(request_id, block_keys)
            return
        expected: list[int] = []
        for block_key in block_keys:
            holders = [block_id for block_id, key in self.keys.items() if key == block_key]
            if not holders:
                break
            expected += holders
        assert self.manager.adopt(request_id, block_keys) == expected
        self.events += [("found", block_id) for block_id in expected]
        if expected:
            self.tables[request_id] = expected

    @rule(request_id=REQUEST_IDS, block_keys=PREFIXES)
    def finish_and_adopt(self, request_id: str, block_keys: list[bytes]) -> None:
        self.release(request_id)
        self.adopt(request_id, block_keys)

    @rule(request_id=REQUEST_IDS, block_keys=PREFIXES)
    def come_and_go(self, request_id: str, block_keys: list[bytes]) -> None:
        """As a prompt that is found again, or as one that is new."""
        self.finish_and_adopt(request_id, block_keys)
        if request_id not in self.tables:
            self.prefill(request_id, block_keys)
        self.release(request_id)

    @rule(request_id=REQUEST_IDS, num_blocks=COUNTS)
    def truncate(self, request_id: str, num_blocks: int) -> None:
        self.manager.truncate(request_id, num_blocks)
        self.cut(request_id, num_blocks)

    @rule(request_id=REQUEST_IDS)
    def release(self, request_id: str) -> None:
        self.manager.release(request_id)
        self.cut(request_id, 0)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.manager.check_invariants()
        for request_id in ("a", "b", "c", "d"):
            assert list(self.manager.table(request_id)) == self.tables.get(request_id, [])
        assert self.manager.num_cached == len(self.evictable())
        assert self.manager.num_free == len(self.unsealed()) + len(self.evictable())

    def teardown(self) -> None:
        """After all requests end, every block can be given out again."""
        for request_id in list(self.tables):
            self.release(request_id)
        self.agrees_with_the_model()
        assert self.manager.num_free == NUM_BLOCKS


TestHostBlocks = HostBlockModel.TestCase
TestHostBlocks.settings = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=40)
