"""Work in threads that uses what its caller holds."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], threads: Executor | None = None) -> Result:
    """Run in a thread; if cancelled, raise only when the thread is over: it uses blocks that must be held till then.

    Args:
        work: What to run.
        threads: Which threads; None for those of the event loop.
    """
    task = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(task)
    finally:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
