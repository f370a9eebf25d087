"""What block keys callers may use, and how tenants are kept apart: each finds its own, whatever keys it knows."""

import hashlib
from collections.abc import Iterable, Sequence

from oasiskv.core.errors import InvalidRequestError, UnsupportedError
from oasiskv.core.lease_limits import MAX_KEY_BYTES

MAX_KEYS = 65536
TENANTS = ("one", "certificate")
PREFIX_BYTES = 16
MAX_TENANT_KEY_BYTES = MAX_KEY_BYTES - PREFIX_BYTES


class Tenants:
    """What the keys of callers are within the service: as they are, or those of the name in their certificate."""

    def __init__(self, setting: str) -> None:
        """Start.

        Args:
            setting: One of `TENANTS`.
        """
        self._is_apart = setting == "certificate"

    def prefix(self, identity: Iterable[bytes] | None) -> bytes:
        """Return what comes before each key of a caller; empty where all callers are one tenant.

        Args:
            identity: Common names in its certificate.

        Raises:
            UnsupportedError: It has none.
        """
        if not self._is_apart:
            return b""
        names = list(identity or ())
        if len(names) != 1 or not names[0]:
            raise UnsupportedError(f"certificate: expected one common name, which is the tenant, got {len(names)}")
        return hashlib.blake2s(names[0], digest_size=PREFIX_BYTES).digest()

    def inside(self, prefix: bytes, block_keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return the service's keys for those of a caller.

        Raises:
            InvalidRequestError: One is empty or too long.
        """
        if not prefix:
            return block_keys
        for block_key in block_keys:
            if not 1 <= len(block_key) <= MAX_TENANT_KEY_BYTES:
                raise InvalidRequestError(
                    f"block_key: expected 1 to {MAX_TENANT_KEY_BYTES} bytes of a tenant, got {len(block_key)}"
                )
        return [prefix + block_key for block_key in block_keys]

    def outside(self, prefix: bytes, block_keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of the service's keys that are a caller's, as it knows them."""
        if not prefix:
            return block_keys
        return [block_key[len(prefix) :] for block_key in block_keys if block_key.startswith(prefix)]


def check_key(block_key: bytes) -> None:
    """Refuse a block key of a wrong length.

    Raises:
        InvalidRequestError: It is empty or too long.
    """
    if not 1 <= len(block_key) <= MAX_KEY_BYTES:
        raise InvalidRequestError(f"block_key: expected 1 to {MAX_KEY_BYTES} bytes, got {len(block_key)}")


def check_keys(block_keys: Sequence[bytes]) -> None:
    """Refuse too many keys, or one of a wrong length; raises InvalidRequestError."""
    check_count("block_keys", len(block_keys), MAX_KEYS)
    for block_key in block_keys:
        check_key(block_key)


def check_count(name: str, number: int, limit: int) -> None:
    """Refuse a list that is longer than any that makes sense.

    Raises:
        InvalidRequestError: It is.
    """
    if number > limit:
        raise InvalidRequestError(f"{name}: expected at most {limit}, got {number}")
