"""vLLM's OpenAI-compatible HTTP server over an engine that a service runs."""

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import APIRouter
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.utils.argparse_utils import FlexibleArgumentParser

from oasiskv.core.errors import ConfigError
from oasiskv.engine.vllm.gate import Gate
from oasiskv.engine.vllm.served import ServedEngine

CLOSE_S = 2
"""Seconds that answers get to end when the server closes; a drain comes before that."""


@contextlib.asynccontextmanager
async def http_server(
    engine: ServedEngine,
    address: str,
    check_room: Callable[[], None],
    *,
    model_name: str = "",
    arguments: Mapping[str, Any] | None = None,
    routers: Sequence[APIRouter] = (),
) -> AsyncIterator[int]:
    """Serve vLLM's routes for the length of a `with` block, and give the port.

    Args:
        engine: Answers.
        address: `host:port`, port 0 for a free one.
        check_room: Raises what a new request is refused with.
        model_name: What requests call the model; empty for the engine's word.
        arguments: Further options of vLLM's server by their names.
        routers: Routes beside vLLM's.

    Raises:
        ConfigError: The address cannot be listened on, or an option is one that vLLM does not take.
    """
    host, _, port = address.rpartition(":")
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), backlog=2048)
    except OSError as cause:
        raise ConfigError(f"http_address: expected one that is free, got {address!r}") from cause
    with listener:
        args = server_arguments(engine.llm.model_config.model, model_name, arguments or {})
        tasks = await engine.llm.get_supported_tasks()
        app = build_app(args, tasks, engine.llm.model_config)
        for router in routers:
            app.include_router(router)
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


def server_arguments(model: str, model_name: str, others: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options of vLLM's server; those of the engine among them have no effect.

    Args:
        model: As the engine has it.
        model_name: What requests call it; empty for the same.
        others: Options by their names.

    Raises:
        ConfigError: vLLM does not take one.
    """
    words = ["--model", model, *(["--served-model-name", model_name] if model_name else [])]
    for name, value in others.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    try:
        args, unknown = parser.parse_known_args(words)
    except (argparse.ArgumentError, ValueError) as cause:
        raise ConfigError(f"http_arguments: {cause}") from cause
    except SystemExit as cause:  # argparse wrote what is wrong
        raise ConfigError(f"http_arguments: expected options of vLLM's server, got {dict(others)}") from cause
    if unknown:
        raise ConfigError(f"http_arguments: expected options of vLLM's server, got {unknown[0]}")
    return args
