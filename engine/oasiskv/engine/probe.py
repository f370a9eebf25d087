"""Blocks of random bytes on the way between a worker and staging: what shows that KV would come through."""

import os
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import torch

from oasiskv.engine.handover import StagedBlocks
from oasiskv.engine.state import CacheShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    data: torch.Tensor
    transfer: "Future[None]"


class Probes:
    """The probes of one worker, each by its lease.

    Args:
        shape: This worker's KV cache.
    """

    def __init__(self, shape: CacheShape) -> None:
        self._shape = (1, shape.num_layers, shape.num_kv_heads, shape.unit_bytes)
        self._probes: dict[str, _Probe] = {}

    def poll(self, blocks: StagedBlocks, lease: str, *, writes: bool) -> tuple[bytes, bytes] | None:
        """Write or read block 0 of a lease; the first call begins, later ones ask.

        Args:
            blocks: The way to staging.
            lease: Of one block at least.
            writes: Whether random bytes go there; else what is there is read.

        Returns:
            The digest of this worker's bytes and, of a write, the receipt for its owner; None while it is under way.

        Raises:
            OasisError: The transfer failed, and so will every later call for the lease.
        """
        probe = self._probes.get(lease)
        if probe is None:
            # A probe is kept until the next one, for the rank that is done first is asked again.
            for one in [one for one, made in self._probes.items() if made.transfer.done()]:
                del self._probes[one]
                blocks.forget(one)
            data = torch.zeros(self._shape, dtype=torch.uint8)
            if writes:
                data = torch.frombuffer(bytearray(os.urandom(data.numel())), dtype=torch.uint8).reshape(self._shape)
            begin = blocks.put if writes else blocks.fetch
            self._probes[lease] = _Probe(data=data, transfer=begin(lease, [0], 0, data))
            return None
        if not probe.transfer.done():
            return None
        probe.transfer.result()
        receipt = blocks.receipt(lease) if writes else b""
        return blake2b(probe.data.numpy().tobytes(), digest_size=32).digest(), receipt
