"""What a process says when it has to end before its requests do."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oasiskv.services import serving


class Busy:
    """A service whose requests end one by one, each time that somebody looks; those that are `stuck` do not."""

    is_ready = is_alive = True
    facts: Mapping[str, Any] = {}

    def __init__(self, num_requests: int, num_stuck: int) -> None:
        self.num_requests, self.num_stuck = num_requests, num_stuck

    def drain(self) -> int:
        self.num_requests = max(self.num_requests - 1, self.num_stuck)
        return self.num_requests


def end(service: Busy, drain_s: float, *more: int) -> None:
    async def main() -> None:
        received: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGTERM, *more):
            received.put_nowait(number)
        await serving.serve(service, (), received, drain_s)

    asyncio.run(main())


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(serving, "TERMINATION_LOG", path)
    return path


@pytest.mark.parametrize(("drain_s", "more"), [(0.0, ()), (60.0, (signal.SIGTERM,))])
def test_what_is_cut_off_is_said_in_numbers_where_kubernetes_looks(
    drain_s: float, more: tuple[int, ...], log: Path
) -> None:
    log.touch()
    end(Busy(5, 3), drain_s, *more)
    assert log.read_text() == "3 requests had not ended when the process did"


def test_nothing_is_said_when_all_requests_came_to_their_end(log: Path) -> None:
    log.touch()
    end(Busy(4, 0), 60.0)
    assert log.read_text() == ""


def test_outside_of_a_pod_nothing_is_written(log: Path) -> None:
    end(Busy(3, 3), 0.0)
    assert not log.exists()
