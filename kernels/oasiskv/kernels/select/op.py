"""Door of select: checks its arguments and runs it. Its plan is what `transfer` carries out."""

import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels import check, library
from oasiskv.kernels.rows import Counter
from oasiskv.kernels.select import reference


def select(
    blocks: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    plan: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Compare the predicted blocks with the resident ones, admit missing ones up to the row's cap into victims' slots.

    For each head: resident predicted blocks are stamped with this step. Missing ones are admitted best score first,
    ties to the lower block, at most CAP of them. Victims are residents outside the predicted set, least recently
    selected first, ties to the lower slot. The i-th admitted block takes the i-th victim's slot; `resident` and `stamp`
    name it at once, so a reader must be ordered after the transfer.

    Args:
        blocks: `int32[num_rows, num_kv_heads, budget]` of `predict`, in any order, -1 for none.
        scores: `float32`, same shape: their scores.
        rows: `int32[num_rows, len(Row)]`.
        resident: In and out, `int32[num_requests, num_kv_heads, budget]` of one layer: block index in each slot.
        stamp: In and out, same shape: `stamp_of(step of last selection)`.
        plan: Out, `int32[num_rows, num_kv_heads, max_cap, 2]`: (block index, slot) pairs, -1 for none.
        counters: In and out, `int64[num_kv_heads, len(Counter)]` of this layer.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    device = blocks.device
    num_rows = check.rows(rows, device)
    check.tensor("blocks", blocks, (num_rows, None, None), device=device)
    _, num_kv_heads, budget = blocks.shape
    check.tensor("scores", scores, (num_rows, num_kv_heads, budget), (torch.float32,), device)
    check.tensor("resident", resident, (None, num_kv_heads, budget), device=device)
    check.tensor("stamp", stamp, (resident.shape[0], num_kv_heads, budget), device=device)
    check.tensor("plan", plan, (num_rows, num_kv_heads, None, 2), device=device)
    check.tensor("counters", counters, (num_kv_heads, len(Counter)), (torch.int64,), device)
    if not 0 < plan.shape[2] <= budget:
        raise ConfigError(f"plan: expected room for 1 to {budget} admissions, got {plan.shape[2]}")
    _operation(blocks, scores, rows, resident, stamp, plan, counters)


def _on_cuda(
    blocks: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    plan: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    from oasiskv.kernels.select import kernel

    kernel.select(blocks, scores, rows, resident, stamp, plan, counters)


_operation = library.register(
    "select(Tensor blocks, Tensor scores, Tensor rows, Tensor(a!) resident, Tensor(b!) stamp, "
    "Tensor(c!) plan, Tensor(d!) counters) -> ()",
    cpu=reference.select,
    cuda=_on_cuda,
)
