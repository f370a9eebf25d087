"""How many blocks a KV head may fetch in a step: as many as the host link carries while the step computes.

`CapRule` decides before each step, from what the last ones took. It sees numbers alone, so that a log of what it was
given (`log_line`) gives the same caps again (`replay`).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oasiskv.core.errors import ConfigError

LATE_SHARE = 0.02
"""Share of a step that layers may wait for transfers and still count as not waiting."""

MOST_SHARE = 0.95
"""Share of the computing time that transfers may fill: layers do not take equally long, nor do heads fetch equally."""

LEAST_SHARE = 0.3
"""The same after many steps that waited all the same."""

BACKOFF = 0.9
"""What the share shrinks to where a step waited."""

RECOVERY = 0.002
"""What the share grows by where none did: slowly, since each trial costs a wait."""

FORGETTING = 0.2
"""Weight of what heads fetched last, where it is less than before."""

GROWTH = 1.5
"""Most that the cap, and what the link is trusted with, grow at a time: a fall is at once."""

LEAST_TRANSFER_S = 1e-6
"""Time of transfers per step below which it tells nothing."""

DEAD_BAND = 8
"""A cap rises by an eighth of itself at least, so that it does not flutter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapLimits:
    """What a cap may be."""

    least: int
    most: int
    first: int
    """Before anything was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a few decode steps took, as means per step."""

    step_s: float
    """From step to step, waits included."""
    stall_s: float
    """What the foreground waited for transfers."""
    transfer_s: float
    """How long transfers were under way."""
    num_units: float
    """Units that they moved."""
    num_rows: float
    """Sparse rows."""
    cap: float
    """The cap that was in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapInput:
    """What the rule is given before a step."""

    num_rows: int
    """Sparse rows of the step."""
    measured: Measured | None = None
    """What became known since the step before, if anything did."""


class CapRule:
    """Chooses the cap of each step; one per worker process, since each has a link of its own.

    What the link may be trusted with is kept in units per second of computing, and what a row fetches in units per
    block of the cap, most heads less than they may: so the cap follows the number of rows at once. It rises while
    transfers leave time unused, and falls as soon as layers wait. A head that may fetch twice as much fetches at most
    twice as much, so that a rise never aims too high.

    Attributes:
        cap: The last one chosen.
        num_changes: How often it changed.
    """

    def __init__(self, limits: CapLimits) -> None:
        """Start with the first cap.

        Raises:
            ConfigError: least, first and most are not in order.
        """
        if not 1 <= limits.least <= limits.first <= limits.most:
            raise ConfigError(
                f"cap: expected 1 <= least <= first <= most, got {limits.least}, {limits.first}, {limits.most}"
            )
        self.limits = limits
        self.cap = limits.first
        self.num_changes = 0
        self._share = MOST_SHARE
        self._compute_s = 0.0
        self._units_per_s: float | None = None
        self._units_per_cap = 0.0

    def step(self, given: CapInput) -> int:
        """Return the cap of the step about to run."""
        if given.measured is not None:
            self._learn(given.measured)
        if given.num_rows > 0 and self._units_per_s is not None:
            wanted = self._units_per_s * self._compute_s / (self._units_per_cap * given.num_rows)
            self._move(int(min(wanted, self.limits.most)))
        return self.cap

    def _learn(self, measured: Measured) -> None:
        """Correct what the link is trusted with."""
        compute_s, rows_by_cap = measured.step_s - measured.stall_s, measured.num_rows * measured.cap
        if min(compute_s, rows_by_cap) <= 0 or measured.num_units < 1 or measured.transfer_s < LEAST_TRANSFER_S:
            return
        # What heads need comes in bursts: the most of late counts.
        fetched = measured.num_units / rows_by_cap
        self._units_per_cap = max(fetched, self._units_per_cap + FORGETTING * (fetched - self._units_per_cap))
        is_late = measured.stall_s > LATE_SHARE * measured.step_s
        if is_late:
            self._share = max(LEAST_SHARE, BACKOFF * self._share)
        else:
            self._share = min(MOST_SHARE, self._share + RECOVERY)
        self._compute_s = compute_s
        carries = self._share * measured.num_units / measured.transfer_s
        trusted = carries if self._units_per_s is None else self._units_per_s
        if is_late:
            # More than a half at a time would be guessing: the next step shows what is left.
            trusted = min(trusted, carries) * max(0.5, compute_s / measured.step_s)
        elif measured.transfer_s > self._share * compute_s:
            trusted = min(trusted, carries)
        else:
            # Steps that fetched little say little of the link: they never lower it.
            trusted = max(trusted, min(carries, GROWTH * trusted))
        self._units_per_s = trusted

    def _move(self, wanted: int) -> None:
        before = self.cap
        wanted = max(self.limits.least, wanted)
        if wanted < before:
            self.cap = wanted
        elif wanted >= before + max(1, before // DEAD_BAND) or wanted == self.limits.most:
            self.cap = min(wanted, int(GROWTH * before) + 1)
        self.num_changes += self.cap != before


def log_head(limits: CapLimits) -> str:
    """Return the first line of a log."""
    return json.dumps({"limits": asdict(limits)})


def log_line(given: CapInput, cap: int) -> str:
    """Return the line of a step."""
    measured = None if given.measured is None else asdict(given.measured)
    return json.dumps({"rows": given.num_rows, "measured": measured, "cap": cap})


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A log that was read."""

    limits: CapLimits
    steps: list[tuple[CapInput, int]]
    """What the rule was given before each step, and the cap that it chose."""


def read_log(lines: Iterable[str]) -> Logged:
    """Read a log; a last line that was cut off is left out.

    Raises:
        ConfigError: it is no log of caps.
    """
    entries = list(_entries(list(lines)))
    try:
        limits = CapLimits(**entries[0]["limits"])
        steps = []
        for entry in entries[1:]:
            measured = None if entry["measured"] is None else Measured(**entry["measured"])
            steps.append((CapInput(num_rows=entry["rows"], measured=measured), int(entry["cap"])))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cap log: expected limits, then a step a line, got {type(error).__name__}: {error}"
        ) from error
    return Logged(limits=limits, steps=steps)


def replay(logged: Logged) -> int | None:
    """Return the first step, counted from 0, for which the rule now chooses another cap; None if there is none."""
    rule = CapRule(logged.limits)
    for number, (given, cap) in enumerate(logged.steps):
        if rule.step(given) != cap:
            return number
    return None


def _entries(lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1 and number > 0:
                return
            raise ConfigError(f"cap log: expected JSON in line {number + 1}, got {line[:40]!r}") from error
        yield entry
