"""What a lease table remembers of a lease and of a peer."""

from dataclasses import dataclass, field
from enum import Enum


class LeaseState(Enum):
    """What holds the blocks of a lease."""

    ACTIVE = "active"
    OFFERED = "offered"
    """In a handle, for whoever accepts it."""

    FENCED = "fenced"
    """Ended by time, but its writer may still write."""


@dataclass(slots=True)
class LeaseRecord:
    """A lease that has not ended, or is fenced."""

    lease_id: str
    peer_id: str | None
    is_write: bool
    deadline_s: float
    state: LeaseState = LeaseState.ACTIVE
    handle: str | None = None


@dataclass(slots=True)
class PeerRecord:
    """A peer that is known."""

    may_map_to_write: bool
    deadline_s: float
    num_links: int = 0
    num_blocks: int = 0
    lease_ids: set[str] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing, and no process of it uses the memory."""
        return not self.lease_ids and not self.num_links
