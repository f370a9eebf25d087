"""The one table between errors and gRPC status codes, read in both directions."""

import grpc

from oasiskv.core import errors
from oasiskv.core.errors import OasisError

ERROR_KEY = "oasiskv-error"
"""Key of the trailing metadata that names the class: several share a code, and gRPC itself uses some of the codes."""

CODES: dict[type[OasisError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RequestAbortedError: grpc.StatusCode.CANCELLED,
    errors.EngineFailedError: grpc.StatusCode.INTERNAL,
    errors.BlockNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.LeaseExpiredError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PoolExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PeerUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.TransferTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CorruptBlockError: grpc.StatusCode.DATA_LOSS,
}
CLASSES = {cls.__name__: cls for cls in CODES}
MAX_DETAILS = 1024
LOST_WHILE_SENDING = "Internal error from Core"
"""What grpc.aio says, as INTERNAL and with no code from the other side, when a stream ends under a message it sends."""


TOO_MANY = "Concurrent RPC limit"
"""What gRPC says, as RESOURCE_EXHAUSTED, of a call beyond the number that a server answers at a time."""
TOO_LARGE = "larger than max"
"""In what gRPC says, as RESOURCE_EXHAUSTED, of a message beyond the limit of either side."""


def code_of(error: OasisError) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL for a class that the table lacks."""
    return CODES.get(type(error), grpc.StatusCode.INTERNAL)


def error_of(call: grpc.aio.AioRpcError) -> Exception:
    """Return what a failed call means to its caller: the class that the other side named, or what gRPC's own code says.

    A failure that is a bug of the other side, or of this one, stays the error of gRPC.
    """
    message = call.details() or call.code().name
    for key, name in call.trailing_metadata() or ():
        if key == ERROR_KEY and name in CLASSES:
            return CLASSES[str(name)](message)
    match call.code():
        case grpc.StatusCode.UNAVAILABLE:
            return errors.PeerUnavailableError(f"{message}; it may have acted")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.TransferTimeoutError(f"{message}; it may have acted")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if TOO_LARGE in message:
            return errors.InvalidRequestError(f"message: {message}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if TOO_MANY in message:
            return errors.PoolExhaustedError(f"the service answers as many calls as it may: {message}")
        case grpc.StatusCode.INTERNAL if message == LOST_WHILE_SENDING:
            return errors.PeerUnavailableError("the connection was lost while a message was sent; it may have acted")
        case _:
            return call
