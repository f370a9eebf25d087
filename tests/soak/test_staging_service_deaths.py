"""The service is killed at random moments of what living sessions do: they go on, and read no wrong byte."""

import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.core.errors import (
    BlockNotFoundError,
    LeaseExpiredError,
    PeerUnavailableError,
    PoolExhaustedError,
    TransferTimeoutError,
)
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession
from oasiskv.services.staging.disk_file import ALIGNMENT
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import NUM_BLOCKS, SHAPE, WAYS, stats, until

NUM_ROUNDS = 25
TYPED = (BlockNotFoundError, LeaseExpiredError, PeerUnavailableError, PoolExhaustedError, TransferTimeoutError)


def content(prompt: int, block: int) -> np.ndarray:
    """What everyone writes under a key, `[num_parts, part_bytes]`."""
    return np.random.default_rng([prompt, block]).integers(0, 256, (SHAPE.num_parts, SHAPE.part_bytes), np.uint8)


class User(threading.Thread):
    """Stages and reads prompts until it is told to stop; `wrong` says what it met that nobody may meet."""

    def __init__(self, address: str, way: str, number: int) -> None:
        super().__init__(name=f"{way} {number}")
        self.chance = random.Random(number)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stopping = threading.Event()
        config = SessionConfig(
            address=address,
            fingerprint=SHAPE,
            name=self.name,
            may_write=True,
            ttl_s=2.0,
            timeout_s=10.0,
            **WAYS[way],
        )
        self.session = StagingSession(config)
        self.buffer = np.zeros((8, SHAPE.num_parts, SHAPE.part_bytes), np.uint8)
        self.session.register(self.buffer)

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                self.turn()
            except TYPED as error:
                self.counts[type(error).__name__] += 1
                time.sleep(0.01)
            except Exception as error:  # told by the test, which a thread cannot fail
                self.wrong.append(repr(error))
                return
        self.session.close()

    def turn(self) -> None:
        prompt, num_blocks = self.chance.randrange(30), self.chance.randint(1, 8)
        keys, blocks, session = [b"%d %d" % (prompt, i) for i in range(num_blocks)], range(num_blocks), self.session
        if self.chance.random() < 0.4:
            lease = session.allocate(num_blocks).result()
            for block in blocks:
                self.buffer[block] = content(prompt, block)
            session.put(lease, blocks, 0, self.buffer[:num_blocks]).result()
            session.seal(lease, blocks, keys).result()
            self.counts["staged"] += 1
        else:
            lease = session.lease(keys).result()
            found = session.fetch(lease, range(lease.num_blocks), 0, self.buffer[: lease.num_blocks]).result()
            self.counts.update(FetchStatus(status).name for status in found.tolist())
            for block in np.flatnonzero(found == FetchStatus.OK).tolist():
                if not np.array_equal(self.buffer[block], content(prompt, block)):
                    self.wrong.append(f"wrong bytes of block {block} of prompt {prompt}")
            if FetchStatus.CORRUPT in found:
                self.wrong.append("a corrupt block")
        session.release(lease).result()


def all_staged_more(users: list[User], before: list[int]) -> bool:
    return all(user.counts["staged"] > count for user, count in zip(users, before, strict=True))


@pytest.mark.timeout(1800)
def test_sessions_outlive_every_death_of_their_service(tmp_path: Path) -> None:
    chance = random.Random(20261130)
    (tmp_path / "disk").mkdir()
    settings: dict[str, Any] = {
        "staging": {"transport": "tcp"},
        "disk": {
            "folder": str(tmp_path / "disk"),
            "max_bytes": ALIGNMENT + 64 * (SHAPE.block_bytes + ALIGNMENT),
            "use_direct_io": False,
        },
    }
    server = StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, **settings)
    users = [User(server.address, way, number) for number, way in enumerate(sorted(WAYS) * 2)]
    try:
        for user in users:
            user.start()
        for _ in range(NUM_ROUNDS):
            time.sleep(chance.uniform(0.0, 1.5))
            server.stop(signal.SIGKILL)
            server = StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, address=server.address, **settings)
            before = [user.counts["staged"] for user in users]
            until(partial(all_staged_more, users, before))
    finally:
        for user in users:
            user.stopping.set()
        for user in users:
            user.join(60)
        print([(user.name, user.session.num_reconnects, dict(user.counts)) for user in users])
        try:
            assert [user.wrong for user in users] == [[]] * len(users)
            until(lambda: stats(server).num_leases == 0 and stats(server).num_links == 0)
            assert stats(server).num_free_blocks == NUM_BLOCKS
        finally:
            server.stop(signal.SIGKILL)
    assert all(user.session.num_reconnects >= NUM_ROUNDS for user in users)
