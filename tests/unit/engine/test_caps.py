"""What a worker measures for its cap."""

from pathlib import Path
from typing import Any

import pytest

from oasiskv.core.cap import Measured, read_log, replay
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError
from oasiskv.engine.caps import MEASURE_STEPS, Caps


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def counts(stall_s: float, transfer_s: float, fetched: float) -> dict[str, float]:
    return {"stall_seconds": stall_s, "transfer_seconds": transfer_s, "fetched": fetched}


def auto(clock: Clock | None = None, **settings: Any) -> Caps:
    return Caps(LookaheadConfig.from_mapping({"cap": "auto", **settings}), clock or Clock())


def run(caps: Caps, clock: Clock, steps: range, *, rows: int = 3, step_s: float = 0.01) -> None:
    for step in steps:
        caps.begin_step(step, rows)
        clock.now += step_s


def given(folder: Path) -> list[Measured]:
    (path,) = folder.iterdir()
    logged = read_log(path.read_text().splitlines())
    assert replay(logged) is None
    return [one.measured for one, _ in logged.steps if one.measured is not None]


def test_a_fixed_cap_measures_nothing_and_never_changes() -> None:
    caps = Caps(LookaheadConfig(cap=9))
    assert not caps.is_auto
    assert not any(caps.is_due(step) for step in range(20))
    assert [caps.begin_step(step, 96) for step in range(20)] == [9] * 20
    caps.take(counts(1, 1, 1), 3)
    assert caps.num_changes == 0


def test_what_is_given_to_the_rule_are_means_per_step_of_the_steps_between_two_looks(tmp_path: Path) -> None:
    clock = Clock()
    caps = auto(clock, cap_log=str(tmp_path))
    run(caps, clock, range(1, 5))
    caps.take(counts(0.5, 2.0, 700), 4)  # the first look has nothing to compare with
    run(caps, clock, range(5, 9), rows=5)
    clock.now += 0.9  # a step with a piece of a prompt: the middle one counts
    run(caps, clock, range(9, 10))
    caps.take(counts(0.504, 2.02, 1100), 8)
    run(caps, clock, range(10, 12))
    caps.close()
    (measured,) = given(tmp_path)
    expected = Measured(step_s=0.01, stall_s=0.001, transfer_s=0.005, num_units=100, num_rows=5, cap=6)
    for name in ("step_s", "stall_s", "transfer_s", "num_units", "num_rows", "cap"):
        assert getattr(measured, name) == pytest.approx(getattr(expected, name))


def test_steps_without_sparse_rows_teach_nothing(tmp_path: Path) -> None:
    clock = Clock()
    caps = auto(clock, cap_log=str(tmp_path))
    run(caps, clock, range(1, 5))
    caps.take(counts(0, 0, 0), 4)
    run(caps, clock, range(5, 7))
    run(caps, clock, range(7, 9), rows=0)
    caps.take(counts(0, 1, 100), 8)
    run(caps, clock, range(9, 12))
    caps.close()
    assert given(tmp_path) == []


def test_a_link_that_is_waited_for_lowers_the_cap_and_one_that_rests_raises_it() -> None:
    clock = Clock()
    caps = auto(clock)
    stall_s = transfer_s = fetched = 0.0
    seen = {}
    for phase, (stall, transfer) in {"idle": (0.0, 0.001), "late": (0.005, 0.015)}.items():
        for step in range(1, 200):
            number = step + (1000 if phase == "late" else 0)
            if caps.is_due(number):
                caps.take(counts(stall_s, transfer_s, fetched), number - 1)
            cap = caps.begin_step(number, 8)
            clock.now += 0.01 + stall
            stall_s, transfer_s, fetched = stall_s + stall, transfer_s + transfer, fetched + 8 * 100 * cap
        seen[phase] = cap
    assert seen == {"idle": 32, "late": 4}
    assert caps.num_changes > 2
    assert caps.is_due(MEASURE_STEPS)


def test_caps_of_a_log_are_taken_again_and_the_last_one_stays(tmp_path: Path) -> None:
    clock = Clock()
    first = auto(clock, cap_log=str(tmp_path))
    run(first, clock, range(1, 5))
    first.take(counts(0, 0, 0), 4)
    run(first, clock, range(5, 9))
    first.take(counts(0, 0.004, 12 * 6 * 4), 8)
    run(first, clock, range(9, 20))
    first.close()
    (path,) = tmp_path.iterdir()
    caps = [cap for _, cap in read_log(path.read_text().splitlines()).steps]
    assert len(set(caps)) > 2
    again = auto(debug_cap_replay=str(path))
    assert [again.begin_step(step, 50) for step in range(len(caps) + 3)] == [*caps, caps[-1], caps[-1], caps[-1]]


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^cap_log: expected a folder that can be written, got"):
        auto(cap_log=str(tmp_path / "file"))
