"""What happens around every call of a server: a time limit, metrics, a span, and errors as status codes."""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from oasiskv.core.errors import InvalidRequestError, OasisError, TransferTimeoutError
from oasiskv.services.rpc.metrics import ServerMetrics
from oasiskv.services.rpc.status import ERROR_KEY, MAX_DETAILS, code_of
from oasiskv.services.tracing import server_span

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Observe = Callable[[Context], AbstractContextManager[None]]


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that take too long, and maps errors by the one table; what is no OasisError is logged and INTERNAL."""

    def __init__(self, max_call_s: float, unlimited: frozenset[str], metrics: ServerMetrics) -> None:
        """Start.

        Args:
            max_call_s: Longest time of a call, whatever deadline its caller sets.
            unlimited: Full names of methods that may last as long as their caller likes, `/package.Service/Method`.
            metrics: Where calls are counted.
        """
        self._metrics = metrics
        self._max_call_s = max_call_s
        self._unlimited = unlimited
        self._handlers: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call with the edge around it."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known, edged = self._handlers.get(method, (None, None))
        if known is not handler:
            # Servicers' handlers stay the same, so each is wrapped once.
            edged = self._around(handler, method)
            self._handlers[method] = (handler, edged)
        return edged

    def _around(self, handler: Any, method: str) -> Any:
        max_s = None if method in self._unlimited else self._max_call_s
        observe = partial(self._observe, method, handler.response_streaming)
        serializers = (_tolerant(handler.request_deserializer), handler.response_serializer)
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                unary = _unary(handler.unary_unary, method, max_s, observe)
                return grpc.unary_unary_rpc_method_handler(unary, *serializers)
            case True, False:
                unary = _unary(handler.stream_unary, method, max_s, observe)
                return grpc.stream_unary_rpc_method_handler(unary, *serializers)
            case False, True:
                stream = _stream(handler.unary_stream, method, max_s, observe)
                return grpc.unary_stream_rpc_method_handler(stream, *serializers)
            case _:
                stream = _stream(handler.stream_stream, method, max_s, observe)
                return grpc.stream_stream_rpc_method_handler(stream, *serializers)

    @contextmanager
    def _observe(self, method: str, is_stream: bool, context: Context) -> Iterator[None]:
        """Count a call, and be in its span."""
        start_s = time.perf_counter()
        result = "ok"
        with server_span(method, context.invocation_metadata(), is_stream) as span:
            try:
                yield
            except Exception as error:
                result = _name_of(error)
                raise
            except BaseException:
                result = "cancelled"
                raise
            finally:
                self._metrics.count(method, result, time.perf_counter() - start_s)
                if result != "ok":
                    span.set_attribute("error.type", result)


def _unary(
    behaviour: Callable[..., Awaitable[Any]], method: str, max_s: float | None, observe: Observe
) -> Callable[..., Awaitable[Any]]:
    async def handle(request: Any, context: Context) -> Any:
        try:
            with observe(context):
                async with asyncio.timeout(max_s):
                    return await behaviour(_checked(request), context)
        except Exception as error:
            await _abort(context, method, error)

    return handle


def _stream(
    behaviour: Callable[..., AsyncIterator[Any]], method: str, max_s: float | None, observe: Observe
) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            responses = behaviour(_checked(request), context)
        except InvalidRequestError as error:
            await _abort(context, method, error)
            return
        try:
            with observe(context):
                async with asyncio.timeout(max_s):
                    async for response in responses:
                        yield response
        except Exception as error:
            await _abort(context, method, error)
        finally:
            # A generator that is left in the middle would keep the blocks that it holds until it is collected.
            await responses.aclose()  # type: ignore[attr-defined]

    return handle


def _tolerant(deserialize: "Callable[[bytes], Any] | None") -> "Callable[[bytes], Any] | None":
    """Pass on what cannot be decoded, for `_checked` to refuse: gRPC itself would call it INTERNAL, a bug of ours."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return decode


def _checked(request: Any) -> Any:
    """Return the message, or the stream of them, unless it could not be decoded."""
    if isinstance(request, DecodeError):
        raise InvalidRequestError(f"message: expected one of the contract, got other bytes: {request}")
    return _checked_stream(request) if isinstance(request, AsyncIterable) else request


async def _checked_stream(requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _name_of(error: Exception) -> str:
    """Return the class that the caller is told; INTERNAL for a bug."""
    if isinstance(error, TimeoutError):
        return TransferTimeoutError.__name__
    return type(error).__name__ if isinstance(error, OasisError) else "INTERNAL"


async def _abort(context: Context, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, TimeoutError):
        error = TransferTimeoutError(
            f"{method}: expected an end within the limit of the service, got none; it has stopped"
        )
    if isinstance(error, OasisError):
        metadata = ((ERROR_KEY, type(error).__name__),)
        await context.abort(code_of(error), str(error)[:MAX_DETAILS], metadata)
    logger.error("%s failed by a bug of this service", method, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "a bug of the service; its log says more")
