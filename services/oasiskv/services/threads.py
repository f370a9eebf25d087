"""Work in threads that uses what its caller holds."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ContextThreads(ThreadPoolExecutor):
    """Threads that work in the context of who asked for it, so that what they call is traced below that."""

    def submit(
        self, work: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Run a call in a thread, in a copy of the context of now."""
        context = contextvars.copy_context()
        return super().submit(lambda: context.run(work, *args, **kwargs))


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
