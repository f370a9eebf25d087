"""How a coroutine waits for what a session does, without losing what it took when the wait is cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def wait_or_undo(future: "Future[Result]", undo: Callable[[Result], object]) -> Result:
    """Return the result of a future; if this is cancelled, the result is undone when it comes.

    Args:
        future: It goes on when this is cancelled.
        undo: Gives the result up; called in the thread that made it.
    """
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:

        def give_up(done: "Future[Result]") -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        future.add_done_callback(give_up)
        raise
