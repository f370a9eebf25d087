"""Two staging processes and a real Redis, which is stopped, slow, flushed and started again while they serve."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oasiskv.services.testing import NUM_BLOCKS, Peer, RedisServer, Server, peer, random_blocks, running, until

KEYS = [f"f{number}".encode() for number in range(6)]
CONTENT = random_blocks(21, *KEYS)
ALL = KEYS[:4]

NO_REDIS = "redis-server is not installed: `make redis` installs Debian's, as does `apt install redis-server`"


@dataclass
class Place:
    redis: RedisServer
    first: Server
    second: Server


def tables(redis: RedisServer, address: str) -> str:
    return f'[directory]\nurl = "{redis.url}"\naddress = "{address}"\nheartbeat_s = 0.2\ntimeout_s = 0.2\n'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if shutil.which("redis-server") is None:
        pytest.skip(NO_REDIS)
    redis = RedisServer(tmp_path)
    redis.start()
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    try:
        with (
            running(folders[0], "is_strict = true", tables(redis, "first:1")) as first,
            running(folders[1], "is_strict = true", tables(redis, "second:1")) as second,
        ):
            yield Place(redis, first, second)
    finally:
        redis.signal(signal.SIGCONT)
        redis.stop()


async def finds(user: Peer, holders: dict[str, int], is_complete: bool = True) -> None:
    """Wait until the directory says so."""

    async def is_so() -> bool:
        return await user.find(*ALL) == (holders, is_complete)

    await until(is_so)


async def stage(user: Peer, num_blocks: int) -> str:
    return await user.stage({key: CONTENT[key] for key in KEYS[:num_blocks]})


def test_services_find_what_the_others_hold_and_forget_the_dead(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await finds(one, {})
            lease_id = await stage(one, 2)
            await stage(other, 4)
            await finds(one, {"second:1": 4, "first:1": 2})
            await finds(other, {"second:1": 4, "first:1": 2})
            assert list((await one.find(*ALL))[0]) == ["second:1", "first:1"], "the longest prefix comes first"
            await one.release(lease_id)
            await one.allocate(NUM_BLOCKS)  # evicts both
            await finds(other, {"second:1": 4})

    async def after_the_end_of_the_second() -> None:
        async with peer(place.first) as one:
            await finds(one, {})
            await stage(one, 1)
            await finds(one, {"first:1": 1})
            assert place.redis.ask("KEYS oasiskv:*:holder:*").count(b":holder:") == 1

    asyncio.run(scenario())
    place.second.end(signal.SIGKILL)
    asyncio.run(after_the_end_of_the_second())


def test_serving_goes_on_without_redis_and_the_index_is_rebuilt_after(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(one, 2)
            await stage(other, 1)
            await finds(one, {"first:1": 2, "second:1": 1})
            place.redis.stop()
            await finds(one, {"first:1": 2}, is_complete=False)
            assert await one.check(KEYS[:2], CONTENT) == KEYS[:2]
            await stage(other, 3)
            await finds(other, {"second:1": 3}, is_complete=False)
            place.redis.start()
            await finds(one, {"second:1": 3, "first:1": 2})
            await finds(other, {"second:1": 3, "first:1": 2})

    asyncio.run(scenario())


def test_a_redis_that_hangs_delays_nobody_for_longer_than_its_time_limit(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(other, 3)
            await stage(one, 1)
            await finds(one, {"second:1": 3, "first:1": 1})
            place.redis.signal(signal.SIGSTOP)
            found = await one.find(*ALL)  # the first call after the stop, while the connection still looks good
            assert found in [({"first:1": 1}, False), ({"second:1": 3, "first:1": 1}, True)]
            await finds(one, {"first:1": 1}, is_complete=False)
            assert (await one.lease(*KEYS[:1])).num_blocks == 1
            await stage(other, 4)
            place.redis.signal(signal.SIGCONT)
            await finds(one, {"second:1": 4, "first:1": 1})

    asyncio.run(scenario())


def test_a_redis_that_answers_late_is_as_good_as_none(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(other, 3)
            await finds(one, {"second:1": 3})
            place.redis.ask("CLIENT PAUSE 1500 ALL")
            await finds(one, {}, is_complete=False)
            await stage(one, 2)
            await finds(one, {"second:1": 3, "first:1": 2})

    asyncio.run(scenario())


def test_a_flushed_redis_is_filled_again_without_a_word(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(other, 3)
            await stage(one, 2)
            await finds(one, {"second:1": 3, "first:1": 2})
            place.redis.ask("FLUSHALL")
            await finds(one, {"second:1": 3, "first:1": 2})

            async def has_both() -> bool:
                keys = place.redis.ask("KEYS oasiskv:*:keys:*").split()
                return sum(b":keys:" in key for key in keys) == 2

            await until(has_both)

    asyncio.run(scenario())


def test_an_index_that_redis_evicted_is_written_again(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(other, 3)
            await finds(one, {"second:1": 3})
            for key in place.redis.ask("KEYS oasiskv:*:keys:*").split():
                if b":keys:" in key:
                    place.redis.ask(f"DEL {key.decode()}")
            await finds(one, {"second:1": 3})
            await stage(one, 1)
            await finds(other, {"second:1": 3, "first:1": 1})

    asyncio.run(scenario())


def test_a_write_that_a_redis_carried_out_late_is_made_good(place: Place) -> None:
    """As it does with what was in its buffers when it hung, although whoever sent it has given up and gone on."""

    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(other, 3)
            await finds(one, {"second:1": 3})
            (keys,) = [key for key in place.redis.ask("KEYS oasiskv:*:keys:*").split() if b":keys:" in key]
            name = keys.decode()
            holder = name.replace(":keys:", ":holder:")
            answer = place.redis.ask(f"GET {holder}").split(b"\r\n")[1].decode()
            entry = json.dumps({**json.loads(answer), "write": 1})
            late = [f"SREM {name} {KEYS[0].decode()}", f"SADD {name} {KEYS[5].decode()}"]
            place.redis.ask("\r\n".join(["MULTI", *late, f"SET {holder} '{entry}' PX 5000", "EXEC"]))
            await finds(one, {"second:1": 3})
            assert (await one.find(KEYS[5]))[0] == {}

    asyncio.run(scenario())


def test_a_redis_that_starts_from_an_old_dump_does_not_bring_evicted_blocks_back(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await finds(one, {})
            lease_id = await stage(other, 3)
            await finds(one, {"second:1": 3})
            place.redis.ask("SAVE")
            await other.release(lease_id)
            await other.release((await other.allocate(NUM_BLOCKS)).lease_id)
            await finds(one, {})
            await stage(one, 1)
            place.redis.stop()
            place.redis.start()
            await finds(other, {"first:1": 1})
            await finds(one, {"first:1": 1})

    asyncio.run(scenario())


def test_without_a_directory_a_service_knows_of_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with peer(server) as user:
            await stage(user, 2)
            assert await user.find(*ALL) == ({"": 2}, True)
            assert await user.find(b"absent") == ({}, True)

    with running(tmp_path, "is_strict = true") as server:
        asyncio.run(scenario())


def test_a_redis_that_wants_another_password_is_as_good_as_none_until_it_does_not(place: Place) -> None:
    async def scenario() -> None:
        async with peer(place.first) as one, peer(place.second) as other:
            await stage(one, 2)
            await stage(other, 1)
            await finds(one, {"first:1": 2, "second:1": 1})
            # Connections that are open stay known, so they are closed.
            place.redis.ask("CONFIG SET requirepass changed\r\nAUTH changed\r\nCLIENT KILL TYPE normal")
            await finds(one, {"first:1": 2}, is_complete=False)
            await stage(other, 3)
            assert await one.check(KEYS[:2], CONTENT) == KEYS[:2]
            place.redis.ask('AUTH changed\r\nCONFIG SET requirepass ""')
            await finds(one, {"second:1": 3, "first:1": 2})

    asyncio.run(scenario())
