"""Which ways a request's KV goes and comes: in the calls of a step, or beside a device that calls nobody."""

from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.engine.device_inbox import DeviceInbox
from oasiskv.engine.device_outbox import DeviceOutbox
from oasiskv.engine.handover import Outbox
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.inbox import Inbox
from oasiskv.engine.state import CacheShape, WorkingSets


def make_boxes(
    config: LookaheadConfig,
    shape: CacheShape,
    sets: WorkingSets,
    kv_caches: Sequence[torch.Tensor],
    pool: HostPool,
    executor: Executor | None,
) -> tuple[Outbox, Inbox]:
    """Make both boxes of a `Runtime`: those of a device where the working sets have tables by layer."""
    if sets.layer_tables is None:
        return Outbox(shape, sets, kv_caches, pool), Inbox(config, shape, sets, kv_caches, pool)
    return (
        DeviceOutbox(shape, sets, kv_caches, pool, executor),
        DeviceInbox(config, shape, sets, kv_caches, pool, executor),
    )
