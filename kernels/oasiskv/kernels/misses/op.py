"""Door of misses: where device and host meet, and the launch that asks."""

from dataclasses import dataclass
from enum import IntEnum

import torch

from oasiskv.kernels import check, library
from oasiskv.kernels.misses import reference
from oasiskv.kernels.rows import Row

ABSENT = -1
"""In a table of host blocks: the block is not on this host."""

MAX_BOUNCE_BYTES = 64 * 2**20
"""Of the units of all layers that are on their way and for which the host has no place."""


class Answer(IntEnum):
    """Columns of the sizes of an answer."""

    UPDATES = 0
    """Entries of the table that change."""
    BOUNCED = 1
    """Planned copies whose units lie in the answer itself, since the host has no place for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """Host memory in which a device asks for blocks, layer by layer, and the host answers; pinned where there is a GPU.

    A layer's question is there when `asked` is ahead of `answered`; whoever answers sets `answered` to it, last.

    Attributes:
        asked, answered: `int32[num_layers]`: questions and answers so far.
        num_rows: `int32[num_layers]`: rows of the question.
        rows: `int32[num_layers, max_rows, len(Row)]`.
        plan: `int32[num_layers, max_rows, num_kv_heads, max_cap, 2]`, as `select` wrote it.
        resident: `int32[num_layers, max_rows, num_kv_heads, budget]`: what the rows have resident or are about to,
            only of rows that lack something.
        sizes: `int32[num_layers, len(Answer)]`.
        updates: `int32[num_layers, n, 2]`: place in the layer's table of host blocks, and its new value.
        bounced: `int32[num_layers, m]`: entries of the plan, counted through, whose units are in `units`.
        units: `[num_layers, m, block_size, 2 * head_dim]`.
        counts: `int32[num_layers]` on the device: questions so far.
        failed: `int32[1]` on the device: whether a wait was given up.
        told: `int32[1]`: 1 + the layer that was waited for in vain; 0 for none.
    """

    asked: torch.Tensor
    answered: torch.Tensor
    num_rows: torch.Tensor
    rows: torch.Tensor
    plan: torch.Tensor
    resident: torch.Tensor
    sizes: torch.Tensor
    updates: torch.Tensor
    bounced: torch.Tensor
    units: torch.Tensor
    counts: torch.Tensor
    failed: torch.Tensor
    told: torch.Tensor

    @classmethod
    def of(cls, plan: torch.Tensor, resident: torch.Tensor, kv_cache: torch.Tensor) -> "Mailbox":
        """Allocate one.

        Args:
            plan: `int32[num_layers, max_rows, num_kv_heads, max_cap, 2]`, the plans of all layers.
            resident: `int32[num_layers, max_requests, num_kv_heads, budget]`.
            kv_cache: Of one layer.
        """
        num_layers, max_rows, num_kv_heads, max_cap, _ = plan.shape
        num_entries, pin = max_rows * num_kv_heads * max_cap, plan.is_cuda
        unit_bytes = kv_cache[0, 0].nbytes
        num_bounced = min(num_entries, max(num_kv_heads, MAX_BOUNCE_BYTES // num_layers // unit_bytes))

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=pin)

        return cls(
            asked=ints(num_layers),
            answered=ints(num_layers),
            num_rows=ints(num_layers),
            rows=ints(num_layers, max_rows, len(Row)),
            plan=ints(*plan.shape),
            resident=ints(num_layers, max_rows, *resident.shape[2:]),
            sizes=ints(num_layers, len(Answer)),
            updates=ints(num_layers, 2 * num_entries, 2),
            bounced=ints(num_layers, num_bounced),
            units=torch.zeros(num_layers, num_bounced, *kv_cache.shape[2:], dtype=kv_cache.dtype, pin_memory=pin),
            counts=torch.zeros(num_layers, dtype=torch.int32, device=plan.device),
            failed=torch.zeros(1, dtype=torch.int32, device=plan.device),
            told=ints(1),
        )


def ask(
    mailbox: Mailbox,
    layer: int,
    plan: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    timeout_s: float,
) -> None:
    """Have the blocks of a plan that this host lacks brought, and wait until they are there.

    Where nothing is lacking the host does not hear of it. Otherwise it answers with changes of the table, and with the
    units themselves of copies for which it has no place; these are carried out here. What is still absent then, because
    it cannot be had, is struck off the plan, as are those copies. A wait that lasts too long is given up, and so is
    every later one.

    Args:
        mailbox: Where device and host meet.
        layer: The layer.
        plan: In and out, `int32[num_rows, num_kv_heads, max_cap, 2]` of `select`.
        rows: `int32[num_rows, len(Row)]`.
        table: In and out, `int32[num_requests, max_blocks]` of the layer: block index to host block, or `ABSENT`.
        resident: `int32[num_requests, num_kv_heads, budget]` of the layer.
        slot_ids: `int32[num_requests, budget]`: slot to engine block.
        kv_cache: The layer's KV cache, `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`; written.
        timeout_s: Longest wait.

    Raises:
        ConfigError: A tensor differs from the above; nothing is written.
    """
    num_kv_heads, _, _ = check.cache("kv_cache", kv_cache)
    device = kv_cache.device
    num_rows = check.rows(rows, device)
    check.tensor("plan", plan, (num_rows, num_kv_heads, mailbox.plan.shape[3], 2), device=device)
    check.tensor("table", table, (None, None), device=device)
    check.tensor("resident", resident, (table.shape[0], *mailbox.resident.shape[2:]), device=device)
    check.tensor("slot_ids", slot_ids, (table.shape[0], None), device=device)
    box = mailbox
    parts = [box.rows[layer], box.plan[layer], box.resident[layer], box.updates[layer], box.bounced[layer]]
    _ask(
        plan, rows, table, resident, slot_ids, kv_cache, box.asked, box.answered, box.num_rows, box.sizes, *parts,
        box.units[layer], box.counts, box.failed, box.told, layer, timeout_s,
    )  # fmt: skip


def _ask_on_cuda(*arguments: object) -> None:
    from oasiskv.kernels.misses import kernel

    kernel.ask(*arguments)  # type: ignore[arg-type]


_ask = library.register(
    "ask(Tensor(a!) plan, Tensor rows, Tensor(b!) table, Tensor resident, Tensor slot_ids, Tensor(c!) kv_cache, "
    "Tensor(d!) asked, Tensor answered, Tensor(e!) asked_num_rows, Tensor sizes, Tensor(f!) asked_rows, "
    "Tensor(g!) asked_plan, Tensor(h!) asked_resident, Tensor updates, Tensor bounced, Tensor units, "
    "Tensor(i!) counts, Tensor(j!) failed, Tensor(k!) told, int layer, float timeout_s) -> ()",
    cpu=reference.ask,
    cuda=_ask_on_cuda,
)
