"""Every error that OasisKV raises on purpose, and whether trying again can help; edges map these to their own codes."""

from typing import ClassVar


class OasisError(Exception):
    """Root of all errors raised on purpose."""

    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without a change by the caller."""


class ConfigError(OasisError):
    """A documented requirement on a setting is broken; the message starts with the setting's name."""


class InvalidRequestError(OasisError):
    """A documented requirement on a request is broken; the message starts with the field's name."""


class UnsupportedError(OasisError):
    """A model, device, engine version or combination of settings that OasisKV does not handle."""


class RequestAbortedError(OasisError):
    """Somebody other than the caller ended the request."""


class EngineFailedError(OasisError):
    """The engine's process ended by itself; the message is the cause that it gave, or the end of its log."""


class BlockNotFoundError(OasisError):
    """No tier holds the block."""


class LeaseExpiredError(OasisError):
    """The lease ended, so the blocks may hold other data by now; take a new lease."""


class PoolExhaustedError(OasisError):
    """Nothing is free or evictable; nothing was taken."""

    retryable = True


class PeerUnavailableError(OasisError):
    """A peer does not answer; the message says whether it may have acted."""

    retryable = True


class TransferTimeoutError(OasisError):
    """A transfer did not end in time; the message says whether it may still write."""

    retryable = True


class CorruptBlockError(OasisError):
    """Checksum or generation differ; the copy was dropped, so the caller recomputes."""
