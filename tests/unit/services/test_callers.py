"""Who may make a call that only who runs a service may make."""

import asyncio
import importlib
from typing import Any, cast

import pytest

from oasiskv.core.errors import UnsupportedError
from oasiskv.services.rpc.callers import require_operator


class Caller:
    def __init__(self, peer: str, *names: bytes) -> None:
        self._peer, self._names = peer, names

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, Any]:
        return {"x509_common_name": list(self._names)} if self._names else {}


def check(caller: Caller, *names: str) -> None:
    require_operator(cast(Any, caller), names)


@pytest.mark.parametrize(
    "peer",
    ["ipv4:127.0.0.1:40000", "ipv6:%5B::1%5D:40000", "ipv6:[::1]:1", "ipv6:%5B::ffff:127.0.0.1%5D:1", "unix:/run/s"],
)
def test_without_names_who_calls_from_this_host_may(peer: str) -> None:
    check(Caller(peer))


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:10.0.0.7:40000",
        "ipv6:%5Bfe80::1%5D:1",
        "ipv6:%5B::ffff:10.0.0.7%5D:1",
        "ipv4:127.0.0.1.example:1",
        "",
        "x",
    ],
)
def test_without_names_nobody_else_may(peer: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^caller"):
        check(Caller(peer, b"operator"))


def test_with_names_the_certificate_alone_decides() -> None:
    check(Caller("ipv4:10.0.0.7:1", b"operator"), "operator")
    for names in ((b"engine",), (), (b"operator", b"engine"), (b"\xff",)):
        with pytest.raises(UnsupportedError, match=r"^caller"):
            check(Caller("ipv4:127.0.0.1:1", *names), "operator")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_service_is_drained_by_its_own_host_alone(role: str) -> None:
    drained = []

    class Service:
        def drain(self) -> int:
            drained.append(role)
            return 3

    module = importlib.import_module(f"oasiskv.services.{role}.servicer")
    servicer = getattr(module, f"{role.capitalize()}Servicer")
    stub = servicer.__new__(servicer)
    stub._service = Service()
    with pytest.raises(UnsupportedError, match=r"^caller"):
        asyncio.run(stub.Drain(None, Caller("ipv4:10.0.0.7:40000")))
    assert not drained
    assert asyncio.run(stub.Drain(None, Caller("ipv4:127.0.0.1:40000"))).num_requests == 3
