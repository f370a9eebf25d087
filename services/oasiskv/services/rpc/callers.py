"""Who calls: what a server can tell of the other end of a connection without taking its word."""

import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

import grpc

from oasiskv.core.errors import UnsupportedError


def require_operator(context: "grpc.aio.ServicerContext[Any, Any]", names: Collection[str]) -> None:
    """Refuse a call that only who runs the service may make.

    Args:
        context: Of the call.
        names: Common names of certificates that may; none for callers on this host.

    Raises:
        UnsupportedError: The caller is somebody else; nothing was done.
    """
    if names:
        found = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name") or ()]
        if len(found) != 1 or found[0] not in names:
            raise UnsupportedError(f"caller: expected a certificate that the service names for this, got {found}")
    elif not _is_local(context.peer()):
        raise UnsupportedError("caller: expected one on the host of the service, by its loopback address")


def _is_local(peer: str) -> bool:
    """Return whether an address as gRPC writes it is of this host alone: `ipv4:127.0.0.1:80`, `ipv6:[::1]:80`."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
