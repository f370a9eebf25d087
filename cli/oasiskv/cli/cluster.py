"""Staging, prefill and decode as child processes: started together, watched, stopped in order."""

import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, Self

from oasiskv.cli.log import ServiceLog
from oasiskv.cli.server import STOP_TIMEOUT_S, Server, Show
from oasiskv.cli.services_file import REDIS, ROLES, Process
from oasiskv.core.errors import EngineFailedError, TransferTimeoutError

POLL_S = 0.2
READY_TIMEOUT_S = 1800.0
"""Longest time until all are ready; loading a large model takes a while."""


class Cluster:
    """The processes; a context manager that stops them: decode first, which drains, then prefill, at last staging.

    Args:
        processes: In the order in which they are started.
        environment: Of the children.
        show: Receives the lines that a person may want to see.
        is_verbose: Show every line as it is.
        least_level: Of the lines that are shown of a service that listens.
        command: Returns what to run for a role and its file.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        environment: Mapping[str, str],
        show: Show,
        *,
        is_verbose: bool = False,
        least_level: str = "INFO",
        command: "Callable[[str, Path], list[str]] | None" = None,
    ) -> None:
        """Prepare; nothing is started."""
        self._processes = sorted(processes, key=lambda process: ROLES.index(process.role))
        self._environment = dict(environment)
        self._show = show
        self._is_verbose = is_verbose
        self._least_level = least_level
        self._command = command or service_command
        self._width = max(len(process.name) for process in processes)
        self._servers: dict[str, Server] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        """Start all of them."""
        with ExitStack() as resources:
            folder = Path(resources.enter_context(TemporaryDirectory(prefix="oasiskv-")))
            for process in self._processes:
                path = folder / f"{process.name}.toml"
                path.write_text(process.config)
                server = Server(
                    self._command(process.role, path),
                    self._environment,
                    self._prefixed(process.name),
                    is_verbose=self._is_verbose,
                    log=ServiceLog(self._least_level),
                    stop_timeout_s=process.drain_s + STOP_TIMEOUT_S,
                )
                self._servers[process.name] = resources.enter_context(server)
                role = [one.name for one in self._processes if one.role == process.role]
                if process.name == role[-1]:
                    # Called before any of them is waited for, so that those of a role drain at the same time.
                    resources.callback(self._ask_to_stop, role)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._resources.close()

    @property
    def pids(self) -> dict[str, int]:
        """Of the children, which are also the ids of their sessions, by name."""
        return {name: server.pid for name, server in self._servers.items()}

    @property
    def decodes(self) -> list[Process]:
        """The processes that answer clients."""
        return [process for process in self._processes if process.role == "decode"]

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until all listen, and every decode service says that KV comes through.

        Raises:
            EngineFailedError: one ended before.
            TransferTimeoutError: they do neither.
        """
        end, waited_for = time.monotonic() + timeout_s, ""
        waiting = self.decodes
        while waiting:
            self.check()
            still = []
            are_listening = all(server.is_listening for name, server in self._servers.items() if name != "directory")
            for process in waiting:
                reasons = unready(process.metrics_port) if are_listening else [""]
                if reasons:
                    still.append(process)
                if reasons and reasons[0] and reasons[0] != waited_for:
                    waited_for = reasons[0]
                    self._prefixed(process.name)(f"waits for {waited_for}")
            waiting = still
            if time.monotonic() > end:
                raise TransferTimeoutError(f"{waiting[0].name}: expected it to be ready in {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def wait(self) -> NoReturn:
        """Wait until one ends by itself, which none ever should.

        Raises:
            EngineFailedError: one did.
        """
        while True:
            self.check()
            time.sleep(POLL_S)

    def check(self) -> None:
        """Check that all of them run.

        Raises:
            EngineFailedError: one does not; the message begins with its name.
        """
        for name, server in self._servers.items():
            try:
                server.check()
            except EngineFailedError as error:
                raise EngineFailedError(f"{name} ended: {error}") from error

    def _ask_to_stop(self, names: Sequence[str]) -> None:
        for name in names:
            self._servers[name].ask_to_stop()

    def _prefixed(self, name: str) -> Show:
        return lambda line: self._show(f"{name:{self._width}} | {line}")


def service_command(role: str, path: Path) -> list[str]:
    """Return what starts a service."""
    if role == "directory":
        return [REDIS, str(path)]
    return [sys.executable, "-m", f"oasiskv.services.{role}", "--config", str(path)]


def unready(port: int) -> list[str]:
    """Return why the service whose probes are at a port of loopback is not ready; nothing if it is."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            facts = json.loads(answer.read())
            return [] if answer.status == 200 else [str(reason) for reason in facts["reasons"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return [f"its probes: {error}"]


def child_environment(chosen: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the environment of services on one machine: a model that is here is asked of nobody else."""
    offline = {"HF_HUB_OFFLINE": "1"} if os.path.isdir(model) else {}
    return {"VLLM_HOST_IP": "127.0.0.1", **chosen, **offline, "PYTHONUNBUFFERED": "1"}
