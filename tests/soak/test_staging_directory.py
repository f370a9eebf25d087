"""Redis killed, flushed, hung, paused and set back at random while two services serve: the index is right after it."""

import asyncio
import random
import shutil
import signal
from pathlib import Path

import pytest

from oasiskv.services.testing import NUM_BLOCKS, Peer, RedisServer, peer, random_blocks, running

NUM_EVENTS = 60
CHAINS = [[f"{name}{number}".encode() for number in range(4)] for name in "abcdef"]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed: `make redis`")
def test_after_whatever_happened_to_redis_both_services_find_what_is_held(tmp_path: Path) -> None:
    rng = random.Random(5)
    redis = RedisServer(tmp_path)
    folders = {name: tmp_path / name for name in ("first", "second")}

    def tables(name: str) -> str:
        return f'[directory]\nurl = "{redis.url}"\naddress = "{name}:1"\nheartbeat_s = 0.1\ntimeout_s = 0.1\n'

    async def change(user: Peer) -> None:
        if rng.random() < 0.3:
            await user.release((await user.allocate(NUM_BLOCKS)).lease_id)  # evicts everything
        chain = rng.choice(CHAINS)
        await user.release(await user.stage(random_blocks(1, *chain[: rng.randint(1, 4)])))

    async def change_some(users: list[Peer]) -> None:
        for user in rng.choices(users, k=3):
            await change(user)

    async def disturb() -> None:
        match rng.randrange(5):
            case 0:
                redis.stop()
                await asyncio.sleep(rng.uniform(0, 0.5))
                redis.start()
            case 1:
                redis.ask("FLUSHALL")
            case 2:
                redis.signal(signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0, 1.5))
                redis.signal(signal.SIGCONT)
            case 3:
                redis.ask(f"CLIENT PAUSE {rng.randrange(600)} ALL")
            case _:
                redis.ask("SAVE")

    async def held(user: Peer, chain: list[bytes]) -> int:
        tiers = await user.locate(*chain)
        return next((number for number, tier in enumerate(tiers) if not tier), len(chain))

    async def scenario() -> None:
        async with peer(first) as one, peer(second) as other:
            for _ in range(NUM_EVENTS):
                await asyncio.gather(disturb(), change_some([one, other]))
                for chain in CHAINS:
                    truth = {"first:1": await held(one, chain), "second:1": await held(other, chain)}
                    expected = ({name: number for name, number in truth.items() if number}, True)

                    for user in (one, other):
                        found: object = None
                        for _ in range(200):
                            found = await user.find(*chain)
                            if found == expected:
                                break
                            await asyncio.sleep(0.05)
                        assert found == expected, redis.ask("KEYS *")

    for folder in folders.values():
        folder.mkdir()
    redis.start()
    try:
        with (
            running(folders["first"], "is_strict = true", tables("first")) as first,
            running(folders["second"], "is_strict = true", tables("second")) as second,
        ):
            asyncio.run(scenario())
    finally:
        redis.stop()
