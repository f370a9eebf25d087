"""The process that `oasiskv serve` starts: vLLM's own API server, which ends with the process that started it."""

import os
import signal
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from oasiskv.core.errors import ConfigError

ONLY_CHECK = "only-check"

POLL_S = 1.0
STOP_TIMEOUT_S = 10.0

HANG_UP_S = 1
"""Time that running requests have once the engine stopped: it makes no more tokens, so nothing but errors can come."""


def end_with_parent() -> None:
    """End this process's group once its parent is gone, killed perhaps, so that no engine stays behind.

    A signal at the parent's death would not do: while vLLM loads, its main thread takes none for a long time.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os.killpg(0, signal.SIGTERM)
        time.sleep(STOP_TIMEOUT_S)
        kill_group(os.getpgrp())

    threading.Thread(target=watch, name="oasiskv-parent", daemon=True).start()


def kill_group(group: int) -> None:
    """Kill a group of processes, this one last if it belongs to it, but for the trackers of Python's multiprocessing.

    A tracker unlinks the group's shared memory once nobody else is left, and then ends by itself.
    """
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            is_tracker = b"multiprocessing.resource_tracker" in (folder / "cmdline").read_bytes()
            if os.getpgid(pid) == group and not is_tracker:
                members.append(pid)
    for pid in sorted(members, key=os.getpid().__eq__):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_is_one_server(args: Namespace) -> None:
    """Refuse what makes other servers of vLLM's own command, and would be left out here without a word.

    Args:
        args: As vLLM read them.

    Raises:
        ConfigError: there is such a flag.
    """
    way_out = "`vllm serve` takes it, with the flags that --dry-run shows"
    if args.api_server_count not in (None, 1):
        raise ConfigError(f"--api-server-count: expected 1, got {args.api_server_count}; {way_out}")
    for flag, is_given in (
        ("--headless", args.headless),
        ("--grpc", args.grpc),
        ("--data-parallel-multi-port-external-lb", args.data_parallel_multi_port_external_lb),
    ):
        if is_given:
            raise ConfigError(f"{flag}: expected it not to be given, got it; {way_out}")


def main() -> None:
    """Run vLLM's server with this process's arguments, or with `only-check` before them say whether one would start.

    In two things it is not as vLLM's: it checks what the backend can serve before it starts an engine, and when it is
    told to stop it hangs up on its clients, for whom vLLM waits without an end, and has no flag for that.
    """
    is_check = sys.argv[1:2] == [ONLY_CHECK]
    if is_check:
        del sys.argv[1]
    else:
        end_with_parent()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.usage.usage_lib import UsageContext

    from oasiskv.engine.vllm import settings

    class CheckedEngineArgs(AsyncEngineArgs):
        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super().create_engine_config(*args, **kwargs)
            settings.check(config)
            return config

    run_server = entry.run_server

    async def check_or_serve(args: Namespace) -> None:
        check_is_one_server(args)
        if is_check:
            CheckedEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
        else:
            await run_server(args, timeout_graceful_shutdown=HANG_UP_S)

    entry.AsyncEngineArgs, entry.run_server = CheckedEngineArgs, check_or_serve
    entry.main()


if __name__ == "__main__":
    main()
