"""The decode side of a handover where the background runs on a GPU, in graphs that call nobody.

The device itself asks for blocks that this host lacks, by `kernels.misses`, and a thread answers. That thread calls
nothing of CUDA, since the device may be waiting for it. What requests begin with is brought by another thread, on a
stream of its own, into blocks that nothing of an earlier owner reads or writes any more.
"""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch

from oasiskv.core.commands import Admission
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import OasisError, PoolExhaustedError, TransferTimeoutError
from oasiskv.engine.fetched import FetchedBlocks
from oasiskv.engine.handover import UNATTACHED, StagedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.inbox import Inbox, Loading, Underway, distinct
from oasiskv.engine.side import Side
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.upload import upload
from oasiskv.kernels.misses import ABSENT, Mailbox, ask
from oasiskv.kernels.rows import Row

logger = logging.getLogger(__name__)

POLL_S = 2e-5
"""Between two looks for questions while requests are here whose KV is in staging."""

IDLE_POLL_S = 5e-3
"""While there is no such request, but a step that ran with one may not be over."""

FETCH_TIMEOUT_S = 20.0
"""Longest wait for missed blocks; then their request fails."""

NO_UPDATES = torch.zeros(0, 2, dtype=torch.int64)

ASK_TIMEOUT_S = 30.0
"""Longest wait of the device for an answer: reaching it means that the thread that answers died."""


