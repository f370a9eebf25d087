import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from oasiskv.operator import lease as lease_module
from oasiskv.operator.claims import DURATION_S, RENEW_S, Claims
from oasiskv.operator.client import ConflictError, RefusedError
from oasiskv.operator.lease import Lease, LeaseLostError
from oasiskv.operator.testing_fake import FakeApi

PATH = "/apis/coordination.k8s.io/v1/namespaces/system/leases/op"


class Clock:
    """The lease's clock, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("oasiskv.operator.lease.time.monotonic", lambda: self.now_s)
        self._sleep = asyncio.sleep
        monkeypatch.setattr("oasiskv.operator.lease.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await self._sleep(0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[FakeApi, Clock], Awaitable[None]]], None]:
    def run(test: Callable[[FakeApi, Clock], Awaitable[None]]) -> None:
        async def main() -> None:
            async with FakeApi() as api:
                await test(api, Clock(monkeypatch))

        asyncio.run(main())

    return run


def lease(api: FakeApi, holder: str) -> Lease:
    return Lease(api.client, "system", "op", holder)


Run = Callable[[Callable[[FakeApi, Clock], Awaitable[None]]], None]


def test_the_first_one_has_it_and_the_second_one_waits(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = lease(api, "first"), lease(api, "second")
        await first.acquire()
        assert (first.is_held, await second.attempt(), second.is_held) == (True, False, False)
        assert second.other == "first"
        assert api.objects[PATH]["spec"]["holderIdentity"] == "first"

    run(test)


def test_a_lease_that_is_renewed_is_never_taken(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = lease(api, "first"), lease(api, "second")
        await first.acquire()
        for _ in range(20):
            await clock.sleep(lease_module.RENEW_S)
            assert await first.attempt()
            assert not await second.attempt()
        assert api.objects[PATH]["spec"]["leaseTransitions"] == 0

    run(test)


def test_a_dead_holders_lease_is_taken_only_after_the_holder_would_have_stopped_to_write(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = lease(api, "first"), lease(api, "second")
        await first.acquire()
        begin_s = clock.now_s
        while not await second.attempt():
            await clock.sleep(0.5)
            assert not (first.is_held and second.is_held)
        assert lease_module.DURATION_S <= clock.now_s - begin_s <= lease_module.DURATION_S + 1
        assert not first.is_held
        assert api.objects[PATH]["spec"]["leaseTransitions"] == 1

    run(test)


def test_a_holder_whose_clock_is_wrong_by_hours_is_waited_for_all_the_same(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        await lease(api, "first").acquire()
        api.objects[PATH]["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
        assert not await lease(api, "second").attempt()

    run(test)


def test_what_was_released_is_taken_at_once_and_not_written_under(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = lease(api, "first"), lease(api, "second")
        await first.acquire()
        await first.release()
        assert not first.is_held
        assert await second.attempt()

    run(test)


def test_a_restarted_container_need_not_wait_for_itself(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        await lease(api, "pod-1").acquire()
        assert await lease(api, "pod-1").attempt()

    run(test)


def test_of_two_that_take_it_at_once_one_has_it(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        made = lease(api, "dead")
        await made.acquire()
        await made.release()
        both = lease(api, "first"), lease(api, "second")
        assert sorted(await asyncio.gather(*(each.attempt() for each in both))) == [False, True]
        assert sum(each.is_held for each in both) == 1

    run(test)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_holder_that_cannot_renew_goes_on_for_a_while_and_then_stops(run: Run, code: int) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first = lease(api, "first")
        await first.acquire()
        begin_s = clock.now_s
        api.fail("PUT", "/leases", code, left=1000)
        with pytest.raises(LeaseLostError, match="lease op: expected to hold it, got no answer"):
            await first.keep()
        assert lease_module.DURATION_S / 2 < clock.now_s - begin_s < lease_module.DURATION_S
        assert not first.is_held

    run(test)


def test_a_holder_that_can_renew_again_in_time_keeps_it(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first = lease(api, "first")
        await first.acquire()
        api.fail("PUT", "/leases", 503, left=2)
        task = asyncio.create_task(first.keep())
        while api.failures[0].left or clock.now_s < 1060:
            await clock._sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(test)


def test_a_holder_that_finds_another_ones_name_stops_at_once(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first = lease(api, "first")
        await first.acquire()
        spec: dict[str, Any] = api.objects[PATH]["spec"]
        spec["holderIdentity"] = "second"
        begin_s = time.monotonic()
        with pytest.raises(LeaseLostError, match="got second"):
            await first.keep()
        assert not first.is_held
        assert time.monotonic() - begin_s <= lease_module.RENEW_S

    run(test)


def test_a_role_that_forbids_the_lease_is_said_and_not_waited_for(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        api.fail("GET", "/leases", 403)
        with pytest.raises(RefusedError):
            await lease(api, "first").acquire()

    run(test)


CLAIM = "/apis/coordination.k8s.io/v1/namespaces/llm/leases/oasiskv-services"


def test_a_namespace_belongs_to_the_operator_that_was_there_first(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = Claims(api.client, "a/op"), Claims(api.client, "b/op")
        # Several turns at a time ask once.
        assert await asyncio.gather(*(first.take("llm") for _ in range(5))) == [""] * 5
        assert [verb for verb, path in api.calls if verb != "GET"] == ["POST"]
        assert (await second.take("llm"), second.is_held("llm"), first.is_held("llm")) == ("a/op", False, True)
        assert (await second.take("other"), await first.take("other")) == ("", "b/op")

    run(test)


def test_an_operator_that_is_started_anew_finds_its_namespaces_and_others_wait_for_it_meanwhile(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        await Claims(api.client, "a/op").take("llm")
        second = Claims(api.client, "b/op")
        assert await second.take("llm") == "a/op"
        await clock.sleep(DURATION_S - 1)
        assert await second.take("llm") == "a/op"
        assert await Claims(api.client, "a/op").take("llm") == ""
        await clock.sleep(2)
        assert await second.take("llm") == "a/op"
        await clock.sleep(DURATION_S + 1)
        assert await second.take("llm") == ""
        assert api.objects[CLAIM]["spec"]["holderIdentity"] == "b/op"

    run(test)


def test_a_namespace_is_kept_for_as_long_as_it_is_renewed_and_not_written_in_afterwards(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = Claims(api.client, "a/op"), Claims(api.client, "b/op")
        await first.take("llm")
        for _ in range(20):
            await clock.sleep(RENEW_S)
            await first.renew()
            assert (await second.take("llm"), first.is_held("llm")) == ("a/op", True)
        api.fail("PUT", "/leases", 403)
        api.fail("PUT", "/leases", 503, left=1000)
        for _ in range(4):
            await clock.sleep(RENEW_S)
            await first.renew()
            assert not (first.is_held("llm") and await second.take("llm") == "")
        assert not first.is_held("llm")
        with pytest.raises(ConflictError, match="expected to take it, got no answer"):
            await first.take("llm")

    run(test)


def test_a_namespace_that_is_left_has_no_lease_any_more(run: Run) -> None:
    async def test(api: FakeApi, clock: Clock) -> None:
        first, second = Claims(api.client, "a/op"), Claims(api.client, "b/op")
        await first.take("llm")
        await second.take("llm")
        await second.drop("llm")
        assert CLAIM in api.objects
        await first.drop("llm")
        assert CLAIM not in api.objects
        assert not first.is_held("llm")
        assert await second.take("llm") == ""

    run(test)
