"""A prompt goes where the fewest tokens are to be computed until it is done."""

import pytest

from oasiskv.services.decode.choice import REASONS, Candidate, Reason, ranked, reason


def candidates(*pairs: tuple[int, int]) -> list[Candidate]:
    return [Candidate(num_waiting_tokens=waiting, num_held_tokens=held) for waiting, held in pairs]


@pytest.mark.parametrize(
    ("pairs", "order", "why"),
    [
        ([(500, 0)], [0], "only"),
        ([(500, 0), (0, 0), (100, 0)], [1, 2, 0], "both"),
        ([(0, 0), (0, 64)], [1, 0], "both"),
        # The longest prefix wins while no more tokens wait than it saves.
        ([(0, 0), (64, 64)], [1, 0], "longest-prefix"),
        ([(0, 0), (65, 64)], [0, 1], "least-load"),
        ([(0, 0), (100, 160), (0, 48)], [1, 2, 0], "longest-prefix"),
        ([(0, 0), (10000, 4096), (100, 320)], [2, 0, 1], "neither"),
        # Of equal ones the first, and with nothing known too.
        ([(7, 7), (0, 0), (0, 0)], [0, 1, 2], "longest-prefix"),
        ([(0, 0), (0, 0)], [0, 1], "both"),
    ],
)
def test_the_best_is_the_one_that_is_done_first(pairs: list[tuple[int, int]], order: list[int], why: Reason) -> None:
    assert ranked(candidates(*pairs)) == order
    assert reason(candidates(*pairs)) == why
    assert why in REASONS
