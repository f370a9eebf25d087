"""The suggested threshold is the length up to which prompts were no slower where they are decoded."""

from typing import Any

import pytest

threshold = pytest.importorskip("oasiskv.cli.threshold", reason="the extra services is not installed")


def rows(*triples: tuple[int, float, float | None]) -> list[dict[str, Any]]:
    return [
        {"length": length, "local_first_s": 0.1, "remote_first_s": remote and 0.1, "local_second_s": local,
         "remote_second_s": remote}
        for length, local, remote in triples
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("triples", "expected"),
    [
        ([(256, 0.2, 0.3), (512, 0.4, 0.45), (1024, 0.9, 0.8)], 512),
        # It is the first crossing that counts, whatever the order.
        ([(2048, 1.5, 1.6), (1024, 0.9, 0.8), (512, 0.4, 0.45)], 512),
        ([(256, 0.3, 0.2), (512, 0.4, 0.45)], 0),
        ([(256, 0.3, 0.3)], 256),
        # Too short to be handed over: that says nothing.
        ([(64, 0.1, None), (256, 0.3, 0.2)], 0),
        ([(64, 0.1, None)], 0),
    ],
)
def test_the_threshold_ends_where_handing_over_is_first_faster(
    triples: list[tuple[int, float, float | None]], expected: int
) -> None:
    assert threshold.suggested(rows(*triples)) == expected


def test_a_length_that_was_not_handed_over_is_told_so() -> None:
    line = threshold.table(rows((64, 0.1, None))).splitlines()[1]
    assert line.split() == ["64", "0.100", "-", "0.100", "-"]


def test_times_are_medians_of_each_way() -> None:
    times = {True: [(0.1, 0.2), (0.3, 0.4), (0.2, 0.9)], False: [(0.5, 0.6)]}
    row = threshold._row(100, times, has_remote=True)
    assert (row["local_first_s"], row["local_second_s"], row["remote_second_s"]) == (0.2, 0.4, 0.6)
    assert threshold._row(100, times, has_remote=False)["remote_first_s"] is None
