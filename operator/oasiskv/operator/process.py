"""The operator's process: what runs beside what, and how it ends."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oasiskv.operator.asks import Asks
from oasiskv.operator.claims import Claims
from oasiskv.operator.client import ApiError, BusyError, Client, pause
from oasiskv.operator.handlers import Handlers
from oasiskv.operator.lease import Lease
from oasiskv.operator.metrics import Metrics
from oasiskv.operator.resources import SERVICES
from oasiskv.operator.shell import Shell
from oasiskv.operator.store import Store
from oasiskv.operator.wakes import Key, Wakes
from oasiskv.operator.web import Web

STALL_S = 600.0
"""Silence of a watch, or length of a turn, after which the process should be started anew."""
RESYNC_S, KINDS_S, ROOM_S = 300.0, 60.0, 10.0
"""How often every service gets a turn, optional kinds are looked for, and services that lack room look again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run."""

    lease: str
    """Name of the lease."""

    lease_namespace: str
    """Where the lease is."""

    namespaces: Sequence[str] = ()
    """Those to work in; none for all."""

    reads_nodes: bool = True
    """Whether nodes and all pods may be looked at."""

    health_address: str = "0.0.0.0:8081"
    """Of `/healthz` and `/readyz`."""

    metrics_address: str = "0.0.0.0:9400"
    """Of `/metrics`."""

    resync_s: float = RESYNC_S
    """How often every service gets a turn, whether something happened or not."""

    kinds_s: float = KINDS_S
    """How often optional kinds are looked for."""


class Process:
    """One operator.

    Args:
        options: How to run.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._metrics = Metrics()
        self._client = Client(count=self._metrics.answered)
        self._lease = Lease(self._client, options.lease_namespace, options.lease)
        self._claims = Claims(self._client, f"{options.lease_namespace}/{options.lease}")
        self._wakes = Wakes(self._turn)
        self._store = Store(self._client, options.namespaces, options.reads_nodes, self._wakes.wake)
        self._handlers = Handlers(self._client, options.namespaces, self._wakes.wake, self._wake_namespace)
        self._asks = Asks()
        self._shell = Shell(self._client, self._store, self._metrics, self._asks, self._may_write, claims=self._claims)
        self._web = Web(self._why_dead, self._why_not_ready, self._metrics.registry)
        self._stop = asyncio.Event()
        self._is_synced = self._is_leading = False
        self._metrics.show(
            "oasiskv_operator_last_event_age_seconds", "Time since the API server was heard of", self._store.ages_s
        )
        self._metrics.show("oasiskv_operator_kept_objects", "Objects of which a copy is kept", self._store.sizes)
        self._metrics.show(
            "oasiskv_operator_services",
            "Services, how many of them wait for a turn, and how many are left to another operator",
            lambda: {
                "known": len(self._shell.services),
                "waiting": self._wakes.num_waiting,
                "left": len(self._shell.left),
            },
        )

    async def run(self) -> int:
        """Run until a signal, or until something ends that must not; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        try:
            where = await self._web.start(self._options.health_address, self._options.metrics_address)
            log.info("listening", extra={"addresses": where})
            tasks.append(asyncio.create_task(self._work()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return 0
            log.error("ended", extra={"error": str(tasks[1].exception())}, exc_info=tasks[1].exception())
            return 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Turns have ended by now, so nothing is written after this.
            await self._lease.release()
            await self._store.stop()
            await self._web.stop()
            await self._asks.close()
            await self._client.close()
            log.info("stopped")

    async def _work(self) -> None:
        # The copies are made before the lease is there, so that the next writer goes on at once.
        self._store.start()
        while not self._is_synced:
            try:
                await self._store.look_for_kinds()
                self._is_synced = True
            except BusyError as error:
                log.warning("cannot look for kinds", extra={"error": str(error)})
                await asyncio.sleep(max(1.0, error.retry_after_s))
        await self._lease.acquire()
        self._is_leading = True
        self._metrics.is_leader.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                for part in (
                    self._lease.keep,
                    self._claims.keep,
                    self._handlers.run,
                    self._wakes.run,
                    self._resync,
                    self._look_for_kinds,
                    self._look_for_room,
                ):
                    group.create_task(part())
        finally:
            self._is_leading = False
            self._metrics.is_leader.set(0)

    def _may_write(self) -> bool:
        return self._lease.is_held and not self._stop.is_set()

    async def _turn(self, key: Key) -> None:
        again_s = await self._shell.turn(key)
        if again_s is not None:
            self._wakes.wake(key, again_s)

    def _wake_namespace(self, namespace: str) -> None:
        for key in self._shell.services:
            if key[0] == namespace:
                self._wakes.wake(key)

    async def _resync(self) -> None:
        """Give every service a turn now and then, also one whose events were lost."""
        while not self._stop.is_set():
            found = set(self._shell.services)
            scopes: Sequence[str | None] = self._options.namespaces or (None,)
            for scope in scopes:
                try:
                    async for page in self._client.pages(SERVICES.path(scope)):
                        found |= {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in page["items"]}
                except ApiError as error:
                    log.warning("cannot list services", extra={"namespace": scope or "all", "error": str(error)})
            for key in found:
                self._wakes.wake(key)
            await pause(self._options.resync_s, self._stop)

    async def _look_for_kinds(self) -> None:
        while not await pause(self._options.kinds_s, self._stop):
            try:
                has_changed = await self._store.look_for_kinds()
            except ApiError as error:
                log.warning("cannot look for kinds", extra={"error": str(error)})
                continue
            if has_changed:
                log.info("kinds changed", extra={"kinds": sorted(self._store.kinds)})
                for key in self._shell.services:
                    self._wakes.wake(key)

    async def _look_for_room(self) -> None:
        while not await pause(ROOM_S, self._stop):
            if self._store.has_room_changed:
                self._store.has_room_changed = False
                for key in self._shell.lacking:
                    self._wakes.wake(key)

    def _why_dead(self) -> str:
        for kind, age_s in self._store.ages_s().items():
            if age_s > STALL_S:
                return f"watch of {kind}: expected news within {STALL_S:.0f} s, got none for {age_s:.0f} s"
        if self._wakes.longest_s > STALL_S:
            return f"turn: expected an end within {STALL_S:.0f} s, got {self._wakes.longest_s:.0f} s"
        return ""

    def _why_not_ready(self) -> str:
        if not self._is_synced:
            return "the cluster is not read yet"
        if not self._is_leading:
            return f"waits for the lease, which {self._lease.other or 'nobody'} holds"
        return self._handlers.problem or self._store.why_blind()
