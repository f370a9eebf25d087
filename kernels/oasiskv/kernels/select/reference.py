"""What select means, in plain torch over all rows and heads at once."""

import torch

from oasiskv.kernels.rows import FRESH, Counter, Row


def select(
    blocks: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    resident: torch.Tensor,
    stamp: torch.Tensor,
    plan: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Fill `plan` and update residency; see `op.select`."""
    plan.fill_(-1)
    live = torch.nonzero(rows[:, Row.REQUEST] >= 0).flatten()
    if live.numel() == 0:
        return
    request = rows[live, Row.REQUEST].long()
    now = 2 * rows[live, Row.STEP, None, None]  # [N, 1, 1]
    held, last = resident[request], stamp[request]  # [N, H, K]
    # Best score first, ties to the lower block.
    wanted, by_block = blocks[live].sort(-1)
    by_score = scores[live].gather(-1, by_block).sort(dim=-1, descending=True, stable=True).indices
    wanted = wanted.gather(-1, by_score)
    max_cap, budget = plan.shape[2], held.shape[-1]

    valid = wanted >= 0
    same = (wanted[..., :, None] == held[..., None, :]) & valid[..., :, None]  # [N, H, predicted, slot]
    is_hit, is_kept = same.any(-1), same.any(-2)
    last = torch.where(is_kept, now, last)

    is_missing = valid & ~is_hit
    rank = is_missing.cumsum(-1) - 1  # place among the missing, best score first
    limit = rows[live, Row.CAP, None, None].clamp(max=max_cap)
    is_admitted = is_missing & (rank < limit)
    num_admitted = is_admitted.sum(-1, keepdim=True)

    # Least recently selected first, ties to the lower slot; predicted residents never.
    slot = torch.arange(budget, device=held.device)
    age = (last // 2).long() * budget + slot
    victims = torch.where(is_kept, torch.iinfo(torch.int64).max, age).argsort(-1)[..., :max_cap]  # [N, H, C]
    fetched = torch.full((*held.shape[:2], max_cap + 1), -1, dtype=torch.int32, device=held.device)
    fetched.scatter_(-1, torch.where(is_admitted, rank, max_cap), wanted)
    fetched = fetched[..., :max_cap]
    is_used = torch.arange(max_cap, device=held.device) < num_admitted

    wasted = ((last.gather(-1, victims) & FRESH) != 0) & is_used
    plan[live] = torch.stack([torch.where(is_used, fetched, -1), torch.where(is_used, victims.int(), -1)], -1)
    held = held.scatter(-1, victims, torch.where(is_used, fetched, held.gather(-1, victims)))
    last = last.scatter(-1, victims, torch.where(is_used, now + FRESH, last.gather(-1, victims)))
    resident[request], stamp[request] = held, last.int()

    def count(mask: torch.Tensor) -> torch.Tensor:
        return mask.sum((0, 2))

    counters[:, Counter.PREDICTED] += count(valid)
    counters[:, Counter.HIT] += count(is_hit)
    counters[:, Counter.FETCHED] += count(is_admitted)
    counters[:, Counter.DEFERRED] += count(is_missing & ~is_admitted)
    counters[:, Counter.WASTED] += count(wasted)
    counters[:, Counter.EVICTED] += count(is_admitted)
