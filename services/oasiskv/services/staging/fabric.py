"""Chooses what one-sided transfers go over, by what this host has, and says why."""

from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
TRANSPORTS = ("auto", "rdma", "tcp", "shm", "none")
# Of RDMA devices all that UCX can drive; TCP is for ends that have none, and on one host for the messages that tell of
# the other end's death, which shared memory cannot.
UCX_TLS = {"infiniband": "rc,dc,ud,tcp", "roce": "rc,dc,ud,tcp", "tcp": "tcp", "shm": "shm,tcp,self", "none": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What one-sided transfers go over."""

    name: str
    """infiniband, roce, tcp, shm (one host only), or none."""

    reason: str
    """Why, for the log and for `Stats`."""

    @property
    def ucx_tls(self) -> str:
        """What UCX is allowed to use."""
        return UCX_TLS[self.name]


def choose(setting: str, *, is_strict: bool = False, has_tls: bool = False, infiniband: Path = INFINIBAND) -> Transport:
    """Return the transport for a setting, one of `TRANSPORTS`.

    Args:
        setting: What the configuration says.
        is_strict: Whether all bytes go through streams.
        has_tls: Whether calls are encrypted and their callers known, which one-sided transfers are not.
        infiniband: Where the kernel lists RDMA devices.
    """
    if is_strict:
        return Transport(name="none", reason="the service is strict")
    if setting == "none":
        return Transport(name="none", reason="the configuration says none")
    if setting in ("tcp", "shm"):
        return Transport(name=setting, reason=f"the configuration says {setting}")
    if has_tls and setting == "auto":
        reason = "calls use TLS, and one-sided transfers neither encrypt nor know who calls; name one to accept that"
        return Transport(name="none", reason=reason)
    port = _active_port(infiniband)
    if port is not None:
        name = "infiniband" if (port / "link_layer").read_text().strip() == "InfiniBand" else "roce"
        return Transport(name=name, reason=f"port {port.name} of {port.parent.parent.name} is active")
    if setting == "rdma":
        return Transport(name="none", reason=f"the configuration says rdma, but no port in {infiniband} is active")
    return Transport(name="tcp", reason=f"no RDMA port in {infiniband} is active")


def _active_port(infiniband: Path) -> Path | None:
    for state in sorted(infiniband.glob("*/ports/*/state")):
        if "ACTIVE" in state.read_text():
            return state.parent
    return None
