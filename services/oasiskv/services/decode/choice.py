"""Which prefill service a prompt goes to: by what waits there, and by how much of the prompt lies in its staging."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["only", "least-load", "longest-prefix", "both", "neither"]
"""What the best one has: it is the only one, or has the least load, the longest prefix, both, or a bit of each."""

REASONS: tuple[Reason, ...] = ("only", "least-load", "longest-prefix", "both", "neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One that could compute a prompt."""

    num_waiting_tokens: int
    """Prompt tokens that are to be computed there before."""

    num_held_tokens: int
    """Tokens at the beginning of this prompt that need not be computed there."""


def ranked(candidates: Sequence[Candidate]) -> list[int]:
    """Return the places of the candidates, the best first.

    The one comes first that has the fewest tokens to compute until the prompt is done: those that wait there, and of
    the prompt what it does not hold. So the longest prefix wins, unless more tokens wait there than it saves.
    """

    def key(place: int) -> tuple[int, int, int]:
        one = candidates[place]
        return one.num_waiting_tokens - one.num_held_tokens, -one.num_held_tokens, place

    return sorted(range(len(candidates)), key=key)


def reason(candidates: Sequence[Candidate]) -> Reason:
    """Return what the best of the candidates has; there is at least one."""
    if len(candidates) == 1:
        return "only"
    best = candidates[ranked(candidates)[0]]
    has_least = best.num_waiting_tokens == min(one.num_waiting_tokens for one in candidates)
    has_longest = best.num_held_tokens == max(one.num_held_tokens for one in candidates)
    if has_least:
        return "both" if has_longest else "least-load"
    return "longest-prefix" if has_longest else "neither"
