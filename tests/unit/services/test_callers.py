"""Who may make a call that only who runs a service may make."""

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
