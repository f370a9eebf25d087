"""Moves blocks between the pool and the file on SSD, by the rules of `core.tiers`."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from oasiskv.core.errors import OasisError
from oasiskv.core.tiers import BlockStatus, Load, Spill, Tiers
from oasiskv.services.staging.disk_file import DiskConfig, DiskFile
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.wiper import Wiper
from oasiskv.services.threads import in_thread
from oasiskv.services.tracing import TRACER

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
SCAN_SLOTS = 4096
DISK_ERRORS = frozenset({BlockStatus.IO_ERROR, BlockStatus.DISK_FULL, BlockStatus.CORRUPT})


class DiskTier:
    """The traffic between memory and disk of one service; begun by `start`, ended by `stop`.

    Blocks that no lease needs are written in the background. Reading is a part of taking a lease, which waits until all
    its blocks are in memory: as many at a time as there are readers, in order of block index.
    """

    def __init__(self, config: DiskConfig, file: DiskFile, tiers: Tiers, memory: StagingMemory, wiper: Wiper) -> None:
        """Take over the file, which `stop` closes."""
        self._config = config
        self._file = file
        self._tiers = tiers
        self._memory = memory
        self._wiper = wiper
        self._threads = ThreadPoolExecutor(config.num_readers + config.num_writers, thread_name_prefix="disk")
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._due = asyncio.Event()
        self._writers: list[asyncio.Task[None]] = []
        # One lease after another: two that miss the same blocks would read them twice, and take twice the memory.
        self._reading = asyncio.Lock()
        self.counts: Counter[tuple[str, BlockStatus]] = Counter()
        """Blocks by `read` or `write` and what became of them, since the start."""
        self.seconds = {"read": 0.0, "write": 0.0}
        """Seconds by `read` or `write`, added up over those that ran at a time, since the start."""

    @property
    def reason(self) -> str:
        """How bytes reach the device, and why."""
        return self._file.reason

    async def start(self) -> None:
        """Find what an earlier process left in the file, and begin to spill."""
        slots = range(self._file.num_slots)
        ranges = [slots[start : start + SCAN_SLOTS] for start in range(0, len(slots), SCAN_SLOTS)]
        scans = [in_thread(partial(self._file.scan, one), self._threads) for one in ranges]
        self._tiers.disk.restore(entry for found in await asyncio.gather(*scans) for entry in found)
        held, path = self._tiers.disk, self._file.path
        logger.info("%s holds %d blocks of %d; %s", path, held.num_held, self._file.num_slots, self.reason)
        self._writers = [asyncio.create_task(self._write_forever()) for _ in range(self._config.num_writers)]

    async def stop(self) -> None:
        """End when the writes under way have; close the file."""
        tasks = [*self._writers, *self._ahead.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()
        self._file.close()

    def spill_is_due(self) -> None:
        """Let the writers look for blocks to spill."""
        self._due.set()

    @asynccontextmanager
    async def loaded(self, peer_id: str, block_keys: Sequence[bytes], min_blocks: int) -> AsyncIterator[Load | None]:
        """Bring the longest prefix of keys that is held into memory, and keep it there within the context.

        Yields None, with nothing read, if the leases before this one took too long.

        Raises:
            LeaseExpiredError: The peer is unknown or forgotten.
            PoolExhaustedError: A quota is reached; nothing was taken.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.max_wait_s) as waiting:
                await self._reading.acquire()
        if waiting.expired():
            yield None
            return
        try:
            with self._tiers.load(peer_id, block_keys, min_blocks) as load:
                await self._read_all(load)
                yield load
        finally:
            self._reading.release()

    def read_ahead(self, peer_id: str, block_keys: Sequence[bytes]) -> None:
        """Bring the longest prefix of keys that is held into memory after a while, for a lease that may come.

        Nothing is held by it, and a peer's next one ends the one before.
        """
        before = self._ahead.pop(peer_id, None)
        if before is not None:
            before.cancel()
        if self._tiers.missing(block_keys[:1])[1]:
            task = asyncio.create_task(self._read_ahead(peer_id, block_keys))
            self._ahead[peer_id] = task
            task.add_done_callback(lambda done: self._ahead.get(peer_id) is done and self._ahead.pop(peer_id))

    async def _read_ahead(self, peer_id: str, block_keys: Sequence[bytes]) -> None:
        # Half, so that it does not push out what it has read itself, nor all that others may ask for.
        num_blocks = min(len(block_keys), self._tiers.leases.num_free // 2)
        step = self._config.num_readers  # a few at a time: leases, which somebody waits for, come in between
        with contextlib.suppress(OasisError):
            for start in range(0, num_blocks, step):
                async with self.loaded(peer_id, block_keys[start : min(start + step, num_blocks)], 0) as load:
                    if load is None or any(status is not BlockStatus.INTACT for status in load.statuses.values()):
                        return

    async def _read_all(self, load: Load) -> None:
        block_ids = [block_id for _, block_id in load.reads.values()]
        await self._wiper.taken(block_ids)
        self._memory.take(block_ids)
        waiting = iter(list(load.reads))
        attributes: dict[str, str | int] = {"oasiskv.tier": "disk", "oasiskv.blocks": len(load.reads)}
        with TRACER.start_as_current_span("kv.load", attributes=attributes):
            # A task group ends with the last of its tasks even if cancelled: threads write into these blocks.
            async with asyncio.TaskGroup() as readers:
                for _ in range(min(len(load.reads), self._config.num_readers)):
                    readers.create_task(self._read(load, waiting))

    async def _read(self, load: Load, waiting: Iterator[bytes]) -> None:
        for block_key in waiting:
            place, block_id = load.reads[block_key]
            parts = self._memory.parts[block_id]
            read = partial(self._file.read, place.slot, block_key, place.generation, parts)
            status, sums = await self._timed("read", read)
            if status is BlockStatus.INTACT:
                self._memory.checksums[block_id] = sums  # before anyone can find the block
            self._count("read", self._tiers.complete_load(load, block_key, status), place.slot)

    async def _write_forever(self) -> None:
        while True:
            spill = self._tiers.prepare_spill()
            if spill is None:
                self._due.clear()
                await self._due.wait()
                continue
            status = BlockStatus.STALE
            try:
                status = await self._timed("write", self._write(spill))
            except Exception:
                logger.exception("a block was not spilled by a bug of this service")
            finally:
                self._tiers.complete_spill(spill, status)
                self._count("write", status, spill.to.slot)
                if self._tiers.num_unwritten:
                    self._due.set()  # a slot may be free for another writer

    def _write(self, spill: Spill) -> Callable[[], BlockStatus]:
        generations = self._memory.generations

        def is_current() -> bool:
            return int(generations[spill.block_id]) == spill.generation

        parts = self._memory.parts[spill.block_id]
        sums = self._memory.checksums[spill.block_id].copy()
        return partial(self._file.write, spill.to.slot, spill.block_key, spill.to.generation, parts, sums, is_current)

    async def _timed(self, what: str, work: Callable[[], Result]) -> Result:
        def timed() -> tuple[float, Result]:
            start_s = time.perf_counter()
            result = work()
            return time.perf_counter() - start_s, result

        seconds, result = await in_thread(timed, self._threads)
        self.seconds[what] += seconds
        return result

    def _count(self, what: str, status: BlockStatus, slot: int) -> None:
        self.counts[what, status] += 1
        if status in DISK_ERRORS:
            logger.error("slot %d: %s of a block: %s; dropped", slot, what, status.value)
