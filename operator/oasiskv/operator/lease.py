"""One writer at a time: a Lease of the API server, which others take only when it has not been renewed for a while."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from oasiskv.operator.client import ApiError, Client, ConflictError, NotFoundError, RefusedError
from oasiskv.operator.resources import LEASES

DURATION_S = 15
"""Of an operator's lease. Its holder stops writing when it could not renew for two thirds of that."""
RENEW_S = 3.0

log = logging.getLogger(__name__)


class LeaseLostError(ApiError):
    """Another operator may be writing by now."""


class Lease:
    """The right to write.

    Args:
        client: The API server.
        namespace: Where the lease is.
        name: Of the lease.
        holder: Who asks; the pod's name, so that a restarted container need not wait for itself.
        duration_s: Time without a renewal after which others take it.
    """

    def __init__(
        self, client: Client, namespace: str, name: str, holder: str = "", duration_s: float = DURATION_S
    ) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self._holder = holder or os.environ.get("POD_NAME") or f"{os.uname().nodename}-{secrets.token_hex(4)}"
        self._duration_s = duration_s
        self._made: dict[str, Any] | None = None
        self._seen: tuple[Any, Any] = (None, None)
        self._seen_s = self._renewed_s = float("-inf")
        self.other = ""
        """Who holds it instead."""

    @property
    def uid(self) -> str:
        """Of its object, once that was written."""
        return "" if self._made is None else str(self._made["metadata"]["uid"])

    @property
    def is_held(self) -> bool:
        """Whether writing is right, by this machine's clock alone: others wait longer than this."""
        return time.monotonic() < self._renewed_s + self._duration_s * 2 / 3

    async def acquire(self) -> None:
        """Return when the lease is held."""
        while not await self.attempt():
            await asyncio.sleep(RENEW_S)
        log.info("lease taken", extra={"lease": self._name, "holder": self._holder})

    async def keep(self) -> None:
        """Renew the lease for as long as that is possible.

        Raises:
            LeaseLostError: It was not, so that another may hold it by now.
        """
        while self.is_held:
            await asyncio.sleep(RENEW_S)
            if not await self.attempt() and self.other:
                break
        self._renewed_s = float("-inf")
        raise LeaseLostError(f"lease {self._name}: expected to hold it, got {self.other or 'no answer'}")

    async def release(self) -> None:
        """Let the next one have it at once; nothing must be written afterwards."""
        if self._made is None or not self.is_held:
            return
        self._renewed_s = float("-inf")
        try:
            await self._write({**self._made["spec"], "holderIdentity": ""})
        except ApiError as error:
            log.warning("lease not released, which ends by time", extra={"error": str(error)})

    async def attempt(self) -> bool:
        """Take or renew the lease if that is possible; return whether it is held."""
        asked_s = time.monotonic()
        try:
            await self._take()
        except ConflictError:
            return False
        except RefusedError:
            raise
        except ApiError as error:
            log.warning("lease not renewed", extra={"lease": self._name, "error": str(error)})
            return False
        if self.other:
            return False
        # From when it was asked for: the API server may have counted from then.
        self._renewed_s = asked_s
        return True

    async def _take(self) -> None:
        path = LEASES.path(self._namespace, self._name)
        try:
            self._made = await self._client.get(path)
        except NotFoundError:
            metadata = {"name": self._name, "namespace": self._namespace}
            made = {"apiVersion": LEASES.api, "kind": LEASES.kind, "metadata": metadata, "spec": self._spec({})}
            self._made = await self._client.create(LEASES.path(self._namespace), made)
            self.other = ""
            return
        spec = self._made.get("spec", {})
        holder = spec.get("holderIdentity") or ""
        if (now := (holder, spec.get("renewTime"))) != self._seen:
            self._seen, self._seen_s = now, time.monotonic()
        is_over = time.monotonic() > self._seen_s + spec.get("leaseDurationSeconds", DURATION_S)
        if holder and holder != self._holder and not is_over:
            if holder != self.other:
                log.info("lease is held by another", extra={"lease": self._name, "holder": holder})
            self.other = holder
            return
        await self._write(self._spec(spec))
        self.other = ""

    def _spec(self, before: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_own = before.get("holderIdentity") == self._holder
        return {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": int(self._duration_s),
            "acquireTime": before["acquireTime"] if is_own and "acquireTime" in before else now,
            "renewTime": now,
            "leaseTransitions": before.get("leaseTransitions", 0) + (not is_own and bool(before)),
        }

    async def _write(self, spec: Mapping[str, Any]) -> None:
        assert self._made is not None
        self._made = await self._client.update(
            LEASES.path(self._namespace, self._name), {**self._made, "spec": dict(spec)}
        )
