"""vLLM's OpenAI-compatible HTTP server over an engine that a service runs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from oasiskv.core.errors import ConfigError
from oasiskv.engine.vllm.served import ServedEngine


@contextlib.asynccontextmanager
async def http_server(engine: ServedEngine, address: str) -> AsyncIterator[int]:
    """Serve vLLM's routes for the length of a `with` block, and give the port.

    Args:
        engine: Answers.
        address: `host:port`, port 0 for a free one.

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
        server = NoSignalServer(uvicorn.Config(app, log_level="warning", access_log=False))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running
