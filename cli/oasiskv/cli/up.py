"""`oasiskv up`: staging, prefill and decode services of one file on this machine, until ctrl-C."""

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from oasiskv.cli.cluster import Cluster, child_environment
from oasiskv.cli.launch import Request, environment, find_device, prepare
from oasiskv.cli.server import stopped_by_sigterm
from oasiskv.cli.services_file import file_for, split
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import host_memory_limit
from oasiskv.engine.vllm.names import HANDOVER_DEVICES

NUM_POOLS = 3
"""One of each service: that many pools of host memory."""

DEFAULT_HTTP = "127.0.0.1:8000"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv up`."""
    parser = subparsers.add_parser(
        "up", help="start staging, prefill and decode services together, from one file or for a model"
    )
    parser.add_argument(
        "target",
        nargs="?",
        default="smollm2-135m",
        metavar="FILE|MODEL",
        help="a TOML file (docs/design/0004), or a model for which one is made: a folder or a name (%(default)s)",
    )
    parser.add_argument("--stagings", type=int, help="staging services, in the place of [up] in the file")
    parser.add_argument("--prefills", type=int, help="prefill services, in the place of [up] in the file")
    parser.add_argument("--decodes", type=int, help="decode services, in the place of [up] in the file")
    parser.add_argument("--verbose", action="store_true", help="show all of the logs")
    made = parser.add_argument_group("of the file that is made for a model")
    made.add_argument("--print-config", action="store_true", help="print the file and start nothing")
    made.add_argument("--http", default=DEFAULT_HTTP, metavar="HOST:PORT", help="OpenAI's HTTP (%(default)s)")
    made.add_argument("--budget-blocks", type=int, help="resident blocks; default 128, or 1/8 of --max-model-len")
    made.add_argument("--max-model-len", type=int, help="tokens of the longest request")
    made.add_argument("--max-num-seqs", type=int, help="requests at a time in each engine")


def run(args: argparse.Namespace) -> int:
    """Start everything and watch it until interrupted, or print the file."""
    text = config_text(args)
    if args.print_config:
        print(text)
        return 0
    show = timed(_say)
    with TemporaryDirectory(prefix="oasiskv-") as folder, stopped_by_sigterm():
        processes = split(text, Path(folder), stagings=args.stagings, prefills=args.prefills, decodes=args.decodes)
        model = tomllib.loads(text).get("engine", {}).get("model", "")
        child = child_environment(environment(find_device(), 1, os.environ), str(model))
        show(f"starting {', '.join(process.name for process in processes)}")
        with Cluster(processes, child, show, is_verbose=args.verbose) as cluster:
            try:
                cluster.wait_ready()
                for process in cluster.decodes:
                    show(f"ready: {process.name} answers OpenAI's requests at http://{process.http_address}/v1")
                cluster.wait()
            except KeyboardInterrupt:
                show("stopping: decode finishes what it has begun, then prefill and staging end")
                raise


def config_text(args: argparse.Namespace) -> str:
    """Return the file that the command line names, or the one for its model.

    Raises:
        OasisError: there is none, or this machine cannot run it.
    """
    if (device := find_device()) not in HANDOVER_DEVICES:
        raise UnsupportedError(
            f"device: expected {' or '.join(HANDOVER_DEVICES)}, got {device}, where requests are not handed over"
        )
    path = Path(args.target)
    if path.is_file():
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(f"FILE: expected TOML, got {cause}") from cause
    if path.suffix == ".toml":
        raise ConfigError(f"FILE: expected a file, got {path}, which is not there")
    request = Request(
        model=args.target,
        budget_blocks=args.budget_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
    )
    launch = prepare(request, device, _say)
    limit = host_memory_limit()
    share = (limit.max_bytes or limit.mem_total_bytes or 2**33) // 2 // NUM_POOLS
    if launch.plan.config.host_pool_bytes > share:  # each of the three has a pool of that size
        launch = prepare(replace(request, host_memory=str(share)), device, _say)
    return file_for(launch, path.name or args.target, args.http)


def timed(show: Callable[[str], None]) -> Callable[[str], None]:
    """Put the seconds since now before every line."""
    started = time.monotonic()
    return lambda line: show(f"[{time.monotonic() - started:4.0f} s] {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
