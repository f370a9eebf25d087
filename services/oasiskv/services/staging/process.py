"""Starts the staging service as a process of its own, for tests and measurements."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from oasiskv.core.errors import PeerUnavailableError
from oasiskv.core.fingerprint import Fingerprint


class StagingProcess:
    """A service on a free port of this host; ended by `stop`, or at the end of a `with` block by SIGKILL."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        num_blocks: int,
        *,
        staging: Mapping[str, Any] | None = None,
        leases: Mapping[str, Any] | None = None,
        disk: Mapping[str, Any] | None = None,
        tls: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        address: str = "127.0.0.1:0",
        prefix: Sequence[str] = (),
    ) -> None:
        """Start, and return when it answers.

        Args:
            folder: For its configuration, its log and its memory socket.
            fingerprint: What it holds.
            num_blocks: How much.
            staging: Further settings of the table `staging`.
            leases: Settings of the table `leases`.
            disk: Settings of the table `disk`; None for no disk tier.
            tls: Settings of the table `tls`; None to speak in the clear.
            env: Variables to set beside those of this process.
            address: Where it listens; that of an earlier process to take its place.
            prefix: Command that starts it, such as one that enters a network namespace.

        Raises:
            PeerUnavailableError: It did not start; the message is the end of its log.
        """
        settings = {"pool_bytes": num_blocks * fingerprint.block_bytes, "memory_socket": str(folder / "memory.sock")}
        tables: dict[str, Mapping[str, Any]] = {
            "staging": settings | dict(staging or {}),
            "fingerprint": asdict(fingerprint),
            "leases": leases or {},
            "server": {"address": address},
        }
        tables |= {name: values for name, values in (("disk", disk), ("tls", tls)) if values is not None}
        path = folder / "staging.toml"
        # A value in JSON is one in TOML too, where it is a text, a number or a truth value.
        lines = [
            line
            for name, values in tables.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))
        ]
        path.write_text("\n".join(lines) + "\n")
        self.log = folder / "staging.log"
        command = [*prefix, sys.executable, "-m", "oasiskv.services.staging", "--config", str(path)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(env or {})}
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "listens on port" not in line:
            self.stop(signal.SIGKILL)
            raise PeerUnavailableError(f"the staging service did not start: {self.log.read_text()[-2000:]}")
        self.address = f"{address.rpartition(':')[0]}:{line.split()[-1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def agent_pid(self) -> int:
        """Return the process id of its agent for one-sided transfers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])
