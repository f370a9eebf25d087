"""In which order blocks make room that nobody references: those of a single use before those that were asked for again.

A scan, many long prompts that come once, then passes through without taking the place of prefixes that are shared.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class EvictionOrder(Generic[ItemT]):
    """Two queues, each in the order in which their items came last; the first of both goes when the other is empty.

    An item that was used once is in the first queue, one that was used again in the second. The second has a bound: its
    oldest item goes to the end of the first, where it is the last to go and no longer counts as used again. So what was
    shared once and is asked for no more goes too. Every operation costs O(1).
    """

    def __init__(self, max_again: int) -> None:
        """Start empty.

        Args:
            max_again: Most items of the second queue; 0 for one queue, the least recently used first.
        """
        self._max_again = max_again
        # OrderedDict pops its first entry in O(1), a plain dict scans old gaps.
        self._once: OrderedDict[ItemT, None] = OrderedDict()
        self._again: OrderedDict[ItemT, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, item: object) -> bool:
        return item in self._once or item in self._again

    def __iter__(self) -> Iterator[ItemT]:
        """Go through all items, the next to be evicted first."""
        yield from self._once
        yield from self._again

    def add(self, item: ItemT, *, is_again: bool) -> None:
        """Put an item, new or not, at the end of a queue.

        Args:
            item: It.
            is_again: Whether it was used more than once, or since it was last in here.
        """
        self.discard(item)
        (self._again if is_again else self._once)[item] = None
        if len(self._again) > self._max_again:
            oldest, _ = self._again.popitem(last=False)
            self._once[oldest] = None

    def discard(self, item: ItemT) -> None:
        """Take an item out; one that is not in here is passed over."""
        self._once.pop(item, None)
        self._again.pop(item, None)

    def pop(self) -> ItemT:
        """Take out the item that is to go next; there must be one."""
        item, _ = (self._once or self._again).popitem(last=False)
        return item

    def check_invariants(self) -> None:
        """Assert what always holds; costs O(items)."""
        assert self._once.keys().isdisjoint(self._again), "an item is in both queues"
        assert len(self._again) <= self._max_again, "the second queue is beyond its bound"
