"""The operator's kopf handlers. They only wake: what happened, and in what order, is of no concern to a reconcile."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from oasiskv.operator.client import IDLE_S, PAGE, WATCH_S, login
from oasiskv.operator.resources import PROFILES, SERVICES

Key = tuple[str, str]


class Handlers:
    """Runs kopf in a thread of its own: when it ends, it cancels every task of its loop.

    Args:
        namespaces: Those to work in; none for all.
        wake: Called in the caller's loop with the key of a service that changed.
        wake_namespace: Called in the caller's loop with the namespace of a profile that changed.
    """

    def __init__(
        self, namespaces: Sequence[str], wake: Callable[[Key], None], wake_namespace: Callable[[str], None]
    ) -> None:
        self._namespaces, self._wake, self._wake_namespace = namespaces, wake, wake_namespace
        self._stop = threading.Event()

    async def run(self) -> None:
        """Run until cancelled, or until kopf ends by itself.

        Raises:
            RuntimeError: It ended by itself.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def work() -> None:
            try:
                self._run(loop)
            finally:
                loop.call_soon_threadsafe(ended.set)

        thread = threading.Thread(target=work, name="kopf", daemon=True)
        thread.start()
        try:
            await ended.wait()
        finally:
            self._stop.set()
            await asyncio.to_thread(thread.join, 10)
        raise RuntimeError("kopf: expected it to run until it is told to stop, got an end")

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
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

        kopf.run(
            registry=registry,
            settings=_settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=list(self._namespaces),
            stop_flag=self._stop,
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
