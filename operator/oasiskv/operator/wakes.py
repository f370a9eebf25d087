"""Whose turn it is: services that were woken, each worked on once at a time, however often it was woken meanwhile."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Key = tuple[str, str]
"""Namespace and name of a service."""
SOON_S, GAP_S = 0.05, 0.5
"""Wait after a wake, in which further ones come for free, and least time between two turns of one service."""
WIDTH = 8
"""Most services that are worked on at a time."""


class Wakes:
    """Holds who waits for a turn.

    Args:
        work: Takes a turn of a service.
    """

    def __init__(self, work: Callable[[Key], Awaitable[None]]) -> None:
        self._work = work
        self._due_s: dict[Key, float] = {}
        self._rest_until_s: dict[Key, float] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._since_s: dict[Key, float] = {}
        self._news = asyncio.Event()

    def wake(self, key: Key, delay_s: float = SOON_S) -> None:
        """Give a service a turn, after a while; the earliest of several wakes counts."""
        due_s = max(self._now() + delay_s, self._rest_until_s.get(key, 0.0))
        self._due_s[key] = min(due_s, self._due_s.get(key, due_s))
        self._news.set()

    def forget(self, key: Key) -> None:
        """Take no further turn of a service."""
        self._due_s.pop(key, None)

    @property
    def num_waiting(self) -> int:
        """Number of services that wait for a turn."""
        return len(self._due_s)

    @property
    def longest_s(self) -> float:
        """Age of the oldest turn that is being taken."""
        return self._now() - min(self._since_s.values(), default=self._now())

    async def run(self) -> None:
        """Take turns until cancelled; turns that are being taken are then waited for, not cut off."""
        try:
            while True:
                self._news.clear()
                wait_s = self._start_due()
                # Not `wait_for`, which up to Python 3.11 loses a cancellation that comes together with the news.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
        finally:
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    def _start_due(self) -> float | None:
        """Start who is due; return in how many seconds the next one is, None for when something happens."""
        now = self._now()
        for key in sorted(self._due_s, key=lambda key: self._due_s[key]):
            if len(self._tasks) == WIDTH:
                return None
            if self._due_s[key] > now:
                return self._due_s[key] - now
            if key not in self._tasks:
                del self._due_s[key]
                self._since_s[key] = now
                self._tasks[key] = asyncio.create_task(self._turn(key))
        return None

    async def _turn(self, key: Key) -> None:
        try:
            await self._work(key)
        finally:
            del self._tasks[key], self._since_s[key]
            now = self._now()
            self._rest_until_s = {each: end_s for each, end_s in self._rest_until_s.items() if end_s > now}
            self._rest_until_s[key] = now + GAP_S
            if key in self._due_s:
                self._due_s[key] = max(self._due_s[key], now + GAP_S)
            self._news.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
