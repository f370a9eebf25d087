"""What a staging service is told at its start; the tables of its file are read by `__main__`."""

from collections.abc import Sequence
from dataclasses import dataclass

from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.services.staging.directory import DirectoryConfig
from oasiskv.services.staging.disk_file import DiskConfig
from oasiskv.services.staging.fabric import TRANSPORTS
from oasiskv.services.staging.keys import TENANTS
from oasiskv.services.staging.memory import HUGE_PAGES

LOCALITIES = ("auto", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingConfig:
    """What a staging service holds, and for whom."""

    fingerprint: Fingerprint
    """What the bytes of all its blocks mean."""

    leases: LeaseConfig
    """Capacity and limits."""

    is_strict: bool = False
    """Whether peers move bytes through streams only, so that each reads no more than it holds a lease on."""

    memory_socket: str = ""
    """Path of the unix socket that hands over the memory; empty in strict mode only."""

    transport: str = "auto"
    """What one-sided transfers go over: rdma, tcp, shm (one host), none, or auto for what this host has."""

    locality: str = "auto"
    """`remote` to treat peers on this host as those on others: no memory is handed over and none is shared."""

    huge_pages: str = "auto"
    """`never` for small pages, auto for huge ones where the kernel has enough set aside, 2MiB or 1GiB for no others."""

    successor: str = ""
    """`host:port` of the staging service that gets what is in memory when this one ends; empty for none."""

    tenants: str = "one"
    """`certificate` to keep the keys of peers with different names in their certificates apart; strict mode only."""

    drained_by: Sequence[str] = ()
    """Common names of the certificates whose holders may call Drain; none for whoever calls from this host."""

    disk: DiskConfig | None = None
    """The SSD tier; None to hold blocks in memory only."""

    directory: DirectoryConfig | None = None
    """Where other staging services are known; None to know of this one only."""

    def __post_init__(self) -> None:
        """Check the fields together.

        Raises:
            ConfigError: Strict mode and the memory socket exclude or require each other, or a word is unknown.
        """
        if self.is_strict == bool(self.memory_socket):
            raise ConfigError("memory_socket: expected a path, or strict mode without one")
        for name, words in (
            ("transport", TRANSPORTS),
            ("locality", LOCALITIES),
            ("huge_pages", HUGE_PAGES),
            ("tenants", TENANTS),
        ):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {getattr(self, name)!r}")
        if not isinstance(self.successor, str) or (self.successor and ":" not in self.successor):
            raise ConfigError(f"successor: expected host:port, got {self.successor!r}")
        if self.tenants != "one" and (not self.is_strict or self.successor):
            raise ConfigError("tenants: expected strict mode without a successor, since both would mix tenants")
        if not isinstance(self.drained_by, Sequence) or not all(
            isinstance(name, str) and name for name in self.drained_by
        ):
            raise ConfigError(f"drained_by: expected a list of common names, got {self.drained_by!r}")
        if self.is_strict and self.transport not in ("auto", "none"):
            raise ConfigError(f"transport: expected none in strict mode, got {self.transport!r}")
        if self.locality == "remote" and self.transport == "shm":
            raise ConfigError("transport: expected another than shm, since locality is remote")

    @property
    def hands_memory_over(self) -> bool:
        """Whether peers on this host map the pool."""
        return not self.is_strict and self.locality != "remote"
