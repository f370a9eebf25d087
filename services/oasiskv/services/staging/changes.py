"""Which blocks became findable and ceased to be, in order, for watchers that keep an index elsewhere."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass

MAX_KEYS_PER_MESSAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a watcher applies next."""

    sequence: int
    """Number of the last event in it; 0 within a snapshot that goes on."""

    is_snapshot_start: bool = False
    sealed_keys: tuple[bytes, ...] = ()
    removed_keys: tuple[bytes, ...] = ()


class ChangeLog:
    """The latest events and the set of keys that they lead to; a watcher too far behind starts over from the set.

    So a slow watcher costs no memory, whatever it does.
    """

    def __init__(self, max_events: int = 65536) -> None:
        """Start empty; at most `max_events` are kept."""
        self._keys: dict[bytes, None] = {}
        self._events: deque[tuple[bytes, bool]] = deque(maxlen=max_events)
        self._sequence = 0
        self._changed = asyncio.Event()
        self.num_sealed = 0
        self.num_removed = 0

    @property
    def num_keys(self) -> int:
        """Keys that can be found now."""
        return len(self._keys)

    def add(self, block_key: bytes, is_held: bool) -> None:
        """Record that a key can be found from now on, or cannot any more."""
        if is_held:
            self._keys[block_key] = None
            self.num_sealed += 1
        else:
            del self._keys[block_key]
            self.num_removed += 1
        self._events.append((block_key, is_held))
        self._sequence += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, sequence: int) -> None:
        """Return when there are events after `sequence`."""
        if sequence == self._sequence:
            await self._changed.wait()

    def after(self, sequence: int | None) -> list[Change]:
        """Return what leads from the state after event `sequence`, None for no state, to the state of now."""
        is_known = sequence is not None and self._sequence - len(self._events) <= sequence <= self._sequence
        if not is_known or sequence is None:
            return self._snapshot()
        oldest = self._sequence - len(self._events)
        new = list(itertools.islice(self._events, sequence - oldest, None))
        found = []
        for start in range(0, len(new), MAX_KEYS_PER_MESSAGE):
            events = new[start : start + MAX_KEYS_PER_MESSAGE]
            latest = dict(events)  # of a key's events the last one counts
            found.append(
                Change(
                    sequence=sequence + start + len(events),
                    sealed_keys=tuple(key for key, is_held in latest.items() if is_held),
                    removed_keys=tuple(key for key, is_held in latest.items() if not is_held),
                )
            )
        return found

    def _snapshot(self) -> list[Change]:
        keys = list(self._keys)
        parts = [tuple(keys[i : i + MAX_KEYS_PER_MESSAGE]) for i in range(0, len(keys), MAX_KEYS_PER_MESSAGE)] or [()]
        last = len(parts) - 1
        return [
            Change(sequence=self._sequence if i == last else 0, is_snapshot_start=i == 0, sealed_keys=part)
            for i, part in enumerate(parts)
        ]
