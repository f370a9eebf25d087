"""Two network namespaces with a link of a given rate between them, by `ip` and `tc`; needs root and both programs."""

import contextlib
import os
import subprocess
from types import TracebackType
from typing import Self

from oasiskv.core.errors import UnsupportedError

BURST_MS = 2
"""What may pass at once, as time at the link's rate: far less than any transfer that is measured."""

LEAST_BURST_BYTES = 128 * 1024
"""A packet that the kernel joined has up to 64 KiB, and one that is larger than the burst never passes."""


class ShapedLink:
    """The link; a context manager that removes it.

    Args:
        bits_per_s: Rate of each direction.
    """

    def __init__(self, bits_per_s: float) -> None:
        """Choose names; nothing is there before the `with`."""
        self.bits_per_s = bits_per_s
        self._names = [f"oasiskv-{os.getpid()}-{end}" for end in ("a", "b")]
        self._devices = [f"okv{os.getpid()}{end}" for end in ("a", "b")]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        """Of the ends; nobody outside of the namespaces sees them."""

    def __enter__(self) -> Self:
        """Make namespaces and link.

        Raises:
            UnsupportedError: The machine does not allow it; nothing stays.
        """
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            here, there = self._devices
            _run("ip", "link", "add", here, "netns", self._names[0], "type", "veth", "peer", "name", there,
                 "netns", self._names[1])  # fmt: skip
            for end in range(2):
                self._set_up(end)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove everything; processes that still run in a namespace keep it until they end."""
        self._remove()

    def prefix(self, end: int) -> list[str]:
        """Return the command that starts another one at an end, 0 or 1."""
        return ["ip", "netns", "exec", self._names[end]]

    def _set_up(self, end: int) -> None:
        burst = max(LEAST_BURST_BYTES, round(self.bits_per_s / 8 * BURST_MS / 1000))
        inside = self.prefix(end)
        device = self._devices[end]
        _run(*inside, "ip", "addr", "add", f"{self.addresses[end]}/30", "dev", device)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", device, "up")
        rate = f"{round(self.bits_per_s)}bit"
        shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
        _run(*inside, "tc", "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(UnsupportedError):
                _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise UnsupportedError(f"link: expected `{command[0]}` to work here, got {cause}") from cause
    if done.returncode != 0:
        said = done.stderr.strip().partition("\n")[0] or f"exit code {done.returncode}"
        raise UnsupportedError(f"link: expected `{' '.join(command)}` to work here, got {said}")