class DeviceInbox(Inbox):
    """Owner of what comes; see `Inbox`.

    Args:
        config: The backend's settings.
        shape: This process's KV cache.
        sets: The working sets, with tables by layer.
        kv_caches: One tensor per layer.
        pool: This host's memory, where fetched blocks go.
        executor: Brings what requests begin with; None for a thread.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        sets: WorkingSets,
        kv_caches: Sequence[torch.Tensor],
        pool: HostPool,
        executor: Executor | None = None,
    ) -> None:
        """Start with nothing absent, and a thread that answers."""
        super().__init__(config, shape, sets, kv_caches, pool)
        self._mailbox = Mailbox.of(sets.plan, sets.resident, kv_caches[0])
        self._ways: StagedBlocks = UNATTACHED
        self._side = Side(sets.resident.device, "oasiskv-arrivals", executor)
        self._lock = self.blocks.lock
        self._step = 0
        # By slot: the first step of its request. Questions of earlier ones are those of a request that left.
        self._since = torch.zeros(len(sets.num_complete), dtype=torch.int64)
        self._has_leases, self._is_stopping = threading.Event(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._answer_all, name="oasiskv-misses", daemon=True)
        self._thread.start()

    def note_step(self, step: int) -> None:
        """Note which step the orders are of that come next."""
        self._step = self.blocks.step = step

    def quiesce(self) -> None:
        """Wait until nothing that was begun reads or writes host memory of requests; a fence was set before."""
        if (mark := self._side.mark()) is not None:
            mark.synchronize()

    def admit(self, request_id: str, slot: int, admission: Admission) -> int:
        """Take note of a request; see `Inbox.admit`."""
        with self._lock:
            self._since[slot] = self._step
        self._has_leases.set()
        return super().admit(request_id, slot, admission)

    def start(self, blocks: StagedBlocks, slot: int) -> None:
        """Begin to bring what a request begins with, once nothing that was begun uses its blocks."""
        underway = self._underway[slot]
        arrival = underway.arrival
        underway.step = self._step
        underway.reads = self._load(blocks, arrival) if isinstance(arrival, Loading) else self._arrive(blocks, arrival)
        self._side.submit(self._side.mark(), partial(self._go_on, underway))

    def close(self, slot: int) -> str | None:
        """Forget the request in a slot; see `Inbox.close`."""
        with self._lock:
            self._since[slot] = self._step
            lease = super().close(slot)
            if not self._leases:
                self._has_leases.clear()
            return lease

    def bring(self, blocks: StagedBlocks, layer: int, plan: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Let the device ask for what a layer's transfer is about to copy and this host lacks; see `Inbox.bring`."""
        self._ways = blocks
        sets, table = self._sets, self.fetched.table(layer)
        resident, kv_cache = sets.resident[layer], self._kv_caches[layer]
        ask(
            self._mailbox, layer, plan, rows, table, resident, sets.slot_ids, kv_cache, timeout_s=ASK_TIMEOUT_S
        )  # fmt: skip
        return plan

    def check(self) -> None:
        """Check that questions are answered.

        Raises:
            TransferTimeoutError: The device waited in vain: what it computed since is not to be used.
            OasisError: The thread that answers failed.
        """
        if self._failure is not None:
            raise OasisError(f"bringing missed blocks failed: {self._failure!r}") from self._failure
        if layer := int(self._mailbox.told[0]):
            raise TransferTimeoutError(f"layer {layer - 1}: missed blocks not there after {ASK_TIMEOUT_S:g} s")

    def stop(self) -> None:
        """End both threads; the device is idle."""
        self._is_stopping = True
        self._has_leases.set()
        self._thread.join()
        self._side.close()

    @property
    def blocks(self) -> "MirroredBlocks":
        """What is here, as `fetched`."""
        assert isinstance(self.fetched, MirroredBlocks)
        return self.fetched

    def _make_fetched(self, pool: HostPool) -> FetchedBlocks:
        assert self._sets.layer_tables is not None
        return MirroredBlocks(self._sets.layer_tables, self._sets.host_table, pool)

    def _go_on(self, underway: Underway) -> None:
        """Run a request's reads until one takes time; then the same thread goes on from there."""
        assert underway.reads is not None
        try:
            while not underway.is_cancelled:
                read = next(underway.reads)
                if not read.done():
                    read.add_done_callback(lambda _: self._side.submit(None, partial(self._go_on, underway)))
                    return
        except StopIteration:
            pass
        except Exception as error:
            underway.error = error
        try:
            self._side.synchronize()
        except Exception as error:
            underway.error = error
        underway.is_over = True

    def _keep(self, layer: int, slot: int, indices: torch.Tensor, blocks: torch.Tensor, resident: torch.Tensor) -> None:
        """Take what an arriving request begins with."""
        self.blocks.write(self.blocks.keep_at(self._underway[slot].step, layer, slot, indices, blocks, resident))

    def _answer_all(self) -> None:
        """Answer questions as they come, until the end."""
        asked, answered = self._mailbox.asked.numpy(), self._mailbox.answered.numpy()
        while not self._is_stopping:
            is_open = (asked != answered).nonzero()[0]
            for layer in is_open.tolist():
                number = int(asked[layer])
                try:
                    with torch.inference_mode():
                        self._answer(layer)
                except BaseException as error:
                    # The device goes on, with blocks that are not there: the engine ends before a token comes of it.
                    logger.exception("missed blocks could not be brought")
                    self._failure = self._failure or error
                    self._mailbox.sizes[layer] = 0
                answered[layer] = number
            if not len(is_open):
                if self._has_leases.is_set():
                    time.sleep(POLL_S)
                else:
                    self._has_leases.wait(IDLE_POLL_S)

    def _answer(self, layer: int) -> None:
        """Fetch what a question names, and write the answer."""
        box = self._mailbox
        num_rows = int(box.num_rows[layer])
        rows, plan = box.rows[layer, :num_rows], box.plan[layer, :num_rows]
        row, head, entry = torch.nonzero(plan[..., 0] >= 0, as_tuple=True)
        owners, indices = rows[row, Row.REQUEST].long(), plan[row, head, entry, 0].long()
        step = int(rows[row[0], Row.STEP])
        with self._lock:
            is_here = self._since[owners] <= step
            wanted = self._absent_of(layer, owners[is_here], indices[is_here])
        came = list(self._fetch(self._ways, layer, wanted, FETCH_TIMEOUT_S))
        bounced, units, updates = list[torch.Tensor](), list[torch.Tensor](), [NO_UPDATES]
        flat = (row * plan.shape[1] + head) * plan.shape[2] + entry
        with self._lock:
            for slot, found, out in came:
                if int(self._since[slot]) > step:
                    continue
                its_row = int(torch.nonzero(rows[:, Row.REQUEST] == slot)[0])
                resident = distinct(box.resident[layer, its_row].long())
                updates.append(self.blocks.keep_at(step, layer, slot, found, out[:, 0], resident))
                mine = (owners == slot) & self.fetched.absent[layer, slot, indices]
                if sum(map(len, bounced)) + int(mine.sum()) > box.bounced.shape[1]:
                    self._fail(slot, PoolExhaustedError("host_pool_bytes: expected room for missed blocks, got none"))
                    continue
                bounced.append(flat[mine])
                units.append(out[torch.searchsorted(found, indices[mine]), 0, head[mine]])
        num_bounced = sum(map(len, bounced))
        if num_bounced:
            box.bounced[layer, :num_bounced] = torch.cat(bounced).int()
            box.units[layer, :num_bounced] = torch.cat(units)
        changed = torch.cat(updates)
        box.updates[layer, : len(changed)] = changed - torch.tensor([self.blocks.first_place(layer), 0])
        box.sizes[layer] = torch.tensor([len(changed), num_bounced], dtype=torch.int32)


