"""The decode side of a handover: how a request's KV comes out of staging, at its beginning and block by block later.

What a request begins with comes beside the steps of others: reads follow one another in the thread that ends them, and
the engine asks from time to time which requests are there.
"""

import logging
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from oasiskv.core.commands import Admission, Prefix
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import CorruptBlockError, OasisError, TransferTimeoutError
from oasiskv.core.handover import HandoverLayout
from oasiskv.engine.fetched import FetchedBlocks
from oasiskv.engine.handover import StagedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.upload import upload
from oasiskv.kernels.rows import Row

logger = logging.getLogger(__name__)

MAX_BUFFER_BYTES = 64 * 2**20
"""Bytes of a prompt's first blocks that come at once."""

Reads = Generator["Future[None]", None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that begins with KV from staging; `slot_ids`, `page_ids` of its slot are in place."""

    request_id: str
    slot: int
    lease: str
    """What its blocks are read under."""
    layout: HandoverLayout
    active_id: int
    """Engine block of its active block; 0 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A request whose first blocks come from staging into its engine blocks, all of them."""

    request_id: str
    slot: int
    prefix: Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request for which nothing comes any more of what it begins with."""

    request_id: str
    slot: int
    is_sparse: bool
    """Whether it begins sparse."""
    is_cancelled: bool
    error: OasisError | None
    """Why not all came; None if all did, or it was cancelled."""


@dataclass(slots=True)
class Underway:
    """What an `Inbox` knows of a request that comes."""

    arrival: Arrival | Loading
    reads: Reads | None = field(default=None, repr=False)
    is_cancelled: bool = False
    is_over: bool = False
    error: Exception | None = None
    step: int = 0
    """Whose orders it was in."""


class Inbox:
    """Owner of what comes.

    A request whose blocks cannot be had is failed: its rows go on, as numbers that mean nothing, until the engine has
    heard of it by `take_failed_blocks`; their tokens must be dropped.

    Args:
        config: The backend's settings.
        shape: This process's KV cache.
        sets: The working sets.
        kv_caches: One tensor per layer.
        pool: This host's memory, where fetched blocks go.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        shape: CacheShape,
        sets: WorkingSets,
        kv_caches: Sequence[torch.Tensor],
        pool: HostPool,
    ) -> None:
        """Start with nothing absent."""
        self._shape = shape
        self._sets = sets
        self._kv_caches = kv_caches
        self._num_sinks = config.sink_blocks
        self._brings_all = config.handover_mode == "full"
        self._leases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._first_block: dict[int, int] = {}
        self._underway: dict[int, Underway] = {}
        self._failed: dict[int, OasisError] = {}
        self._told: set[int] = set()
        self.fetched = self._make_fetched(pool)
        self.num_admitted = 0
        self.admitted_bytes = 0
        """Fetched when requests were admitted."""
        self.missed_bytes = [0] * shape.num_layers
        """Fetched because a block was selected that was absent, by layer."""
        self.missed_blocks = [0] * shape.num_layers
        self.loaded_bytes = 0
        """Fetched so that prompts need not be computed from their beginning."""
        self.full_bytes = 0
        """What the admitted requests would have brought with all their KV."""

    def admit(self, request_id: str, slot: int, admission: Admission) -> int:
        """Take note of a request, all of whose blocks are absent, and return how many there are; it has no room yet."""
        layout = HandoverLayout.of(admission.num_tokens, self._shape.block_size, self._sets.layout)
        self._sets.seat(slot, upload(admission.block_ids, self._sets.resident.device), layout.num_complete)
        active_id = admission.block_ids[layout.active] if layout.has_active else 0
        arrival = Arrival(request_id=request_id, slot=slot, lease=admission.lease, layout=layout, active_id=active_id)
        self.num_admitted += 1
        self.full_bytes += (layout.num_complete + layout.has_active) * self._shape.host_block_bytes
        self._leases[slot], self._names[slot] = arrival.lease, arrival.request_id
        self._first_block[slot] = admission.block_ids[0]
        self.fetched.open(slot, layout.num_complete)
        self._underway[slot] = Underway(arrival)
        return layout.num_complete

    def open_loading(self, loading: Loading) -> None:
        """Take note of a request whose first blocks come; it computes the others here."""
        self._leases[loading.slot] = loading.prefix.lease
        self._underway[loading.slot] = Underway(loading)

    def start(self, blocks: StagedBlocks, slot: int) -> None:
        """Begin to bring what a request begins with."""
        underway = self._underway[slot]
        arrival = underway.arrival
        underway.reads = self._load(blocks, arrival) if isinstance(arrival, Loading) else self._arrive(blocks, arrival)
        self._go_on(underway)

    def is_arriving(self, slot: int) -> bool:
        """Say whether the request in a slot was not returned by `take_arrived` yet."""
        return slot in self._underway

    def note_step(self, step: int) -> None:
        """Note which step the orders are of that come next."""

    def quiesce(self) -> None:
        """Wait until nothing that was begun reads or writes host memory of requests; a fence was set before."""

    def check(self) -> None:
        """Raise what went wrong beside the steps, if something did."""

    def stop(self) -> None:
        """End what runs beside the steps; nothing is fetched any more."""

    def cancel(self, slot: int) -> None:
        """Let a request that is arriving come no further; `take_arrived` says when nothing writes for it any more."""
        underway = self._underway[slot]
        underway.is_cancelled = True
        if isinstance(underway.arrival, Arrival):
            # From now on the scheduler's side may take its host blocks back unasked.
            self.fetched.resize(slot, 0, [])

    def take_arrived(self) -> list[Ended]:
        """Return the requests for which nothing comes any more since the last call."""
        ended = []
        for slot, underway in list(self._underway.items()):
            if underway.is_over:
                del self._underway[slot]
                error = underway.error
                if error is not None and not isinstance(error, OasisError):
                    raise error
                if error is not None and not underway.is_cancelled:
                    logger.warning("a request does not begin, for its KV did not come from staging: %s", error)
                ended.append(
                    Ended(
                        request_id=underway.arrival.request_id,
                        slot=slot,
                        is_sparse=isinstance(underway.arrival, Arrival),
                        is_cancelled=underway.is_cancelled,
                        error=None if underway.is_cancelled else error,
                    )
                )
        return ended

    def close(self, slot: int) -> str | None:
        """Forget the request in a slot, and return the lease that it read under, if any."""
        lease = self._leases.pop(slot, None)
        self._names.pop(slot, None)
        self._first_block.pop(slot, None)
        self._failed.pop(slot, None)
        self._told.discard(slot)
        if lease is not None:
            self.fetched.close(slot)
        return lease

    def bring(self, blocks: StagedBlocks, layer: int, plan: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Fetch what a layer's transfer is about to copy and this host lacks, of all requests at once.

        Args:
            blocks: The way to staging.
            layer: The layer.
            plan: `int32[n, num_kv_heads, cap, 2]`: block and slot of each copy, -1 for none.
            rows: `int32[n, len(Row)]`.

        Returns:
            The plan without what has no place in host memory: that is copied already.
        """
        if not self._leases:
            return plan
        row, head, entry = torch.nonzero(plan[..., 0] >= 0, as_tuple=True)
        owners, indices = rows[row, Row.REQUEST].long(), plan[row, head, entry, 0].long()
        wanted = self._absent_of(layer, owners, indices)
        if not wanted:
            return plan
        came = list(self._fetch(blocks, layer, wanted))
        left = plan.clone()
        engine_ids, kv_cache = self._sets.slot_ids.long(), self._kv_caches[layer]
        for slot, found, out in came:
            self._keep(layer, slot, found, out[:, 0], self._resident(layer, slot))
            mine = (owners == slot) & self.fetched.absent[layer, slot, indices]
            place = torch.searchsorted(found, indices[mine])
            target = engine_ids[slot, plan[row[mine], head[mine], entry[mine], 1].long()]
            kv_cache[target, head[mine]] = out[place, 0, head[mine]]
            left[row[mine], head[mine], entry[mine]] = -1
        return left

    def counts(self) -> dict[str, int]:
        """Return what was counted since the start."""
        return {
            "handovers": self.num_admitted,
            "handover_bytes": self.full_bytes,
            "admitted_bytes": self.admitted_bytes,
            "loaded_bytes": self.loaded_bytes,
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

    def take_failed_blocks(self) -> set[int]:
        """Return the first engine block of each request that failed since the last call."""
        failed = self.take_failed()
        for error in failed.values():
            logger.warning("a request ends, for its KV did not come from staging: %s", error)
        return {self._first_block[slot] for slot in failed}

    def take_wanted(self) -> dict[str, int]:
        """Return the blocks that requests fetched so far in the layer with most, where it is more than before."""
        return {self._names[slot]: wanted for slot, wanted in self.fetched.take_wanted().items()}

    def _go_on(self, underway: Underway) -> None:
        """Run a request's reads until one takes time; the thread that ends it goes on from there."""
        assert underway.reads is not None
        try:
            with torch.inference_mode():
                while not underway.is_cancelled:
                    read = next(underway.reads)
                    if not read.done():
                        read.add_done_callback(lambda _: self._go_on(underway))
                        return
        except StopIteration:
            pass
        except Exception as error:
            underway.error = error
        underway.is_over = True

    def _arrive(self, blocks: StagedBlocks, arrival: Arrival) -> Reads:
        """Bring everything that a request begins with; yields each read before its bytes are looked at."""
        shape, sets, layout = self._shape, self._sets, arrival.layout
        chosen = yield from self._bring_map(blocks, arrival)
        sets.resident[:, arrival.slot] = chosen.to(sets.resident.device)
        targets = sets.page_ids[arrival.slot, : layout.num_pages].tolist()
        indices = list(layout.pages)
        if layout.has_active:
            targets.append(arrival.active_id)
            indices.append(layout.active)
        held = yield from self._read(blocks, arrival.lease, indices, 0, shape.num_layers)
        for layer, kv_cache in enumerate(self._kv_caches):
            kv_cache[targets] = held[:, layer].to(kv_cache.device)
        heads = torch.arange(shape.num_kv_heads)[:, None]
        slot_ids = sets.slot_ids[arrival.slot].long()[None]
        for layer, kv_cache in enumerate(self._kv_caches):
            first_set = distinct(chosen[layer].long())
            wanted = torch.arange(layout.num_complete) if self._brings_all else first_set
            out = yield from self._read(blocks, arrival.lease, wanted.tolist(), layer, 1)
            units = out[torch.searchsorted(wanted, chosen[layer].long()), 0, heads]
            kv_cache[slot_ids, heads.to(kv_cache.device)] = units.to(kv_cache.device)
            self._keep(layer, arrival.slot, wanted, out[:, 0], first_set)

    def _load(self, blocks: StagedBlocks, loading: Loading) -> Reads:
        """Bring the first blocks of a prompt, a few at a time, so that buffers stay small."""
        prefix, shape = loading.prefix, self._shape
        step = max(1, MAX_BUFFER_BYTES // shape.host_block_bytes)
        for first in range(0, prefix.num_blocks, step):
            indices = range(first, min(first + step, prefix.num_blocks))
            out = self._buffer(len(indices), shape.num_layers)
            read = blocks.fetch(prefix.lease, indices, 0, out)
            yield read
            read.result()
            self.loaded_bytes += out.nbytes
            targets = list(prefix.block_ids[indices.start : indices.stop])
            for layer, kv_cache in enumerate(self._kv_caches):
                kv_cache[targets] = out[:, layer].to(kv_cache.device)

    def _bring_map(self, blocks: StagedBlocks, arrival: Arrival) -> Generator["Future[None]", None, torch.Tensor]:
        """Bring the blocks of the first working set, `int32[num_layers, num_kv_heads, budget]`."""
        shape, layout, budget = self._shape, arrival.layout, self._sets.resident.shape[-1]
        held = yield from self._read(blocks, arrival.lease, [layout.map], 0, shape.num_layers)
        units = held[0].view(torch.uint8).view(shape.num_layers, shape.num_kv_heads, -1)
        chosen = units[..., : 4 * budget].contiguous().view(torch.int32)
        for layer in range(shape.num_target_layers, shape.num_layers):
            if not bool(chosen[layer].any()):
                # Not staged, since the engine that prefilled has no such drafter: any blocks will do.
                chosen[layer] = torch.arange(budget)
        ordered, sinks = chosen.sort(-1).values, torch.arange(self._num_sinks)
        is_distinct = bool((ordered[..., 1:] > ordered[..., :-1]).all())
        has_sinks = bool((ordered[..., : self._num_sinks] == sinks).all())
        if not is_distinct or not has_sinks or int(ordered.min()) < 0 or int(ordered.max()) >= layout.num_complete:
            raise CorruptBlockError(
                f"map: expected {budget} distinct blocks below {layout.num_complete} with the first {self._num_sinks} "
                "among them"
            )
        return chosen

    def _read(
        self, blocks: StagedBlocks, lease: str, indices: Sequence[int], first_layer: int, num_layers: int
    ) -> Generator["Future[None]", None, torch.Tensor]:
        out = self._buffer(len(indices), num_layers)
        read = blocks.fetch(lease, indices, first_layer, out)
        yield read
        read.result()
        self.admitted_bytes += out.nbytes
        return out

    def _fetch(
        self,
        blocks: StagedBlocks,
        layer: int,
        wanted: Sequence[tuple[int, torch.Tensor]],
        timeout_s: float | None = None,
    ) -> Iterable[tuple[int, torch.Tensor, torch.Tensor]]:
        """Fetch blocks of a layer, all reads at once; requests that lack some are failed.

        Args:
            blocks: The way to staging.
            layer: The layer.
            wanted: Request slot and block indices, `int64[n]`.
            timeout_s: Longest wait for a read; None for as long as it takes.

        Yields:
            Those of `wanted` that came, with their bytes.
        """
        reads = []
        for slot, indices in wanted:
            out = self._buffer(len(indices), 1)
            lease = self._leases.get(slot, "")
            reads.append((slot, indices, out, blocks.fetch(lease, indices.tolist(), layer, out)))
        self.missed_blocks[layer] += sum(len(indices) for _, indices in wanted)
        for slot, indices, out, read in reads:
            if (error := _outcome(read, timeout_s)) is None:
                self.missed_bytes[layer] += out.nbytes
                yield slot, indices, out
            elif isinstance(error, OasisError):
                self._fail(slot, error)
            else:
                raise error

    def _fail(self, slot: int, error: OasisError) -> None:
        self._failed.setdefault(slot, error)

    def _absent_of(self, layer: int, owners: torch.Tensor, indices: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return which of a layer's blocks are to be fetched, by request slot; those of failed requests are not.

        Args:
            layer: The layer.
            owners: `int64[n]`: request slots.
            indices: `int64[n]`: block indices.
        """
        is_absent = self.fetched.absent[layer, owners, indices]
        absent_owners, absent = owners[is_absent], indices[is_absent]
        slots = [slot for slot in distinct(absent_owners).tolist() if slot not in self._failed]
        return [(slot, distinct(absent[absent_owners == slot])) for slot in slots]

    def _keep(self, layer: int, slot: int, indices: torch.Tensor, blocks: torch.Tensor, resident: torch.Tensor) -> None:
        """Take blocks that came into host memory; see `FetchedBlocks.keep`."""
        self.fetched.keep(layer, slot, indices, blocks, resident)

    def _make_fetched(self, pool: HostPool) -> FetchedBlocks:
        return FetchedBlocks(self._shape.num_layers, self._sets.host_table, pool)

    def _resident(self, layer: int, slot: int) -> torch.Tensor:
        return distinct(self._sets.resident[layer, slot].long())

    def _buffer(self, num_blocks: int, num_layers: int) -> torch.Tensor:
        shape = self._shape
        size = (num_blocks, num_layers, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
        with torch.inference_mode(False):  # else no other thread might write to it
            return torch.empty(size, dtype=shape.dtype)


def _outcome(read: "Future[None]", timeout_s: float | None) -> BaseException | None:
    """Wait for a read, and return why it failed."""
    try:
        return read.exception(timeout_s)
    except TimeoutError:
        return TransferTimeoutError(f"staging: expected missed blocks within {timeout_s:g} s, got none")


def distinct(values: torch.Tensor) -> torch.Tensor:
    """Return the distinct values, ascending."""
    found: torch.Tensor = torch.unique(values)
    return found
