"""Which operator works in a namespace: a Lease in it, for those of several releases whose scopes overlap."""

import asyncio
import logging

from oasiskv.operator.client import ApiError, Client, ConflictError, RefusedError
from oasiskv.operator.lease import Lease
from oasiskv.operator.resources import LEASES

NAME = "oasiskv-services"
DURATION_S, RENEW_S = 60.0, 15.0
"""Longer than an operator takes to be started anew, so that a namespace stays where it is through an upgrade."""

log = logging.getLogger(__name__)


class Claims:
    """The right to work in namespaces, which an operator takes as it comes to a service there.

    Args:
        client: The API server.
        identity: Of this operator, the same for each process that takes its place: namespace and name of its own lease.
    """

    def __init__(self, client: Client, identity: str) -> None:
        self._client, self.identity = client, identity
        self._leases: dict[str, Lease] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def take(self, namespace: str) -> str:
        """Return who works in a namespace instead of this operator; empty if this one does from now on.

        Raises:
            ConflictError: It is not known yet who does.
            RefusedError: The operator's role does not allow the lease.
        """
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if namespace not in self._leases:
                self._leases[namespace] = Lease(self._client, namespace, NAME, self.identity, DURATION_S)
            lease = self._leases[namespace]
            if lease.is_held or await lease.attempt():
                return ""
        if not lease.other:
            raise ConflictError(f"lease {NAME}: expected to take it, got no answer or another's write")
        return lease.other

    def is_held(self, namespace: str) -> bool:
        """Whether writing in a namespace is right."""
        return namespace in self._leases and self._leases[namespace].is_held

    async def drop(self, namespace: str) -> None:
        """Leave a namespace in which no service is left, and nothing behind in it."""
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if not self.is_held(namespace):
                return
            lease = self._leases.pop(namespace)
            try:
                await self._client.delete(LEASES.path(namespace, NAME), lease.uid)
            except ApiError as error:
                log.info("lease stays", extra={"namespace": namespace, "error": str(error)})

    async def keep(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew what is held; what could not be renewed is asked for again with the next turn there."""
        for namespace, lease in list(self._leases.items()):
            async with self._locks[namespace]:
                if not lease.is_held:
                    continue
                try:
                    await lease.attempt()
                except RefusedError as error:  # as in a namespace that is being deleted
                    log.warning("lease not renewed", extra={"namespace": namespace, "error": str(error)})
