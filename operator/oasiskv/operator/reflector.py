"""A copy of what the API server holds of one kind, kept current by a watch."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from oasiskv.operator.client import ApiError, BusyError, Client, ExpiredError, RefusedError

Kept = TypeVar("Kept")
Key = tuple[str, str]
"""Namespace and name; no namespace for kinds that have none."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MOST_DELETED = 1000
"""Versions of deleted objects that are kept beside as many as there are objects."""

log = logging.getLogger(__name__)


class Reflector(Generic[Kept]):
    """Lists, then watches, and lists again when the watch cannot go on.

    Args:
        client: The API server.
        path: Of the list.
        keep: What to keep of an object; the rest is forgotten at once.
        changed: Called with a key, what was kept before, and what is kept now; None for nothing.
        selector: Labels of the objects.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        keep: Callable[[Mapping[str, Any]], Kept],
        changed: Callable[[Key, Kept | None, Kept | None], None],
        selector: str = "",
    ) -> None:
        self._client, self._path, self._keep, self._changed, self._selector = client, path, keep, changed, selector
        self._version = ""
        self._versions: dict[Key, int] = {}
        """Also of some that were deleted, so that a late answer to a write does not bring them back."""
        self.items: dict[Key, Kept] = {}
        self.is_synced = asyncio.Event()
        self.has_answer = asyncio.Event()
        """Whether the copy is there, or was refused."""
        self.refused = ""
        """Why the API server does not let it be read, as far as that is known; empty if it does."""
        self.last_news_s = time.monotonic()
        """When the API server was last heard of."""

    async def run(self) -> None:
        """Keep the copy current until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self._version:
                    self._version = await self._list()
                    self.is_synced.set()
                    self.has_answer.set()
                    self.refused = ""
                await self._watch()
                pause_s = FIRST_PAUSE_S
                continue
            except ExpiredError:
                self._version = ""
                continue
            except ApiError as error:
                # A kind that was taken away is found missing by the next look at the kinds, which ends this.
                log.warning("cannot watch", extra={"path": self._path, "error": str(error)})
                if isinstance(error, BusyError):
                    pause_s = max(pause_s, error.retry_after_s)
                else:
                    self._version = ""
                if isinstance(error, RefusedError):
                    # No silence, and none that a process that is started anew would end.
                    self.refused, self.last_news_s = str(error), time.monotonic()
                    self.has_answer.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def put(self, made: Mapping[str, Any]) -> None:
        """Take in an object that the API server returned to a write, without waiting for the watch to say it."""
        key, version = _key(made), int(made["metadata"]["resourceVersion"])
        if version > self._versions.get(key, 0):
            before = self.items.get(key)
            try:
                kept = self._keep(made)
            except Exception:
                # One object that is not understood must not end the watch of all others.
                log.exception("cannot read", extra={"path": self._path, "object": key})
                return
            self._versions[key], self.items[key] = version, kept
            self._changed(key, before, kept)

    def drop(self, key: Key, version: int) -> None:
        """Forget an object that was deleted at a version."""
        if version < self._versions.get(key, 0):
            return
        before = self.items.pop(key, None)
        self._versions[key] = version
        if len(self._versions) > 2 * len(self.items) + MOST_DELETED:
            self._versions = {key: self._versions[key] for key in self.items}
        if before is not None:
            self._changed(key, before, None)

    async def _list(self) -> str:
        seen: set[Key] = set()
        version = ""
        async for page in self._client.pages(self._path, self._selector):
            version = page["metadata"]["resourceVersion"]
            kind, api = page["kind"].removesuffix("List"), page["apiVersion"]
            for made in page["items"]:
                made |= {"kind": kind, "apiVersion": api}
                seen.add(_key(made))
                self.put(made)
            self.last_news_s = time.monotonic()
            await asyncio.sleep(0)  # a list of many pages must not hold up everything else
        for key in self.items.keys() - seen:
            self.drop(key, int(version))
        return version

    async def _watch(self) -> None:
        async with aclosing(self._client.watch(self._path, self._version, self._selector)) as events:
            async for event in events:
                made = event["object"]
                if event["type"] in ("ADDED", "MODIFIED"):
                    self.put(made)
                elif event["type"] == "DELETED":
                    self.drop(_key(made), int(made["metadata"]["resourceVersion"]))
                self._version = made["metadata"]["resourceVersion"]
                self.last_news_s = time.monotonic()
        self.last_news_s = time.monotonic()


def _key(made: Mapping[str, Any]) -> Key:
    return made["metadata"].get("namespace", ""), made["metadata"]["name"]
