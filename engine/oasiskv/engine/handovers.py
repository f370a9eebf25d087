"""What a `Runtime` does about handovers: it owns the ways to staging and what goes and comes there."""

from concurrent.futures import Executor

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import OasisError
from oasiskv.engine.device_inbox import DeviceInbox
from oasiskv.engine.device_outbox import DeviceOutbox
from oasiskv.engine.handover import Outbox, StagedBlocks, Ways, check_can_hand_over
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.inbox import Inbox
from oasiskv.engine.probe import Probes
from oasiskv.engine.state import CacheShape, WorkingSets


class Handovers:
    """The part of a `Runtime` that others ask about handovers.

    Attributes:
        asks: Whether the device asks for blocks that are in staging; a GPU that does not hands nothing over.
        outbox: What goes to staging.
        inbox: What comes from there.
    """

    config: LookaheadConfig
    shape: CacheShape
    sets: WorkingSets
    _kv_caches: list[torch.Tensor]
    _pool: HostPool
    _device: torch.device
    _sparse: set[str]

    def _init_handovers(self, executor: Executor | None) -> None:
        """Start with nothing on its way.

        Args:
            executor: Runs what handovers of a device do beside the steps; None for threads.
        """
        sets, shape, caches, pool = self.sets, self.shape, self._kv_caches, self._pool
        self.asks = sets.layer_tables is not None
        self.outbox, self.inbox = Outbox(shape, sets, caches, pool), Inbox(self.config, shape, sets, caches, pool)
        if self.asks:
            self.outbox = DeviceOutbox(shape, sets, caches, pool, executor)
            self.inbox = DeviceInbox(self.config, shape, sets, caches, pool, executor)
        self._staged = Ways()
        # Requests whose KV came, until they run.
        self._arrived: set[str] = set()
        self._probes = Probes(shape)

    def fence(self) -> None:
        """Wait for the whole background."""
        raise NotImplementedError

    def _free(self, slot: int) -> None:
        raise NotImplementedError

    def attach(self, staged: StagedBlocks, way: str = "") -> None:
        """Take a way to staging, in the place of one of that name.

        Raises:
            UnsupportedError: this backend cannot hand requests over.
        """
        check_can_hand_over(self.config, self.shape, self._device, asks=self.asks)
        self.fence()
        self._staged.attach(way, staged)

    def take_handover(self, lease: str) -> bytes | None:
        """Return the receipt of a request's KV once all of it is in staging; see `Outbox.take_receipt`."""
        return self.outbox.take_receipt(self._staged, lease)

    def probe_staging(self, lease: str, *, writes: bool) -> tuple[bytes, bytes] | None:
        """Write or read a block of random bytes; see `Probes.poll`."""
        return self._probes.poll(self._staged, lease, writes=writes)

    def take_arrived(self) -> tuple[set[str], dict[str, OasisError]]:
        """Return the requests to which nothing comes from staging any more, and why, if their KV did not come.

        The first may run from the next step on, or have ended before their KV was there.
        """
        over, failed = set(), {}
        for ended in self.inbox.take_arrived():
            over.add(ended.request_id)
            if ended.is_cancelled:
                self._free(ended.slot)
            elif ended.error is None and ended.is_sparse:
                self._sparse.add(ended.request_id)
                self._arrived.add(ended.request_id)
            elif ended.error is not None:
                failed[ended.request_id] = ended.error
        return over, failed

    def host_table(self, layer: int) -> torch.Tensor:
        """Return a layer's `int32[R, max_blocks]`: block index to host block."""
        return self.inbox.fetched.table(layer)

    def handover_counts(self) -> dict[str, int]:
        """Return what was counted of handovers since the start."""
        return self.outbox.counts() | self.inbox.counts()
