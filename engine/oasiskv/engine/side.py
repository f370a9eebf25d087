"""Work beside the engine's thread: in threads of its own and, on a GPU, on streams of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


class Inline(Executor):
    """Runs what it is given at once, in the caller's thread: for tests."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run it."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class Side:
    """A thread that carries out what it is given, in order, on a stream that is not the engine's.

    Args:
        device: Where the engine computes.
        name: Of the thread.
        executor: What carries it out; None for a thread.
    """

    def __init__(self, device: torch.device, name: str, executor: Executor | None = None) -> None:
        """Make the stream; the thread starts with the first work."""
        self._device = device
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return a mark behind everything that the current stream has to do so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def submit(self, mark: Any, work: Callable[[], None]) -> None:
        """Have work done once a mark is reached; None is reached at once."""
        self._executor.submit(self._run, mark, work)

    def _run(self, mark: Any, work: Callable[[], None]) -> None:
        with self._on_stream(), torch.inference_mode():
            if mark is not None:
                mark.synchronize()
            work()

    def synchronize(self) -> None:
        """Wait for what was put on the stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """End the thread; what it was given is carried out."""
        self._executor.shutdown()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
