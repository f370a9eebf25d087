"""Which staging services hold which blocks: this one from its own memory, others through Redis where one is configured.

Every service of one fingerprint writes what it holds, and how busy it is, under keys that vanish when it does. Nothing
depends on Redis: without it a service knows of itself alone, and writes its index anew when Redis is back.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast
from urllib.parse import urlsplit

import xxhash
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.services.staging.changes import Change, ChangeLog

logger = logging.getLogger(__name__)

GATHER_S = 0.02
TTL_HEARTBEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Where several staging services tell one another what they hold."""

    url: str
    """`redis://host:port/db`, `rediss://` for TLS, with user and password where needed."""

    address: str
    """`host:port` under which others reach this service."""

    heartbeat_s: float = 2.0
    """Seconds between signs of life; a service that sends none for five of them is forgotten."""

    timeout_s: float = 0.5
    """Longest wait for Redis, after which this service goes on without it."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        # The message does not repeat the URL, which may hold a password.
        if not isinstance(self.url, str) or urlsplit(self.url).scheme not in ("redis", "rediss", "unix"):
            raise ConfigError("url: expected redis://, rediss:// or unix://, got another text")
        if not isinstance(self.address, str) or ":" not in self.address:
            raise ConfigError(f"address: expected host:port, got {self.address!r}")
        for name in ("heartbeat_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: expected a positive number, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """How busy a service is."""

    num_blocks: int
    num_free_blocks: int
    num_leases: int
    is_draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A service that holds the first of some blocks."""

    service_id: str
    address: str
    num_prefix_blocks: int
    """Length of the longest prefix of the keys that it holds, in any tier."""
    load: ServiceLoad


