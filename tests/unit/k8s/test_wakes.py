import asyncio
from collections.abc import Awaitable, Callable

from oasiskv.operator import wakes
from oasiskv.operator.client import pause
from oasiskv.operator.wakes import Key, Wakes

A, B = ("llm", "a"), ("llm", "b")


def run(test: Callable[[Wakes, list[Key], asyncio.Event], Awaitable[None]]) -> None:
    async def main() -> None:
        turns: list[Key] = []
        may_end = asyncio.Event()
        may_end.set()

        async def work(key: Key) -> None:
            turns.append(key)
            await may_end.wait()

        made = Wakes(work)
        task = asyncio.create_task(made.run())
        await test(made, turns, may_end)
        may_end.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.005)


def test_many_wakes_are_one_turn() -> None:
    async def test(made: Wakes, turns: list[Key], may_end: asyncio.Event) -> None:
        for _ in range(100):
            made.wake(A)
            made.wake(B)
        await until(lambda: len(turns) == 2)
        assert (sorted(turns), made.num_waiting) == ([A, B], 0)

    run(test)


def test_a_wake_during_a_turn_is_one_more_turn_afterwards() -> None:
    async def test(made: Wakes, turns: list[Key], may_end: asyncio.Event) -> None:
        may_end.clear()
        made.wake(A, 0)
        await until(lambda: turns == [A])
        for _ in range(10):
            made.wake(A, 0)
        made.wake(B, 0)
        await until(lambda: turns == [A, B])  # A's second turn has not begun, though it was due before B's
        assert made.num_waiting == 1
        may_end.set()
        await until(lambda: turns == [A, B, A])
        assert made.num_waiting == 0

    run(test)


def test_the_earliest_of_several_wakes_counts() -> None:
    async def test(made: Wakes, turns: list[Key], _: asyncio.Event) -> None:
        made.wake(A, 0)
        made.wake(A, 3600)
        made.wake(B, 3600)
        made.wake(B, 0)
        await until(lambda: len(turns) == 2)

    run(test)


def test_no_more_services_than_allowed_are_worked_on_at_a_time() -> None:
    async def test(made: Wakes, turns: list[Key], may_end: asyncio.Event) -> None:
        may_end.clear()
        for index in range(wakes.WIDTH + 3):
            made.wake(("llm", str(index)), 0)
        await until(lambda: len(turns) == wakes.WIDTH)
        await asyncio.sleep(0)
        assert (len(turns), made.num_waiting) == (wakes.WIDTH, 3)
        may_end.set()
        await until(lambda: len(turns) == wakes.WIDTH + 3)

    run(test)


def test_a_service_that_is_forgotten_gets_no_turn() -> None:
    async def test(made: Wakes, turns: list[Key], _: asyncio.Event) -> None:
        made.wake(A, 0.02)
        made.forget(A)
        made.wake(B, 0.04)
        await until(lambda: bool(turns))
        assert turns == [B]

    run(test)


def test_turns_under_way_are_waited_for_at_the_end() -> None:
    async def main() -> None:
        begun, ended = asyncio.Event(), []

        async def work(key: Key) -> None:
            begun.set()
            await asyncio.sleep(0.05)
            ended.append(key)

        made = Wakes(work)
        task = asyncio.create_task(made.run())
        made.wake(A, 0)
        await begun.wait()
        assert made.longest_s >= 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended == [A]

    asyncio.run(main())


def test_an_end_that_comes_together_with_a_wake_is_an_end() -> None:
    async def main() -> None:
        async def work(key: Key) -> None:
            pass

        for num_steps in range(8):
            made = Wakes(work)
            made.wake(B, 7200)
            task = asyncio.create_task(made.run())
            for _ in range(3):
                await asyncio.sleep(0)
            made.wake(A, 3600)
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled(), num_steps

    asyncio.run(main())


def test_an_end_that_comes_together_with_the_stop_is_an_end() -> None:
    async def main() -> None:
        for num_steps in range(8):
            stop = asyncio.Event()
            task = asyncio.create_task(pause(3600, stop))
            for _ in range(3):
                await asyncio.sleep(0)
            stop.set()
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.cancelled() or task.result(), num_steps

    asyncio.run(main())
