"""Turns over an API server in memory, for tests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from oasiskv.operator.asks import Asks
from oasiskv.operator.claims import Claims
from oasiskv.operator.metrics import Metrics
from oasiskv.operator.resources import SERVICES
from oasiskv.operator.shell import Shell
from oasiskv.operator.store import Store
from oasiskv.operator.testing import service
from oasiskv.operator.testing_fake import FakeApi

KEY = ("llm", "chat")
PATH = SERVICES.path(*KEY)


class Bench:
    """A shell over an API server in memory."""

    def __init__(self, api: FakeApi) -> None:
        self.api, self.woken, self.may_write = api, [0], True
        self.metrics = Metrics()
        self.asks = Asks()
        self.store = Store(api.client, (), True, lambda key: self.woken.append(0))
        self.shell = self.make_shell()

    def make_shell(self, operator: str = "") -> Shell:
        """Return one that knows nothing yet, with a lease in the name of an operator where one is given."""
        now, claims = "2026-01-01T00:00:00Z", Claims(self.api.client, operator) if operator else None
        return Shell(self.api.client, self.store, self.metrics, self.asks, lambda: self.may_write, lambda: now, claims)

    async def start(self) -> None:
        """Begin to read."""
        self.store.start()
        await self.store.look_for_kinds()

    async def turn(self) -> float | None:
        """Take a turn, of which the calls are then all that is counted."""
        self.api.calls.clear()
        return await self.shell.turn(KEY)

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until something is true."""
        async with asyncio.timeout(30):
            while not what():
                await asyncio.sleep(0.005)

    def writes(self) -> list[tuple[str, str]]:
        """Return what was written, but for Events."""
        return [call for call in self.api.calls if call[0] != "GET" and "/events" not in call[1]]

    def events(self) -> dict[str, dict[str, Any]]:
        """Return Events by reason."""
        found = [made for path, made in self.api.objects.items() if "/events/" in path]
        assert len({each["reason"] for each in found}) == len(found)
        return {each["reason"]: each for each in found}

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the service."""
        found: dict[str, Any] = next(
            each for each in self.api.objects[PATH]["status"]["conditions"] if each["type"] == kind
        )
        return found


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    """Run a test over an API server with one service."""

    async def main() -> None:
        async with FakeApi() as api:
            api.groups = {"serving.kserve.io/v1beta1"}
            api.put(service())
            bench = Bench(api)
            await bench.start()
            try:
                await test(bench)
            finally:
                await bench.asks.close()
                await bench.store.stop()

    asyncio.run(main())
