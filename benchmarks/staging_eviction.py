"""Compare what a staging service evicts with LRU and ARC: the share of blocks that are found, of made-up requests.

python benchmarks/staging_eviction.py

ARC (Megiddo and Modha, 2003) finds by itself how much of its room is for what was used again; `core.eviction` gives
that half at most. A block is looked for when a request comes and counts as released at once, the tail of a prompt
first.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from oasiskv.core.eviction import EvictionOrder

Block = tuple[str, int, int]
NUM_REQUESTS = 6000


class Policy(Protocol):
    """A cache of blocks."""

    def use(self, block: Block) -> bool:
        """Look a block up and keep it; return whether it was there."""


class TwoQueues:
    """That of the service; with `again` 0 it is LRU."""

    def __init__(self, room: int, again: float) -> None:
        self._room = room
        self._order: EvictionOrder[Block] = EvictionOrder(int(room * again))

    def use(self, block: Block) -> bool:
        """See `Policy`."""
        is_held = block in self._order
        if not is_held and len(self._order) == self._room:
            self._order.pop()
        self._order.add(block, is_again=is_held)
        return is_held


class Arc:
    """ARC: two queues, and the keys of what left each of them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._once_room = 0
        self._once, self._again, self._left_once, self._left_again = (OrderedDict[Block, None]() for _ in range(4))

    def use(self, block: Block) -> bool:
        """See `Policy`."""
        for queue in (self._once, self._again):
            if block in queue:
                del queue[block]
                self._again[block] = None
                return True
        for queue, other, sign in (
            (self._left_once, self._left_again, 1),
            (self._left_again, self._left_once, -1),
        ):
            if block in queue:
                step = max(1, len(other) // len(queue))
                self._once_room = min(self._room, max(0, self._once_room + sign * step))
                self._evict(was_used_again=sign < 0)
                del queue[block]
                self._again[block] = None
                return False
        if len(self._once) + len(self._left_once) == self._room:
            if len(self._once) < self._room:
                self._left_once.popitem(last=False)
                self._evict(was_used_again=False)
            else:
                self._once.popitem(last=False)
        else:
            num_known = len(self._once) + len(self._again) + len(self._left_once) + len(self._left_again)
            if num_known >= 2 * self._room:
                self._left_again.popitem(last=False)
            if num_known >= self._room:
                self._evict(was_used_again=False)
        self._once[block] = None
        return False

    def _evict(self, *, was_used_again: bool) -> None:
        num_once = len(self._once)
        if num_once and (num_once > self._once_room or (was_used_again and num_once == self._once_room)):
            self._left_once[self._once.popitem(last=False)[0]] = None
        else:
            self._left_again[self._again.popitem(last=False)[0]] = None


def shared(rng: random.Random) -> Iterator[Block]:
    """60 system prompts of 24 blocks, some much more frequent than others, each time with 20 blocks of its own."""
    weights = [1 / (i + 1) for i in range(60)]
    for number in range(NUM_REQUESTS):
        yield from (("own", number, i) for i in range(20))
        prompt = rng.choices(range(60), weights)[0]
        yield from (("shared", prompt, i) for i in reversed(range(24)))


def chats(rng: random.Random) -> Iterator[Block]:
    """40 conversations at a time, which come back 8 blocks longer, up to 48 blocks, and end."""
    num_turns: dict[int, int] = {}
    for number in range(NUM_REQUESTS):
        chat = rng.randrange(number // 8, number // 8 + 40)
        num_turns[chat] = num_turns.get(chat, 0) + 1
        yield from (("chat", chat, i) for i in reversed(range(8 * min(6, num_turns[chat]))))


def scans(rng: random.Random) -> Iterator[Block]:
    """Both, and after every 13,000 blocks of them 3,000 that come once."""
    kinds = [shared(rng), chats(rng)]
    for number in range(20):
        for kind in kinds:
            yield from (block for _, block in zip(range(6500), kind, strict=False))
        yield from (("scan", number, i) for i in range(3000))


def main() -> None:
    """Print a row for each kind of requests and each size."""
    policies: dict[str, Callable[[int], Policy]] = {
        "LRU": lambda room: TwoQueues(room, 0.0),
        "half": lambda room: TwoQueues(room, 0.5),
        "three quarters": lambda room: TwoQueues(room, 0.75),
        "ARC": Arc,
    }
    for trace in (shared, chats, scans):
        for room in (500, 1000, 2000):
            shares = []
            for name, make in policies.items():
                policy = make(room)
                found = [policy.use(block) for block in trace(random.Random(1))]
                shares.append(f"{name} {sum(found) / len(found):.3f}")
            print(f"{trace.__name__}, room for {room} blocks: {', '.join(shares)}")


if __name__ == "__main__":
    main()