class MirroredBlocks(FetchedBlocks):
    """The rooms of one worker, whose tables are on the device; what is absent is known here too.

    Args:
        tables: `int32[num_layers, R, max_blocks]` on the device, `ABSENT` where a block is not here.
        host_table: `int32[R, max_blocks]` on the device, of blocks that were computed here.
        pool: Host memory.

    Attributes:
        step: What room is given now may be written to in this step, by questions of it or of later ones: until then,
            steps that were begun may write to it for a request that left.
        lock: Rooms and who has which slot change under it; nobody waits for a device or for staging while holding it,
            since the device waits for those who need it.
    """

    def __init__(self, tables: torch.Tensor, host_table: torch.Tensor, pool: HostPool) -> None:
        """Start without rooms."""
        super().__init__(len(tables), host_table, pool)
        self._tables = tables
        self.step = 0
        self.lock = threading.RLock()
        self._pending: dict[int, list[tuple[int, list[int]]]] = {}
        self._updates: list[torch.Tensor] = []

    def open(self, slot: int, num_blocks: int) -> None:
        """Take a request, all of whose blocks are absent, with an empty room."""
        super().open(slot, num_blocks)
        self._pending[slot] = []
        assert self._tables is not None
        self._tables[:, slot, :num_blocks] = ABSENT

    def resize(self, slot: int, num_kept: int | None, host_ids: Sequence[int]) -> None:
        """Change a request's room; see `FetchedBlocks.resize`. Where it shrinks, nothing that was begun uses it."""
        with self.lock:
            if num_kept is None:
                self._pending[slot].append((self.step, list(host_ids)))
                return
            self._take_pending(slot, self.step)
            super().resize(slot, num_kept, host_ids)
            updates = self._take_updates()
        self.write(updates)

    def close(self, slot: int) -> None:
        """Forget a request; it may have no room."""
        super().close(slot)
        self._pending.pop(slot, None)

    def keep_at(
        self,
        step: int,
        layer: int,
        slot: int,
        indices: torch.Tensor,
        blocks: torch.Tensor,
        resident: torch.Tensor,
    ) -> torch.Tensor:
        """Take blocks that were fetched, and return what that changes of the tables; see `keep` and `write`.

        Args:
            step: Which they were fetched for.
            layer: The layer.
            slot: The request's slot.
            indices: `int64[n]`: distinct absent blocks.
            blocks: `[n, num_kv_heads, block_size, 2 * head_dim]`.
            resident: `int64[m]`: blocks that some KV head has resident, or is about to have.

        Returns:
            `int64[n, 2]`: place in the tables of all layers, and its new value.
        """
        with self.lock:
            self._take_pending(slot, step)
            self.keep(layer, slot, indices, blocks, resident)
            return self._take_updates()

    def write(self, updates: torch.Tensor) -> None:
        """Change the tables, on the current stream."""
        if len(updates):
            assert self._tables is not None
            place, value = upload(updates.t().tolist(), self._tables.device)
            self._tables.view(-1)[place] = value

    def first_place(self, layer: int) -> int:
        """Return where a layer's table begins."""
        return layer * self._host_table.numel()

    def _take_updates(self) -> torch.Tensor:
        updates, self._updates = self._updates, []
        return torch.cat([NO_UPDATES, *updates])

    def _take_pending(self, slot: int, step: int) -> None:
        room, pending = self._rooms[slot], self._pending[slot]
        while pending and pending[0][0] <= step:
            _, host_ids = pending.pop(0)
            end = room.size + len(host_ids)
            room.host_ids[room.size : end] = torch.tensor(host_ids, dtype=torch.int64)
            room.size = end

    def _note(self, layer: int, slot: int, indices: torch.Tensor, host_ids: torch.Tensor) -> None:
        first = self.first_place(layer) + slot * self._host_table.shape[1]
        self._updates.append(torch.stack([first + indices, host_ids], 1))

    def _note_absent(self, layer: int, slot: int, indices: torch.Tensor) -> None:
        super()._note_absent(layer, slot, indices)
        self._note(layer, slot, indices, torch.full_like(indices, ABSENT))
