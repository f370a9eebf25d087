"""What vLLM itself copies units with, for `oasiskv bench kernels` to measure ours against."""

from collections.abc import Callable, Iterator

import torch

from oasiskv.kernels.bench import Step
from oasiskv.kernels.copies import Copy, Skipped, planned, stored, units_of


def vllm_copies(step: Step) -> Iterator[Copy | Skipped]:
    """Yield vLLM's ways to copy a step's full plan, and what it lacks here, with the reason."""
    names = ("hisparse_gather_compact", "swap_blocks_batch", "swap_blocks_batch, Triton", "swap_blocks_batch to host")
    try:
        import vllm._custom_ops  # noqa: F401  (loads the operations)
        from vllm.v1.kv_offload.cpu import swap_blocks_triton
    except ImportError as error:
        for name in names:
            yield Skipped(name=name, reason=f"vLLM does not import: {error}")
        return
    ops = getattr(torch.ops, "_C_cache_ops", None)
    for name in names:
        if not hasattr(ops, op := name.partition(",")[0].partition(" ")[0]):
            yield Skipped(name=name, reason=f"this build of vLLM has no operation {op}")
    if hasattr(ops, "hisparse_gather_compact"):
        yield gather_compact(step, torch.ops._C_cache_ops.hisparse_gather_compact)
    if not hasattr(ops, "swap_blocks_batch"):
        return
    batch = torch.ops._C_cache_ops.swap_blocks_batch
    yield swap_in(step, names[1], lambda *addresses: batch(*addresses, True))

    def by_triton(*addresses: torch.Tensor) -> None:
        swap_blocks_triton.swap_blocks_batch(*addresses, bytes_per_chunk=8192)

    yield swap_in(step, names[2], by_triton)
    yield swap_out(step, names[3], lambda *addresses: batch(*addresses, False))


def gather_compact(step: Step, gather: Callable[..., None]) -> Copy:
    """Return the copy of HiSparse's compact plans, whose rows are our units.

    Args:
        step: The batch.
        gather: Takes host rows, cache blocks of rows, the rows to read and to write, and how many of each.
    """
    model = step.model
    plans = [tuple(part.int() for part in planned(step, layer)) for layer in range(model.num_layers)]
    counts = torch.full((step.num_rows,), plans[0][0].shape[1], dtype=torch.int32, device=step.memory.device)
    hosts = units_of(step.units, step)

    def action(layer: int) -> None:
        cache = step.memory.kv_caches[layer]
        gather(hosts, cache.view(len(cache), model.num_kv_heads, -1), *plans[layer], counts)

    return Copy(
        name="hisparse_gather_compact",
        action=action,
        num_layers=model.num_layers,
        num_bytes=step.transfer_bytes,
        limit="host_to_device_gbps",
        like="transfer",
    )


def swap_in(step: Step, name: str, swap: Callable[..., None]) -> Copy:
    """Return the copy of a plan by addresses, which the host must know: no graph holds it.

    Args:
        step: The batch.
        name: Of the operation.
        swap: Takes `int64[n]` in host memory thrice: addresses to read, to write, and bytes of each.
    """
    plans = []
    for layer in range(step.model.num_layers):
        source, target = (part.flatten().cpu() for part in planned(step, layer))
        sources = step.units.data_ptr() + source * step.unit_bytes
        targets = step.memory.kv_caches[layer].data_ptr() + target * step.unit_bytes
        plans.append((sources, targets, torch.full_like(source, step.unit_bytes)))
    return Copy(
        name=name,
        action=lambda layer: swap(*plans[layer]),
        num_layers=step.model.num_layers,
        num_bytes=step.transfer_bytes,
        limit="host_to_device_gbps",
        is_captured=False,
        like="transfer",
    )


def swap_out(step: Step, name: str, swap: Callable[..., None]) -> Copy:
    """Return the copy to the host of the whole blocks that `store` writes; see `swap_in`."""
    block_ids, host_ids = (part.cpu() for part in stored(step))
    block_bytes, layers = step.unit_bytes * step.model.num_kv_heads, step.units.shape[1]
    sizes = torch.full_like(block_ids, block_bytes)

    def action(layer: int) -> None:
        sources = step.memory.kv_caches[layer].data_ptr() + block_ids * block_bytes
        targets = step.units.data_ptr() + (host_ids * layers + layer % layers) * block_bytes
        swap(sources, targets, sizes)

    return Copy(
        name=name,
        action=action,
        num_layers=step.model.num_layers,
        num_bytes=step.transfer_bytes,
        limit="device_to_host_gbps",
        is_captured=False,
        like="store",
    )
