import asyncio
from concurrent.futures import Future

import pytest

from oasiskv.services.clients.waiting import wait_or_undo


def test_a_result_comes_as_it_is_and_an_error_is_raised() -> None:
    async def check() -> None:
        undone: list[int] = []
        good: Future[int] = Future()
        good.set_result(7)
        assert await wait_or_undo(good, undone.append) == 7
        bad: Future[int] = Future()
        bad.set_exception(ValueError("x"))
        with pytest.raises(ValueError, match="x"):
            await wait_or_undo(bad, undone.append)
        assert undone == []

    asyncio.run(check())


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_after_a_cancelled_wait_is_undone(fails: bool) -> None:
    async def check() -> None:
        undone: list[int] = []
        future: Future[int] = Future()
        task = asyncio.create_task(wait_or_undo(future, undone.append))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undone == []
        if fails:
            future.set_exception(OSError())
        else:
            future.set_result(7)
        assert undone == ([] if fails else [7])
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    asyncio.run(check())
