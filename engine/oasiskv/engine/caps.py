"""The cap of each step of one worker: measures for `core.cap`, and keeps the log."""

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from oasiskv.core.cap import CapInput, CapLimits, CapRule, Measured, log_head, log_line, read_log
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError

MEASURE_STEPS = 4
"""Steps between two looks at the counters."""

KEPT_STEPS = 64
"""Steps remembered; the counters of a GPU come a few steps late."""


@dataclass(slots=True)
class _Step:
    began_s: float
    num_rows: int
    cap: int


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counters as of the end of a step."""

    step: int
    stall_s: float
    transfer_s: float
    num_units: float


class Caps:
    """Owner of the cap in force.

    Args:
        config: The backend's settings.
        clock: Seconds, as `time.perf_counter`.

    Attributes:
        cap: That of the running step.
    """

    def __init__(self, config: LookaheadConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start with the first cap.

        Raises:
            ConfigError: the log to take caps from is none, or the log cannot be written.
        """
        self.cap = config.first_cap
        self._clock = clock
        self._rule: CapRule | None = None
        self._replayed: list[int] | None = None
        self._log: TextIO | None = None
        self._steps: deque[tuple[int, _Step]] = deque(maxlen=KEPT_STEPS)
        self._known: _Counts | None = None
        self._fresh: Measured | None = None
        self._num_changes = 0
        if config.cap != "auto":
            return
        limits = CapLimits(least=config.least_cap, most=config.most_cap, first=config.first_cap)
        self._rule = CapRule(limits)
        if config.debug_cap_replay is not None:
            lines = Path(config.debug_cap_replay).read_text().splitlines()
            self._replayed = [min(cap, limits.most) for _, cap in reversed(read_log(lines).steps)]
        if config.cap_log is not None:
            self._log = _open_log(Path(config.cap_log))
            self._log.write(log_head(limits) + "\n")

    @property
    def is_auto(self) -> bool:
        """Whether the cap changes, so that what steps take must be measured."""
        return self._rule is not None

    @property
    def num_changes(self) -> int:
        """How often it changed."""
        return self._num_changes

    def is_due(self, step: int) -> bool:
        """Say whether the counters are wanted as of the step before this one."""
        return self.is_auto and step % MEASURE_STEPS == 0

    def begin_step(self, step: int, num_rows: int) -> int:
        """Return the cap of a step.

        Args:
            step: Its number.
            num_rows: Its sparse rows.
        """
        if self._rule is None:
            return self.cap
        given = CapInput(num_rows=num_rows, measured=self._fresh)
        self._fresh = None
        before, self.cap = self.cap, self._rule.step(given)
        if self._replayed is not None:
            self.cap = self._replayed.pop() if self._replayed else before
        self._num_changes += self.cap != before
        self._steps.append((step, _Step(self._clock(), num_rows, self.cap)))
        if self._log is not None:
            self._log.write(log_line(given, self.cap) + "\n")
        return self.cap

    def take(self, counts: Mapping[str, float], step: int) -> None:
        """Take the worker's counters as of the end of a step.

        Args:
            counts: As of `RuntimeCounters.snapshot`.
            step: That step.
        """
        if self._rule is None:
            return
        now = _Counts(step, counts["stall_seconds"], counts["transfer_seconds"], counts["fetched"])
        before, self._known = self._known, now
        if before is None or now.step <= before.step:
            return
        steps = [one for number, one in self._steps if before.step < number <= now.step]
        begins = [one.began_s for number, one in self._steps if before.step < number <= now.step + 1]
        # The middle one: a step with a piece of a prompt in it takes many times as long and says nothing of the others.
        gaps = [later - earlier for earlier, later in itertools.pairwise(begins)]
        count = now.step - before.step
        if len(steps) < count or not gaps or any(one.num_rows == 0 for one in steps):
            return
        self._fresh = Measured(
            step_s=statistics.median(gaps),
            stall_s=(now.stall_s - before.stall_s) / count,
            transfer_s=(now.transfer_s - before.transfer_s) / count,
            num_units=(now.num_units - before.num_units) / count,
            num_rows=statistics.fmean(one.num_rows for one in steps),
            cap=statistics.fmean(one.cap for one in steps),
        )

    def close(self) -> None:
        """End the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _open_log(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"cap-{os.getpid()}-{time.time_ns()}.jsonl").open("w", buffering=1)
    except OSError as error:
        raise ConfigError(f"cap_log: expected a folder that can be written, got {error}") from error
