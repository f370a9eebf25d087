"""The one event loop of a process that makes calls for threads without one."""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:  # two threads would start two
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    # One for all, and never closed: gRPC hands the events of all loops of a process to any of them, and would fail
    # for the living ones when one is gone.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="oasiskv-calls", daemon=True).start()
    return loop


def submit(work: Coroutine[Any, Any, Result]) -> "Future[Result]":
    """Carry out a coroutine, beside those of others."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def wait(work: Coroutine[Any, Any, Result]) -> Result:
    """Carry out a coroutine and return its result; never from within another one."""
    return submit(work).result()
