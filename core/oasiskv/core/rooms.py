"""Host blocks for what requests fetch from staging: fewer than for all their KV, and taken back when others need them.

A request's room is a number of host blocks. What lies in them is a copy that can be fetched again, so a request goes on
with any room, also with none.
"""

from collections.abc import Set
from dataclasses import dataclass

from oasiskv.core.errors import PoolExhaustedError
from oasiskv.core.host_blocks import HostBlockManager

LEAST_SPARE = 8
"""Host blocks that a room has at least beyond what was fetched, where there are enough."""


@dataclass(slots=True)
class _Room:
    most: int
    """Blocks that there are to fetch."""
    first: int
    """Blocks that it begins with."""
    wanted: int = 0
    """Most blocks that a layer fetched so far."""
    told: int = 0
    """Host blocks that the workers know of."""
    kept: int = 0
    """Of these, as many as were never taken back."""
    is_open: bool = False
    """Whether the workers know of the request."""


class Rooms:
    """Owner of all rooms on the scheduler's side.

    Args:
        host: Gives the host blocks.
        first_blocks: Blocks that a room begins with; None for all that there are to fetch.
        spare_blocks: Blocks beyond what was fetched that a room is given.
    """

    def __init__(self, host: HostBlockManager, first_blocks: int | None, spare_blocks: int) -> None:
        """Start without rooms."""
        self._host = host
        self._first_blocks = first_blocks
        self._spare_blocks = max(LEAST_SPARE, spare_blocks)
        self._rooms: dict[str, _Room] = {}

    def __contains__(self, request_id: str) -> bool:
        """Say whether a request has a room."""
        return request_id in self._rooms

    def num_first(self, most: int) -> int:
        """Return the host blocks that a request with so many blocks to fetch begins with."""
        return most if self._first_blocks is None else min(most, self._first_blocks)

    @property
    def num_unfetched(self) -> int:
        """Host blocks that all KV of the requests with rooms would take beyond what they have."""
        return sum(room.most - len(self._host.table(_owner(name))) for name, room in self._rooms.items())

    def num_held(self, request_id: str) -> int:
        """Return the host blocks of a request's room."""
        return len(self._host.table(_owner(request_id)))

    def can_yield(self, num_blocks: int, *, to_new: bool) -> bool:
        """Say whether `make_free` with the same arguments would succeed."""
        yields = sum(self._num_yielded(name, to_new=to_new) for name in self._rooms)
        return num_blocks <= self._host.num_free + yields

    def make_free(self, num_blocks: int, *, to_new: bool) -> None:
        """Take back host blocks, from the largest rooms first, until so many are free.

        Args:
            num_blocks: How many.
            to_new: Whether they are for a request that begins: others then keep what they began with.

        Raises:
            PoolExhaustedError: There are too few; none is taken back.
        """
        if not self.can_yield(num_blocks, to_new=to_new):
            free = self._host.num_free
            raise PoolExhaustedError(f"num_blocks: expected at most {free} more host blocks, got {num_blocks}")
        while (missing := num_blocks - self._host.num_free) > 0:
            name = max(self._rooms, key=lambda name: (self._num_yielded(name, to_new=to_new), name))
            num_left = self.num_held(name) - min(missing, self._num_yielded(name, to_new=to_new))
            self._host.truncate(_owner(name), num_left)
            self._rooms[name].kept = min(self._rooms[name].kept, num_left)

    def open(self, request_id: str, most: int) -> None:
        """Give a request that begins its first room; `make_free` was called for as many blocks."""
        self._rooms[request_id] = _Room(most=most, first=self.num_first(most))
        self._host.extend(_owner(request_id), self.num_first(most))

    def note_wanted(self, request_id: str, wanted: int) -> None:
        """Note the most blocks that a layer of a request fetched so far; one that has left is unknown."""
        if (room := self._rooms.get(request_id)) is not None:
            room.wanted = max(room.wanted, wanted)

    def close(self, request_id: str) -> None:
        """Give a request's room back; it may have none."""
        if self._rooms.pop(request_id, None) is not None:
            self._host.release(_owner(request_id))

    def take_changes(self, admitted: Set[str]) -> dict[str, tuple[int | None, list[int]]]:
        """Let rooms grow, and return what workers must be told: host blocks that stay, None for all, and new ones.

        Args:
            admitted: Requests that the workers are told of in the same step.
        """
        changes: dict[str, tuple[int | None, list[int]]] = {}
        for request_id, room in self._rooms.items():
            room.is_open |= request_id in admitted
            if not room.is_open:
                continue
            owner = _owner(request_id)
            wanted = min(room.most, max(room.first, room.wanted + self._spare_blocks))
            num_held = self.num_held(request_id)
            self._host.extend(owner, min(wanted, num_held + self._host.num_free))
            table = self._host.table(owner)
            if room.kept < room.told or len(table) > room.told:
                num_kept = room.kept if room.kept < room.told else None
                changes[request_id] = (num_kept, list(table[room.kept :]))
                room.told = room.kept = len(table)
        return changes

    def _num_yielded(self, request_id: str, *, to_new: bool) -> int:
        least = self._rooms[request_id].first if to_new else 0
        return max(0, self.num_held(request_id) - least)


def _owner(request_id: str) -> str:
    """Return the name under which the host blocks of a request's room are held."""
    return f"room of {request_id}"
