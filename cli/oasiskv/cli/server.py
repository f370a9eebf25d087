"""A vLLM server as a child process: started, watched, its log made short, stopped with all of its processes.

The child and everything it starts live in a session of their own, so that ctrl-C reaches this process alone and no
process outlives it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn, Protocol, Self

from oasiskv.cli.log import LogReader
from oasiskv.core.errors import EngineFailedError, TransferTimeoutError
from oasiskv.engine.vllm.api_server import kill_group

Show = Callable[[str], None]

STOP_TIMEOUT_S = 20.0
"""Time that vLLM gets to stop its processes before they are killed."""

STARTING_STOP_TIMEOUT_S = 3.0
"""The same before it takes requests: nothing is under way then, and vLLM may not listen while it loads."""

GONE_TIMEOUT_S = 5.0
"""Time that the children of a server have to notice that it ended."""

LISTEN_TIMEOUT_S = 30.0
"""Longest time between a server's word that it is ready and its first connection."""

KEPT_LINES = 40
"""Last lines of the log that are shown when the server dies without a word that names the cause."""


class Log(Protocol):
    """Reads the log of a process; see `LogReader`."""

    is_ready: threading.Event
    """Set once the process takes requests."""

    @property
    def cause(self) -> str | None:
        """Why it failed, in one line."""

    def read(self, line: str) -> str | None:
        """Take a line; return what to show of it, None for nothing."""


class Server:
    """One server; a context manager that stops it.

    Args:
        command: The program and its arguments.
        environment: Of the child.
        show: Receives the lines of the log that a person may want to see.
        is_verbose: Show every line as it is.
        least_level: Of the lines that are shown once the server is ready.
        address: Host and port where it will listen; None where they are not known.
        log: Reads its log; one for vLLM's server if none is given.
        stop_timeout_s: Time that it gets to end before it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        show: Show,
        *,
        is_verbose: bool = False,
        least_level: str = "INFO",
        address: tuple[str, int] | None = None,
        log: Log | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Prepare; nothing is started."""
        self._command = list(command)
        self._environment = dict(environment)
        self._show = show
        self._is_verbose = is_verbose
        self._is_quiet = False
        self._is_asked = False
        self._address = address
        self._log: Log = log or LogReader(least_level)
        self._stop_timeout_s = stop_timeout_s
        self._is_listening = threading.Event()
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="vllm-log", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def pid(self) -> int:
        """Of the child, which is also the id of its session."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, timeout_s: float = 1800.0) -> None:
        """Wait until it takes requests.

        Raises:
            EngineFailedError: it ended before.
            TransferTimeoutError: it does neither.
        """
        end = time.monotonic() + timeout_s
        while not self._is_listening.wait(0.2):
            self.check()
            if time.monotonic() > end:
                raise TransferTimeoutError(f"server: expected it to be ready in {timeout_s:.0f} s; see --verbose")

    @property
    def is_listening(self) -> bool:
        """Whether it takes requests."""
        return self._is_listening.is_set()

    def check(self) -> None:
        """Check that it runs.

        Raises:
            EngineFailedError: it does not.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise self._failure(self._process.returncode)

    def wait(self) -> NoReturn:
        """Wait until it ends by itself, which a server never should.

        Raises:
            EngineFailedError: it did. vLLM ends with exit code 0 when its engine was killed.
        """
        assert self._process is not None
        raise self._failure(self._process.wait())

    def ask_to_stop(self) -> None:
        """Tell it once to end, and do not wait; `stop` does."""
        if self._process is None or self._is_asked:
            return
        # How vLLM shuts down is of no interest, and the reason to stop was told before.
        self._is_quiet = not self._is_verbose
        self._is_asked = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End every process of it: politely, then at once; safe to call again."""
        process = self._process
        if process is None:
            return
        self.ask_to_stop()
        longest_s = self._stop_timeout_s if self.is_listening else min(self._stop_timeout_s, STARTING_STOP_TIMEOUT_S)
        if process.poll() is None:
            # A second ctrl-C means "at once".
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(longest_s)
        if process.poll() is None:
            # Alone at first: who keeps account of its shared memory gives that back once it is gone.
            process.kill()
            process.wait()
        if not _wait_gone(process, min(longest_s, GONE_TIMEOUT_S)):
            kill_group(process.pid)
        if not _wait_gone(process, GONE_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _wait_gone(process, GONE_TIMEOUT_S)
        if self._reader is not None:
            self._reader.join(5.0)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.rstrip("\n")
            self._tail.append(line)
            shown = self._log.read(line)
            if self._log.is_ready.is_set() and not self._is_listening.is_set():
                self._wait_listening(process)
            if self._is_verbose:
                self._show(line)
            elif shown is not None and not self._is_quiet:
                self._show(shown)
            if self._log.is_ready.is_set():
                self._is_listening.set()

    def _wait_listening(self, process: "subprocess.Popen[str]") -> None:
        """Wait until a connection is taken: the server says that it is ready a little before it listens."""
        end = time.monotonic() + LISTEN_TIMEOUT_S
        while self._address is not None and process.poll() is None and time.monotonic() < end:
            try:
                socket.create_connection(self._address, timeout=1.0).close()
                break
            except OSError:
                time.sleep(0.05)

    def _failure(self, code: int) -> EngineFailedError:
        assert self._reader is not None
        self._reader.join(5.0)
        if self._log.cause is not None:
            return EngineFailedError(self._log.cause)
        tail = "\n".join(self._tail)
        return EngineFailedError(f"the server ended with exit code {code}; its last words:\n{tail}")


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into `SystemExit`, so that what a `with` started is stopped by it."""

    def leave(signum: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_gone(process: "subprocess.Popen[str]", timeout_s: float) -> bool:
    """Say whether every process of the child's group is gone in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
