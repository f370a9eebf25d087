"""Copies of a step's plan by other means than `transfer` and `store`, for `bench` to measure them against."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from oasiskv.kernels.timing import Action

if TYPE_CHECKING:
    from oasiskv.kernels.bench import Step

Limit = Literal["hbm_copy_gbps", "host_to_device_gbps", "device_to_host_gbps"]
"""The ceiling that an operation cannot pass."""

FEW_LAYERS = 2
"""Layers whose copies are measured where each is a node of a graph: there are thousands in a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One way to copy."""

    name: str
    action: Action
    num_layers: int
    num_bytes: int
    """Of all those layers."""
    limit: Limit
    is_captured: bool = True
    """Whether a graph can hold it."""
    like: Literal["transfer", "store"] | None = None
    """What it must leave the same bytes as; None if it copies others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A way to copy that this machine lacks."""

    name: str
    reason: str


def planned(step: "Step", layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a full plan of a layer copies.

    Args:
        step: The batch.
        layer: The layer.

    Returns:
        `(source, target)`, `int64[num_rows, num_kv_heads * max_cap]`: units of the host pool and of the layer's cache,
        both counted through all their blocks, layers and heads.
    """
    block, slot = step.full_plans[layer].long().unbind(-1)
    heads = step.model.num_kv_heads
    row = torch.arange(step.num_rows, device=block.device)[:, None, None]
    head = torch.arange(heads, device=block.device)[None, :, None]
    layers = step.units.shape[1]
    source = (step.host_table[row, block].long() * layers + layer % layers) * heads + head
    target = step.slot_ids[row, slot].long() * heads + head
    return source.flatten(1), target.flatten(1)


def stored(step: "Step") -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(block_ids, host_ids)`, `int64[n]`, of the blocks that `Step.store` writes in each layer."""
    count = step.num_rows * step.model.max_cap
    return step.slot_ids.flatten()[:count].long(), step.host_table.flatten()[:count].long()


def units_of(tensor: torch.Tensor, step: "Step") -> torch.Tensor:
    """Return a pool or a cache as rows of one unit each."""
    return tensor.view(-1, step.model.block_size * 2 * step.model.head_dim)


def copy_engines(step: "Step") -> Iterator[Copy]:
    """Yield copies by the device's copy engines: unit by unit, and whole blocks, which lie contiguous, both ways."""
    model, layers = step.model, min(FEW_LAYERS, step.model.num_layers)
    units = [tuple(part.flatten().tolist() for part in planned(step, layer)) for layer in range(layers)]
    block_ids, host_ids = (part.tolist() for part in stored(step))

    def each_unit(layer: int) -> None:
        hosts, cache = units_of(step.units, step), units_of(step.memory.kv_caches[layer], step)
        for source, target in zip(*units[layer], strict=True):
            cache[target].copy_(hosts[source], non_blocking=True)

    def each_block(layer: int) -> None:
        cache = step.memory.kv_caches[layer]
        for host, block in zip(host_ids, block_ids, strict=True):
            cache[block].copy_(step.units[host, layer % step.units.shape[1]], non_blocking=True)

    def each_block_back(layer: int) -> None:
        cache = step.memory.kv_caches[layer]
        for host, block in zip(host_ids, block_ids, strict=True):
            step.units[host, layer % step.units.shape[1]].copy_(cache[block], non_blocking=True)

    ways: tuple[tuple[str, Action, Limit, Literal["transfer", "store"] | None], ...] = (
        ("units", each_unit, "host_to_device_gbps", "transfer"),
        ("blocks", each_block, "host_to_device_gbps", None),
        ("blocks to host", each_block_back, "device_to_host_gbps", "store"),
    )
    num_bytes = step.transfer_bytes * layers // model.num_layers
    for name, action, limit, like in ways:
        yield Copy(
            name=f"copy engine, {name}", action=action, num_layers=layers, num_bytes=num_bytes, limit=limit, like=like
        )


def copies_the_same(step: "Step", copy: Copy) -> bool:
    """Say whether a copy leaves in layer 0 what our own kernel leaves there; true if it copies something else."""
    if copy.like is None:
        return True
    cache, pool = step.memory.kv_caches[0], step.units
    host_ids = stored(step)[1].to(pool.device)
    # Where two blocks go to the same place, either may be the last.
    ids, counts = torch.unique(host_ids, return_counts=True)
    once = ids[counts == 1]
    kept = cache.clone() if copy.like == "transfer" else pool[ids, 0]

    def outcome(action: Action) -> torch.Tensor:
        if copy.like == "transfer":
            cache.zero_()
        else:
            pool[ids, 0] = 0
        action(0)
        if cache.is_cuda:
            torch.cuda.synchronize()
        # As bytes: what is no number at all is equal to itself, too.
        return (cache if copy.like == "transfer" else pool[once, 0]).view(torch.uint8).clone()

    wanted = outcome(step.transfer if copy.like == "transfer" else step.store)
    is_same = torch.equal(outcome(copy.action), wanted)
    if copy.like == "transfer":
        cache.copy_(kept)
    else:
        pool[ids, 0] = kept
    return is_same and bool(wanted.any())
