"""Sets free blocks to 0 in the background, so that what a lease held is gone soon after the lease."""

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial

from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.threads import in_thread

BATCH_BYTES = 16 * 2**20
"""Wiped at a time; who is given one of these blocks meanwhile waits for all of them."""


class Wiper:
    """Wipes what becomes free, from `start` to `stop`; before and after that, who takes a block has to wipe it.

    A block may be given out again before its turn, and even while it is wiped: so `taken` comes before anybody writes.
    """

    def __init__(self, memory: StagingMemory) -> None:
        """Start with nothing to do."""
        self._memory = memory
        self._batch = max(1, BATCH_BYTES // memory.parts[0].nbytes)
        self._waiting: dict[int, None] = {}
        self._under_way: set[int] = set()
        self._is_due = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Free blocks that may still hold old bytes."""
        return len(self._waiting) + len(self._under_way)

    def start(self) -> None:
        """Begin to wipe."""
        self._task = asyncio.create_task(self._wipe_forever())

    async def stop(self) -> None:
        """End when the thread has."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def freed(self, block_id: int) -> None:
        """Note that nobody has a block any more."""
        self._waiting[block_id] = None
        self._is_due.set()

    async def taken(self, block_ids: Sequence[int]) -> None:
        """Return when blocks that were given out are not written to from here any more."""
        for block_id in block_ids:
            self._waiting.pop(block_id, None)
        while not self._under_way.isdisjoint(block_ids):
            await self._has_ended.wait()

    async def _wipe_forever(self) -> None:
        while True:
            self._is_due.clear()
            batch = list(itertools.islice(self._waiting, self._batch))
            if not batch:
                await self._is_due.wait()
                continue
            for block_id in batch:
                del self._waiting[block_id]
            self._under_way.update(batch)
            self._has_ended.clear()
            try:
                await in_thread(partial(self._memory.clear, batch))
            finally:
                self._under_way.clear()
                self._has_ended.set()
