"""Blocks of random bytes on the way between a worker and staging: what shows that KV would come through."""

import os
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b

import torch

from oasiskv.engine.handover import StagedBlocks
from oasiskv.engine.state import CacheShape

DIGEST_BYTES = 32


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
        self._num_target_layers = shape.num_target_layers
        self._first_head = shape.tp_rank * shape.num_kv_heads
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
        # A drafter's layers may be those of one side alone.
        return digest_of(probe.data[:, : self._num_target_layers], self._first_head), receipt


def digest_of(data: torch.Tensor, first_head: int) -> bytes:
    """Return a digest that is the same however KV heads are split among ranks, once those of all ranks are joined.

    Args:
        data: `uint8[1, num_layers, num_kv_heads, unit_bytes]`, of the target model's layers.
        first_head: Which of the model's KV heads the first one is.
    """
    units = (
        (layer.to_bytes(4, "little") + (first_head + head).to_bytes(4, "little") + unit.numpy().tobytes())
        for layer, heads in enumerate(data[0])
        for head, unit in enumerate(heads)
    )
    return join_digests(blake2b(unit, digest_size=DIGEST_BYTES).digest() for unit in units)


def join_digests(digests: Iterable[bytes]) -> bytes:
    """Return the one digest of what several tell of their parts, in any order."""
    joined = 0
    for digest in digests:
        joined ^= int.from_bytes(digest, "little")
    return joined.to_bytes(DIGEST_BYTES, "little")
