"""The cap that follows the host link. Its links here are simulated, which the names say."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.cap import (
    LEAST_TRANSFER_S,
    CapInput,
    CapLimits,
    CapRule,
    Measured,
    log_head,
    log_line,
    read_log,
    replay,
)
from oasiskv.core.errors import ConfigError

PAIRS = 36 * 8
LIMITS = CapLimits(least=4, most=32, first=6)


@dataclass(frozen=True)
class SimulatedLink:
    """A step of Qwen3-8B's shapes with dummy weights as measured on an H200 host, straightened to lines.

    A step takes as long as the longer of its computing and its transfers.
    """

    units_per_s: float = 42e9 / 8192
    fixed_s: float = 0.006
    row_s: float = 0.00008
    overhead_s: float = 0.0004

    def compute_s(self, num_rows: int) -> float:
        return self.fixed_s + self.row_s * num_rows

    def transfer_s(self, num_rows: int, fetched: float) -> float:
        return self.overhead_s + num_rows * PAIRS * fetched / self.units_per_s

    def measure(self, num_rows: int, cap: float, fetched: float | None = None) -> Measured:
        """What a step took in which heads fetched so much on average, else all that they may."""
        fetched = cap if fetched is None else fetched
        compute_s, transfer_s = self.compute_s(num_rows), self.transfer_s(num_rows, fetched)
        return Measured(
            step_s=max(compute_s, transfer_s),
            stall_s=max(0.0, transfer_s - compute_s),
            transfer_s=transfer_s,
            num_units=num_rows * PAIRS * fetched,
            num_rows=num_rows,
            cap=cap,
        )

    def largest_cap(self, num_rows: int) -> float:
        """The cap at which transfers take as long as the computing."""
        return (self.compute_s(num_rows) - self.overhead_s) * self.units_per_s / (num_rows * PAIRS)


NEEDS = ((0.5, 1.0), (0.25, 3.0), (0.15, 8.0), (0.08, 16.0), (0.02, 30.0))
"""Shares of the heads, and the blocks that each of them newly needs in a step."""


class Simulation:
    """Steps of a simulated link: tokens, time, and what was deferred of what was predicted.

    A head lacks in a step what it newly needs and half of what was deferred before.
    """

    def __init__(self) -> None:
        self.link = SimulatedLink()
        self.seconds = self.tokens = self.deferred = self.wanted = 0.0
        self._left = [0.0] * len(NEEDS)

    def step(self, num_rows: int, cap: int) -> Measured:
        lacking = [need + 0.5 * left for (_, need), left in zip(NEEDS, self._left, strict=True)]
        self._left = [max(0.0, lack - cap) for lack in lacking]
        fetched = sum(share * min(lack, cap) for (share, _), lack in zip(NEEDS, lacking, strict=True))
        measured = self.link.measure(num_rows, cap, fetched)
        self.seconds += measured.step_s
        self.tokens += num_rows
        self.deferred += num_rows * sum(share * left for (share, _), left in zip(NEEDS, self._left, strict=True))
        self.wanted += num_rows * 128
        return measured

    def run(self, rows: list[int], fixed: int | None = None) -> "Simulation":
        """Run with a fixed cap, or with the rule, which learns of every fourth step two steps later, as on a GPU."""
        rule, known = CapRule(LIMITS), dict[int, Measured]()
        for number, num_rows in enumerate(rows):
            cap = rule.step(CapInput(num_rows=num_rows, measured=known.pop(number, None)))
            measured = self.step(num_rows, cap if fixed is None else fixed)
            if number % 4 == 3:
                known[number + 2] = measured
        return self

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def deferred_share(self) -> float:
        return self.deferred / self.wanted


SECONDS = st.floats(0, 0.5, allow_nan=False)
MEASURED = st.builds(
    Measured,
    step_s=st.floats(0.001, 0.5),
    stall_s=SECONDS,
    transfer_s=SECONDS,
    num_units=st.floats(0, 1e6),
    num_rows=st.floats(0, 300),
    cap=st.floats(1, 32),
)
INPUTS = st.lists(
    st.builds(CapInput, num_rows=st.integers(0, 300), measured=st.none() | MEASURED), min_size=1, max_size=40
)


def caps_of(inputs: list[CapInput], limits: CapLimits = LIMITS) -> list[int]:
    rule = CapRule(limits)
    return [rule.step(one) for one in inputs]


@given(INPUTS)
def test_the_cap_stays_within_its_bounds_and_grows_by_half_at_most(inputs: list[CapInput]) -> None:
    caps = caps_of(inputs)
    assert all(LIMITS.least <= cap <= LIMITS.most for cap in caps)
    assert all(later <= 1.5 * before + 1 for before, later in pairwise([LIMITS.first, *caps]))


@given(INPUTS, MEASURED, st.integers(1, 300), st.floats(0, 0.3))
def test_more_waiting_never_gives_a_larger_cap(
    inputs: list[CapInput], last: Measured, num_rows: int, more_s: float
) -> None:
    slower = replace(last, stall_s=last.stall_s + more_s)
    # Steps that computed nothing teach nothing: there is no more and less of that.
    if slower.stall_s < slower.step_s:
        caps = [caps_of([*inputs, CapInput(num_rows=num_rows, measured=m)])[-1] for m in (last, slower)]
        assert caps[1] <= caps[0]


@given(INPUTS, MEASURED, st.integers(1, 300), st.floats(0, 0.3))
def test_longer_transfers_of_as_many_units_never_give_a_larger_cap(
    inputs: list[CapInput], last: Measured, num_rows: int, more_s: float
) -> None:
    if last.transfer_s >= LEAST_TRANSFER_S:
        slower = replace(last, transfer_s=last.transfer_s + more_s)
        caps = [caps_of([*inputs, CapInput(num_rows=num_rows, measured=m)])[-1] for m in (last, slower)]
        assert caps[1] <= caps[0]


@given(INPUTS, st.integers(1, 300), st.integers(0, 300))
def test_more_rows_never_give_a_larger_cap(inputs: list[CapInput], num_rows: int, more: int) -> None:
    caps = [caps_of([*inputs, CapInput(num_rows=count)])[-1] for count in (num_rows, num_rows + more)]
    assert caps[1] <= caps[0]


@given(INPUTS)
def test_a_log_gives_the_same_caps_again(inputs: list[CapInput]) -> None:
    caps = caps_of(inputs)
    lines = [log_head(LIMITS), *(log_line(one, cap) for one, cap in zip(inputs, caps, strict=True))]
    logged = read_log(lines)
    assert logged.steps == list(zip(inputs, caps, strict=True))
    assert replay(logged) is None
    given, cap = logged.steps[-1]
    logged.steps[-1] = (given, cap + 1)
    assert replay(logged) == len(inputs) - 1


def test_a_log_that_was_cut_off_in_its_last_line_is_read_up_to_there() -> None:
    line = log_line(CapInput(num_rows=3), 6)
    assert len(read_log([log_head(LIMITS), line, line[:9]]).steps) == 1


@pytest.mark.parametrize("lines", [[], ["{"], ["{}"], ["[]", "{}"], [log_head(LIMITS), '{"rows": 1}']])
def test_what_is_no_log_is_refused(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^cap log: expected"):
        read_log(lines)


def test_bounds_that_are_not_in_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cap: expected 1 <= least <= first <= most, got 7, 6, 32"):
        CapRule(replace(LIMITS, least=7))


@given(st.floats(5e9, 400e9), st.integers(1, 200), st.floats(0.002, 0.05), st.floats(0, 0.0008), st.integers(4, 32))
def test_on_a_simulated_link_the_cap_settles_just_below_what_makes_layers_wait(
    bytes_per_s: float, num_rows: int, fixed_s: float, overhead_s: float, first: int
) -> None:
    link = SimulatedLink(units_per_s=bytes_per_s / 8192, fixed_s=fixed_s, overhead_s=overhead_s)
    rule = CapRule(replace(LIMITS, first=first))
    caps, waits = [], []
    for _ in range(300):
        # Every head lacks as much as it may fetch.
        measured = link.measure(num_rows, rule.cap)
        caps.append(rule.step(CapInput(num_rows=num_rows, measured=measured)))
        waits.append(link.measure(num_rows, rule.cap).stall_s / measured.step_s)
    best = link.largest_cap(num_rows)
    if best < LIMITS.least:
        assert set(caps[50:]) == {LIMITS.least}
        return
    settled = caps[100:]
    assert max(settled) <= min(LIMITS.most, best) + 1e-9
    assert min(settled) >= min(LIMITS.most, int(0.75 * best) - 1)
    assert max(waits[100:]) == 0
    assert len(set(settled)) <= 2


def test_a_link_that_lies_about_its_speed_is_found_out_by_the_waits() -> None:
    # Transfers seem to take half as long as they hold the step up.
    link, rule = SimulatedLink(), CapRule(LIMITS)
    for _ in range(200):
        measured = replace(link.measure(30, rule.cap), transfer_s=0.5 * link.transfer_s(30, rule.cap))
        rule.step(CapInput(num_rows=30, measured=measured))
    assert rule.cap <= link.largest_cap(30) + 1


def test_where_most_heads_fetch_less_than_they_may_those_that_lack_more_may_fetch_more() -> None:
    link, caps = SimulatedLink(), []
    for share in (1.0, 0.5, 0.1, 0.001):
        rule = CapRule(LIMITS)
        for _ in range(100):
            rule.step(CapInput(num_rows=24, measured=link.measure(24, rule.cap, share * rule.cap)))
        assert link.measure(24, rule.cap, share * rule.cap).stall_s == 0
        caps.append(rule.cap)
    assert caps[0] < caps[1] < caps[2] == caps[3] == LIMITS.most


def test_steps_that_fetched_little_and_so_looked_slow_do_not_lower_the_cap() -> None:
    link, rule = SimulatedLink(), CapRule(LIMITS)
    for _ in range(100):
        rule.step(CapInput(num_rows=24, measured=link.measure(24, rule.cap)))
    settled = rule.cap
    for _ in range(3):
        rule.step(CapInput(num_rows=24, measured=link.measure(24, rule.cap, 0.02 * rule.cap)))
        assert rule.cap >= settled


RAMP = [rows for rows in (*range(4, 97, 4), *range(92, 3, -4)) for _ in range(60)]


def test_in_the_simulated_cost_model_a_ramp_goes_faster_than_with_any_fixed_cap_that_defers_as_little() -> None:
    adaptive = Simulation().run(RAMP)
    fixed = {cap: Simulation().run(RAMP, cap) for cap in range(1, LIMITS.most + 1)}
    shares = {cap: one.deferred_share for cap, one in fixed.items()}
    print(f"adaptive: {adaptive.tokens_per_s:.0f} tokens/s, {adaptive.deferred_share:.4f} deferred")
    for cap, one in fixed.items():
        print(f"fixed {cap}: {one.tokens_per_s:.0f} tokens/s, {one.deferred_share:.4f} deferred")
    as_good = [cap for cap in fixed if shares[cap] <= adaptive.deferred_share]
    assert as_good
    assert all(adaptive.tokens_per_s > fixed[cap].tokens_per_s for cap in as_good)
    # Nor does a mixture of the two fixed caps around it reach it at the same share.
    below = min(as_good, key=lambda cap: -shares[cap])
    above = min((cap for cap in fixed if shares[cap] > adaptive.deferred_share), key=lambda cap: shares[cap])
    weight = (adaptive.deferred_share - shares[below]) / (shares[above] - shares[below])
    mixed = (1 - weight) * fixed[below].tokens_per_s + weight * fixed[above].tokens_per_s
    assert adaptive.tokens_per_s > 1.02 * mixed