class Directory:
    """The index of one service and its view of the others; `start` begins to publish, `stop` takes the entry back."""

    def __init__(
        self,
        config: DirectoryConfig | None,
        fingerprint: Fingerprint,
        service_id: str,
        changes: ChangeLog,
        is_held: Callable[[bytes], bool],
        load: Callable[[], ServiceLoad],
    ) -> None:
        """Prepare; nothing connects before `start`.

        Args:
            config: Where Redis is; None to know of this service alone.
            fingerprint: Services of other fingerprints are not seen.
            service_id: Changes with every start of the service.
            changes: What becomes findable here, and ceases to be.
            is_held: Whether this service holds a key.
            load: How busy it is now.
        """
        self._config = config
        self._service_id = service_id
        self._changes = changes
        self._is_held = is_held
        self._load = load
        self._prefix = f"oasiskv:{xxhash.xxh3_64_hexdigest(json.dumps(asdict(fingerprint)).encode())}"
        self._redis: Redis | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._num_writes = 0
        self._last_write = 0
        self.is_connected = False
        """Whether Redis answered the last time."""
        self.num_failures = 0
        """Times that it did not, since the start."""
        self.num_rebuilds = 0
        """Times that the whole index was written, the first among them."""

    async def start(self) -> None:
        """Begin to publish; Redis need not be there yet."""
        if self._config is None:
            return
        timeout_s = self._config.timeout_s
        self._redis = Redis.from_url(
            self._config.url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # whoever calls has a way to go on without it
        )
        self._publishing = asyncio.create_task(self._publish_forever(self._config, self._redis))

    async def stop(self) -> None:
        """Take this service out of the directory, if Redis answers."""
        if self._publishing is None or self._redis is None:
            return
        self._publishing.cancel()
        await asyncio.gather(self._publishing, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self._redis.unlink(self._key("holder"), self._key("keys"))
        await self._redis.aclose()

    async def find(self, block_keys: Sequence[bytes]) -> tuple[list[Holder], bool]:
        """Return the services that hold the first of the keys, longest prefix first, and whether others were asked.

        Takes at most `timeout_s`; where Redis does not answer, only this service is known.
        """
        holders = []
        is_complete = self._redis is None
        if self._redis is not None and self.is_connected:
            try:
                async with asyncio.timeout(self._timeout_s):
                    holders = await self._find_others(self._redis, block_keys)
                is_complete = True
            except Exception as error:  # whatever Redis or what else is at the port answers, this service goes on
                self._failed(error)
        holders.append(
            Holder(
                service_id=self._service_id,
                address=self._config.address if self._config else "",
                num_prefix_blocks=_prefix([self._is_held(block_key) for block_key in block_keys]),
                load=self._load(),
            )
        )
        found = [holder for holder in holders if holder.num_prefix_blocks]
        return sorted(found, key=lambda holder: (-holder.num_prefix_blocks, holder.load.num_leases)), is_complete

    @property
    def _timeout_s(self) -> float:
        return self._config.timeout_s if self._config else 0.0

    @property
    def _ttl_ms(self) -> int:
        return round(self._config.heartbeat_s * TTL_HEARTBEATS * 1000) if self._config else 0

    async def _find_others(self, redis: Redis, block_keys: Sequence[bytes]) -> list[Holder]:
        members = await _answer(redis.smembers(self._name("holders")))
        others = sorted(name for member in members if (name := member.decode()) != self._service_id)
        if not others or not block_keys:
            return []
        asked = redis.pipeline(transaction=False)
        asked.mget([self._key("holder", other) for other in others])
        for other in others:
            asked.smismember(self._key("keys", other), list(block_keys))
        entries, *held = await asked.execute()
        found = []
        for other, entry, is_held in zip(others, entries, held, strict=True):
            if entry is not None:
                value = json.loads(entry)
                load = ServiceLoad(**{field.name: value["load"][field.name] for field in fields(ServiceLoad)})
                address, num_prefix_blocks = value["address"], _prefix([bool(one) for one in is_held])
                found.append(Holder(service_id=other, address=address, num_prefix_blocks=num_prefix_blocks, load=load))
        return found

    async def _publish_forever(self, config: DirectoryConfig, redis: Redis) -> None:
        sequence: int | None = None
        while True:
            try:
                sequence = await self._publish(redis, sequence)
            except Exception as error:  # as in `find`
                self._failed(error)
                await asyncio.sleep(config.heartbeat_s)
                continue
            if not self.is_connected:
                self.is_connected = True
                logger.info("the directory is connected")
            if sequence is None:
                await asyncio.sleep(GATHER_S)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(config.heartbeat_s):
                        await self._changes.wait(sequence)
                        await asyncio.sleep(GATHER_S)  # so that changes of a moment go in one batch

    async def _publish(self, redis: Redis, sequence: int | None) -> int | None:
        """Bring Redis from event `sequence` up to now; return the event it is at, None to write everything next.

        What Redis had before must be of the last write that was answered, by its number: Redis may have been flushed,
        started again from an old dump, or have carried out late what this service had given up waiting for. And it must
        have as many keys as this service: it may have evicted them for want of memory.
        """
        changes, num_keys = self._changes.after(sequence), self._changes.num_keys
        is_whole = bool(changes) and changes[0].is_snapshot_start
        new_key = ""
        if is_whole:
            self.num_rebuilds += 1
            # Another name each time: what an attempt that timed out has sent may be carried out during the next one.
            new_key = f"{self._key('new')}:{self.num_rebuilds}"
            for change in changes:
                if change.sealed_keys:
                    part = redis.pipeline(transaction=False)
                    part.sadd(new_key, *change.sealed_keys)
                    part.pexpire(new_key, self._ttl_ms)
                    await part.execute()
        latest = changes[-1].sequence if changes else sequence
        self._num_writes += 1
        batch = redis.pipeline(transaction=True)
        batch.get(self._key("holder"))
        if is_whole:
            batch.unlink(self._key("keys"))
            if any(change.sealed_keys for change in changes):
                batch.rename(new_key, self._key("keys"))
        else:
            self._add_changes(batch, changes)
        self._add_sign_of_life(batch)
        batch.scard(self._key("keys"))
        before, *_, num_there = await batch.execute()
        was_last, self._last_write = self._last_write, self._num_writes
        is_next = is_whole or (before is not None and json.loads(before)["write"] == was_last)
        if not is_next or num_there != num_keys:
            return None
        await self._forget_dead(redis)
        return latest

    def _add_changes(self, batch: Any, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.sealed_keys:
                batch.sadd(self._key("keys"), *change.sealed_keys)
            if change.removed_keys:
                batch.srem(self._key("keys"), *change.removed_keys)

    def _add_sign_of_life(self, batch: Any) -> None:
        assert self._config is not None
        ttl_ms = self._ttl_ms
        entry = {"address": self._config.address, "write": self._num_writes, "load": asdict(self._load())}
        batch.set(self._key("holder"), json.dumps(entry), px=ttl_ms)
        batch.pexpire(self._key("keys"), ttl_ms)
        batch.sadd(self._name("holders"), self._service_id)
        batch.pexpire(self._name("holders"), ttl_ms)

    async def _forget_dead(self, redis: Redis) -> None:
        members = sorted(await _answer(redis.smembers(self._name("holders"))))
        entries = await redis.mget([self._key("holder", member.decode()) for member in members])
        dead = [member for member, entry in zip(members, entries, strict=True) if entry is None]
        if dead:
            await _answer(redis.srem(self._name("holders"), *dead))

    def _failed(self, error: BaseException) -> None:
        self.num_failures += 1
        if self.is_connected or self.num_failures == 1:
            logger.warning("the directory is away, going on with local knowledge: %s", type(error).__name__)
        self.is_connected = False

    def _name(self, what: str) -> str:
        return f"{self._prefix}:{what}"

    def _key(self, what: str, service_id: str | None = None) -> str:
        return f"{self._prefix}:{what}:{service_id or self._service_id}"


def _prefix(is_held: Sequence[bool]) -> int:
    return next((number for number, held in enumerate(is_held) if not held), len(is_held))


async def _answer(answer: Any) -> Any:
    """Wait for what redis-py declares to be either an answer or an awaitable of it."""
    return await cast("Awaitable[Any]", answer)
