"""Stands before vLLM's HTTP server and refuses new requests while none are taken."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse

from oasiskv.core.errors import OasisError, PeerUnavailableError, PoolExhaustedError

STATUS: dict[type[OasisError], int] = {PeerUnavailableError: 503, PoolExhaustedError: 429}
"""Of a request that is refused before it begins."""

Handler = Callable[[Any, Any, Any], Awaitable[None]]


class Gate:
    """Refuses what is sent while nothing is taken, before vLLM sees it; what is only asked for is answered.

    Args:
        app: Whom it stands before.
        check_room: Raises what a new request is refused with.
    """

    def __init__(self, app: Handler, check_room: Callable[[], None]) -> None:
        self._app = app
        self._check_room = check_room

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            try:
                self._check_room()
            except OasisError as error:
                name, code = type(error).__name__, STATUS.get(type(error), 500)
                body: dict[str, Any] = {"error": str(error), "type": name}  # as the Open Inference Protocol has it
                if not scope["path"].startswith("/v2/"):
                    body = {"error": {"message": str(error), "type": name, "param": None, "code": code}}
                await JSONResponse(body, code, {"Retry-After": "1"})(scope, receive, send)
                return
        await self._app(scope, receive, send)
