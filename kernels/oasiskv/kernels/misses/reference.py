"""What asking for blocks means, in plain torch."""

import time

import torch

from oasiskv.kernels.rows import Row

POLL_S = 2e-5


def ask(
    plan: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    slot_ids: torch.Tensor,
    kv_cache: torch.Tensor,
    asked: torch.Tensor,
    answered: torch.Tensor,
    asked_num_rows: torch.Tensor,
    sizes: torch.Tensor,
    asked_rows: torch.Tensor,
    asked_plan: torch.Tensor,
    asked_resident: torch.Tensor,
    updates: torch.Tensor,
    bounced: torch.Tensor,
    units: torch.Tensor,
    counts: torch.Tensor,
    failed: torch.Tensor,
    told: torch.Tensor,
    layer: int,
    timeout_s: float,
) -> None:
    """Ask, wait, and carry the answer out; see `op.ask`."""
    num_rows = len(rows)
    is_planned = (plan[..., 0] >= 0) & (rows[:, Row.REQUEST, None, None] >= 0)
    row, head, entry = torch.nonzero(is_planned, as_tuple=True)
    request, block = rows[row, Row.REQUEST].long(), plan[row, head, entry, 0].long()
    is_absent = table[request, block] < 0
    if not bool(is_absent.any()):
        return
    lacking = torch.unique(row[is_absent])
    asked_plan[:num_rows], asked_rows[:num_rows] = plan, rows
    asked_resident[lacking.cpu()] = resident[rows[lacking, Row.REQUEST].long()].cpu()
    asked_num_rows[layer] = num_rows
    counts[layer] += 1
    number = int(counts[layer])
    asked[layer] = number
    started = time.monotonic()
    while int(answered[layer]) < number and not bool(failed[0]):
        time.sleep(POLL_S)
        if time.monotonic() - started > timeout_s:
            told[0], failed[0] = layer + 1, 1
    if not bool(failed[0]):
        num_updates, num_bounced = sizes[layer].tolist()
        place, value = updates[:num_updates].to(table.device).unbind(-1)
        table.view(-1)[place.long()] = value
        for index, at in enumerate(bounced[:num_bounced].tolist()):
            its_row, its_head = at // plan[0, ..., 0].numel(), at // plan.shape[2] % plan.shape[1]
            its_request, slot = int(rows[its_row, Row.REQUEST]), int(plan.view(-1, 2)[at, 1])
            kv_cache[int(slot_ids[its_request, slot]), its_head] = units[index].to(kv_cache.device)
    still_absent = table[request, block] < 0
    plan[row[still_absent], head[still_absent], entry[still_absent]] = -1
