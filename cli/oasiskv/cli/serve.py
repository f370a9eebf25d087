"""`oasiskv serve`: vLLM's OpenAI-compatible server with the backend on, planned and checked before anything loads."""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from oasiskv.cli.launch import (
    DRAFTERS,
    Launch,
    Request,
    check_port,
    describe,
    environment,
    find_device,
    prepare,
    value_of,
    wants_own_log,
)
from oasiskv.cli.log import LogReader
from oasiskv.cli.server import KEPT_LINES, STOP_TIMEOUT_S, Server, stopped_by_sigterm
from oasiskv.core.config import LookaheadConfig, parse_bytes
from oasiskv.core.errors import ConfigError
from oasiskv.engine.vllm.api_server import ONLY_CHECK

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model with vLLM's OpenAI-compatible server and the backend on",
        usage="oasiskv serve MODEL [options] [any option of vllm serve]",
        epilog="Options that are not listed here go to vLLM as they are; so give MODEL first.",
        # An abbreviation of ours may be the name of one of vLLM's.
        allow_abbrev=False,
    )
    parser.set_defaults(takes_rest=True, rest=[])
    parser.add_argument("model", metavar="MODEL", help="a folder, smollm2-135m, or OWNER/NAME on Hugging Face")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget-tokens", type=int, help="tokens that stay resident per layer and KV head")
    budget.add_argument("--budget-blocks", type=int, help="the same in blocks; default 128, or 1/8 of --max-model-len")
    parser.add_argument("--host-memory", metavar="SIZE", help="host memory for KV of all workers, such as 64GiB")
    parser.add_argument("--drafter", default="none", help=f"what looks ahead: {', '.join(DRAFTERS)}; default none")
    known = ", ".join(LookaheadConfig.__dataclass_fields__)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"any setting of the backend: {known}"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan and vLLM's command line, check both, load nothing"
    )
    parser.add_argument("--verbose", action="store_true", help="show all of vLLM's log")
    engine = parser.add_argument_group("options of vLLM that the plan depends on")
    engine.add_argument("--host")
    engine.add_argument("--port", type=int, default=8000)
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--kv-cache-dtype", "--kv_cache_dtype", default="auto")
    engine.add_argument("--block-size", "--block_size", type=int, default=16)
    engine.add_argument("--max-model-len", "--max_model_len", type=length)
    engine.add_argument("--max-num-seqs", "--max_num_seqs", type=count)
    engine.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, default=1)
    engine.add_argument("--kv-cache-memory-bytes", "--kv_cache_memory_bytes", type=num_bytes)
    engine.add_argument("--gpu-memory-utilization", "--gpu_memory_utilization", type=float, default=0.92)


def count(text: str) -> int:
    """Read a number as vLLM does: `8k` is 8,000, `8K` is 8,192.

    Raises:
        ArgumentTypeError: it is none.
    """
    factor = _SUFFIXES.get(text[-1:], 1)
    with suppress(ValueError, OverflowError):
        return int(text) if factor == 1 else int(float(text[:-1]) * factor)
    raise argparse.ArgumentTypeError(f"expected a number such as 8192, 8K or 8k, got {text!r}")


def length(text: str) -> int:
    """Read a number of tokens as `count` does.

    Raises:
        ArgumentTypeError: it is none, or vLLM's word for as many as fit: the plan needs a number.
    """
    if text == "auto":
        raise argparse.ArgumentTypeError(
            "expected a number such as 8192, 8K or 8k, got 'auto'; leave it out for what the model was made for"
        )
    return count(text)


def num_bytes(text: str) -> int:
    """Read a number of bytes as `count` does, or with its unit: `100GiB`.

    Raises:
        ArgumentTypeError: it is none.
    """
    with suppress(argparse.ArgumentTypeError):
        return count(text)
    with suppress(ConfigError):
        return parse_bytes(text, "")
    raise argparse.ArgumentTypeError(f"expected bytes such as 1073741824, 1G or '1.5GiB', got {text!r}")


def request_of(args: argparse.Namespace) -> Request:
    """Read the command line."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    from_environment = int(space) * 2**30 if space.isdecimal() and int(space) > 0 else None
    return Request(
        model=args.model,
        budget_tokens=args.budget_tokens,
        budget_blocks=args.budget_blocks,
        host_memory=args.host_memory,
        drafter=args.drafter,
        settings=args.set,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        num_workers=args.tensor_parallel_size,
        engine_bytes=from_environment if args.kv_cache_memory_bytes is None else args.kv_cache_memory_bytes,
        utilization=args.gpu_memory_utilization,
        rest=args.rest,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or print the plan."""
    device = find_device()
    request = request_of(args)
    launch = prepare(request, device, _say)
    if args.dry_run:
        print("\n".join(describe(launch)), flush=True)
        _say("\nasking vLLM whether this could start; nothing is loaded")
        check_start(launch, environment(device, request.num_workers, os.environ))
        print(f"\n{shlex.join(launch.vllm_command())}")
        return 0
    if not any(flag.startswith("--uds") for flag in request.rest):
        check_port(request.host, request.port)
    _say("\n".join(describe(launch)[:4]))
    has_own_log = wants_own_log(request.rest, os.environ)
    is_verbose = args.verbose or has_own_log
    child = environment(device, request.num_workers, os.environ, has_own_log=has_own_log)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    show = _say if is_verbose else clock(_say)
    show("starting vLLM")
    has_port = request.port != 0 and not any(flag.startswith("--uds") for flag in request.rest)
    server = Server(
        launch.command(),
        child,
        show,
        is_verbose=is_verbose,
        least_level=level,
        address=(request.host or "127.0.0.1", request.port) if has_port else None,
        stop_timeout_s=STOP_TIMEOUT_S + drain_s(request.rest),
    )
    with stopped_by_sigterm(), server:
        try:
            server.wait()
        except KeyboardInterrupt:
            _say("stopping")
            raise


def check_start(launch: Launch, child: Mapping[str, str]) -> None:
    """Let vLLM read its flags and the model's configuration, and the backend check what it makes of them.

    Raises:
        ConfigError: it could not start; the message is the cause that the server would give.
    """
    done = subprocess.run(
        launch.command(ONLY_CHECK),
        env=dict(child),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        log, lines = LogReader(), done.stdout.splitlines()
        for line in lines:
            log.read(line)
        tail = "\n".join(lines[-KEPT_LINES:])
        raise ConfigError(log.cause or f"vLLM: expected it to take its flags, got {done.returncode} and\n{tail}")


def drain_s(rest: Sequence[str]) -> int:
    """Return how long vLLM lets requests end by themselves once it is told to stop; 0 unless its user wants it."""
    text = value_of(rest, "--shutdown-timeout") or ""
    return int(text) if text.isdecimal() else 0


def clock(show: Callable[[str], None]) -> Callable[[str], None]:
    """Put the seconds since now before every line that is shown until the server is ready."""
    started, is_starting = time.monotonic(), True

    def show_with_time(line: str) -> None:
        nonlocal is_starting
        show(f"[{time.monotonic() - started:4.0f} s] {line}" if is_starting else line)
        is_starting = is_starting and line != "ready"

    return show_with_time


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
