"""vLLM's OpenAI-compatible HTTP server over an engine that a service runs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from oasiskv.core.errors import ConfigError, OasisError, PeerUnavailableError, PoolExhaustedError
from oasiskv.engine.vllm.served import ServedEngine

CLOSE_S = 2
"""Seconds that answers get to end when the server closes; a drain comes before that."""

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
                body = {"error": {"message": str(error), "type": name, "param": None, "code": code}}
                await JSONResponse(body, code, {"Retry-After": "1"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def http_server(engine: ServedEngine, address: str, check_room: Callable[[], None]) -> AsyncIterator[int]:
    """Serve vLLM's routes for the length of a `with` block, and give the port.

    Args:
        engine: Answers.
        address: `host:port`, port 0 for a free one.
        check_room: Raises what a new request is refused with.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), backlog=2048)
    except OSError as cause:
        raise ConfigError(f"http_address: expected one that is free, got {address!r}") from cause
    with listener:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", engine.llm.model_config.model])
        tasks = await engine.llm.get_supported_tasks()
        app = build_app(args, tasks, engine.llm.model_config)
        await init_app_state(engine.llm, app.state, args, tasks)
        gate = Gate(app, check_room)
        settings = uvicorn.Config(gate, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S)
        server = NoSignalServer(settings)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running
