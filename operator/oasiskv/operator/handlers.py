"""The operator's kopf handlers. They only wake: what happened, and in what order, is of no concern to a reconcile."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from oasiskv.operator.client import IDLE_S, PAGE, WATCH_S, ApiError, Client, NotFoundError, login
from oasiskv.operator.resources import PROFILES, SERVICES

Key = tuple[str, str]
AGAIN_S, LONGEST_S = 5.0, 60.0
"""Wait before the kinds are looked for, or kopf is begun, once more; the second is the longest, and how often a
namespace that may not be read is tried again."""

log = logging.getLogger(__name__)


class Handlers:
    """Runs kopf in a thread of its own: when it ends, it cancels every task of its loop.

    Args:
        client: The API server.
        namespaces: Those to work in; none for all.
        wake: Called in the caller's loop with the key of a service that changed.
        wake_namespace: Called in the caller's loop with the namespace of a profile that changed.
    """

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str],
        wake: Callable[[Key], None],
        wake_namespace: Callable[[str], None],
    ) -> None:
        self._client, self._namespaces = client, namespaces
        self._wake, self._wake_namespace = wake, wake_namespace
        self.problem = "services and profiles are not watched yet"
        """Why nothing is watched; empty while it is."""

    async def run(self) -> None:
        """Run until cancelled.

        kopf does not begin to watch kinds that are installed later, and ends when they go, or when one of its
        namespaces may not be read. So it is begun when the kinds are there, without those namespaces, and anew whenever
        it has ended; it then tells of every service that there is, so nothing is missed.
        """
        wait_s = AGAIN_S
        while True:
            namespaces = await self._wait_for_kinds()
            begin_s = time.monotonic()
            error = await self._watch(namespaces, LONGEST_S if len(namespaces) < len(self._namespaces) else None)
            if error is None:
                continue
            wait_s = AGAIN_S if time.monotonic() > begin_s + LONGEST_S else min(2 * wait_s, LONGEST_S)
            self.problem = f"watches of services and profiles ended: {error}"
            log.warning("watches ended", extra={"error": str(error), "again_in_s": wait_s})
            await asyncio.sleep(wait_s)

    async def _wait_for_kinds(self) -> Sequence[str]:
        """Wait until there is something to watch; return the namespaces that may be read, none for all."""
        while True:
            problem, namespaces = await self._why_not(), []
            for namespace in self._namespaces if not problem else ():
                try:
                    for resource in (SERVICES, PROFILES):
                        await self._client.get(resource.path(namespace), limit="1")
                    namespaces.append(namespace)
                except ApiError as error:
                    problem = str(error)
                    log.warning("cannot watch a namespace", extra={"namespace": namespace, "error": problem})
            if not problem or namespaces:
                self.problem = ""
                return namespaces
            if problem != self.problem:
                log.warning("cannot watch", extra={"error": problem})
            self.problem = problem
            await asyncio.sleep(AGAIN_S)

    async def _why_not(self) -> str:
        known = set()
        try:
            known = {each["name"] for each in (await self._client.get(f"/apis/{SERVICES.api}"))["resources"]}
        except NotFoundError:
            pass  # not even their group is there
        except ApiError as error:
            return str(error)
        lacking = [each.plural for each in (SERVICES, PROFILES) if each.plural not in known]
        return f"expected the API server to know {' and '.join(lacking)}, got no definition" if lacking else ""

    async def _watch(self, namespaces: Sequence[str], longest_s: float | None) -> object:
        """Run kopf until it ends by itself, and return why; None where it was ended after a while, as it was told."""
        loop, other, stop = asyncio.get_running_loop(), asyncio.new_event_loop(), asyncio.Event()
        ended: asyncio.Future[object] = loop.create_future()

        def end(error: object) -> None:
            if not ended.done():  # nobody waits any more
                ended.set_result(error)

        def work() -> None:
            error: object = "kopf gave no reason"
            try:
                with asyncio.Runner(loop_factory=lambda: other) as runner:
                    runner.run(self._serve(loop, stop, namespaces))
            except Exception as cause:
                error = cause
            loop.call_soon_threadsafe(end, error)

        thread = threading.Thread(target=work, name="kopf", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(longest_s):
                return await ended
        except TimeoutError:
            return None
        finally:
            # A closed loop has nothing to be told.
            with contextlib.suppress(RuntimeError):
                other.call_soon_threadsafe(stop.set)
            await asyncio.to_thread(thread.join, 10)

    async def _serve(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, namespaces: Sequence[str]) -> None:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def connect(**_: Any) -> kopf.ConnectionInfo:
            return login()

        @kopf.on.event(SERVICES.api, SERVICES.plural, registry=registry)
        async def service_changed(**event: Any) -> None:
            loop.call_soon_threadsafe(self._wake, (event["namespace"], event["name"]))

        @kopf.on.event(PROFILES.api, PROFILES.plural, registry=registry)
        async def profile_changed(**event: Any) -> None:
            loop.call_soon_threadsafe(self._wake_namespace, event["namespace"])

        await kopf.operator(
            registry=registry,
            settings=_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=list(namespaces),
            # Of its own loop: waiting for a flag of threads takes a thread, for which a loop that ends would wait.
            stop_flag=stop,
        )


def _settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    # It would list all namespaces and definitions, which a role for services alone does not allow.
    made.scanning.disabled = True
    made.watching.chunk_size = PAGE
    made.watching.server_timeout = WATCH_S
    made.watching.client_timeout = WATCH_S + IDLE_S
    made.watching.inactivity_timeout = IDLE_S
    made.watching.connect_timeout = 10
    return made
