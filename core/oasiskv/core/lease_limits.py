"""How many peers and leases a pool allows, how long a lease lasts, and what is counted of them."""

from dataclasses import dataclass, fields

from oasiskv.core.errors import ConfigError, InvalidRequestError

MAX_KEY_BYTES = 256
"""Longest block key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Limits on peers and their leases."""

    num_blocks: int
    """Capacity of the pool, in host blocks."""

    max_blocks_per_peer: int
    """Most blocks that the leases of a peer reference together; a block counts once per lease and place in it."""

    max_leases_per_peer: int = 4096
    """Most leases and handles of a peer; bounds what a peer that never releases can make the owner remember."""

    max_peers: int = 256
    """Most peers at a time."""

    max_ttl_s: float = 60.0
    """Longest lease without renewal, in seconds: what a peer that died keeps from others at most."""

    peer_ttl_s: float = 300.0
    """A peer is forgotten after this many seconds without a call; at least `max_ttl_s`."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: expected a positive number, got {value!r}")
        if self.peer_ttl_s < self.max_ttl_s:
            raise ConfigError(f"peer_ttl_s: expected at least max_ttl_s, {self.max_ttl_s}, got {self.peer_ttl_s}")

    def granted_ttl(self, ttl_s: float) -> float:
        """Return the time that a lease gets which asks for `ttl_s`, in seconds.

        Raises:
            InvalidRequestError: It is not positive.
        """
        if not ttl_s > 0:
            raise InvalidRequestError(f"ttl_ms: expected a positive time, got {ttl_s * 1000:.0f}")
        return min(ttl_s, self.max_ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCounts:
    """What a lease table holds at this moment."""

    num_peers: int
    num_leases: int
    """Leases and handles that have not ended."""

    num_fenced_blocks: int
    """Blocks of write leases that ended by time while their writer may still write."""

    num_links: int
    """Processes of peers that use the memory themselves."""

    num_expired_total: int
    """Leases and handles that ended by time, since the start."""
