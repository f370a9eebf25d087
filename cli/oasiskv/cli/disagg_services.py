"""`oasiskv bench disagg --model`: real services on one machine, real prompts, by the way in which they are handed over.

Staging hands its memory to nobody, so every byte crosses a socket as it would between hosts.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from oasiskv.cli.client import read_metrics
from oasiskv.cli.cluster import Cluster, child_environment
from oasiskv.cli.disagg_report import lines_of
from oasiskv.cli.evaluate import make_windows
from oasiskv.cli.launch import Launch, Request, environment, find_device, prepare
from oasiskv.cli.services_file import Process, file_for, split, toml
from oasiskv.core.errors import EngineFailedError, UnsupportedError
from oasiskv.engine.vllm.offline import Prompt
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2 as pb
from oasiskv.services.rpc.status import error_of

Row = dict[str, Any]
MIB = 2**20
BLOCK_SIZE = 16

POLL_S = 0.25
"""Between two looks at what has crossed."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What was seen of a decode service while it answered."""

    times_s: list[float] = field(default_factory=list)
    fetched_bytes: list[int] = field(default_factory=list)
    """From staging since the first look, at each time."""
    host_blocks: int = 0
    """Most that requests held at a time."""


def measure(args: argparse.Namespace, modes: Sequence[tuple[str, Row]]) -> Row:
    """Answer the same prompts in every mode, with services started anew for each.

    Args:
        args: Of the command line.
        modes: Names and settings of the backend.

    Returns:
        What goes into the report.

    Raises:
        OasisError: A service did not start, or a request failed.
    """
    if (device := find_device()) != "cpu":
        raise UnsupportedError(f"--model: expected vLLM's CPU build, which hands requests over, got {device}")
    rows = []
    for name, settings in modes:
        launch = _prepare(args, settings)
        prompts = make_windows(launch.model.path, None, args.context, args.tokens, args.requests)
        row = _served(launch, prompts, args)
        rows.append({"mode": name, "model": Path(launch.model.path).name, **row})
        print(f"{name}: first token after {row['ttft_s']:.2f} s", flush=True)
    print(table(rows))
    return {
        "what": "real services with vLLM engines on one machine, bytes over TCP; weights as in the model's folder",
        "context": args.context,
        "tokens": args.tokens,
        "rows": rows,
    }


def table(rows: Sequence[Row]) -> str:
    """Return one line per mode."""
    forms = {"full_mib": "{:.2f}", "admitted_mib": "{:.2f}", "missed_mib": "{:.2f}", "total_mib": "{:.2f}"}
    forms |= {"host_mib": "{:.2f}", "ttft_s": "{:.2f}", "net_mb_per_s_peak": "{:.1f}", "handovers": "{}"}
    return lines_of(rows, {"mode": "{}", "requests": "{}", **forms})


def _prepare(args: argparse.Namespace, settings: Row) -> Launch:
    request = Request(
        model=args.model,
        budget_blocks=max(2, args.context // 8 // BLOCK_SIZE),
        settings=[f"{name}={value}" for name, value in {**settings, "switch": "early"}.items()],
        max_model_len=-(-(args.context + args.tokens + 2) // BLOCK_SIZE) * BLOCK_SIZE,
        max_num_seqs=args.concurrency,
        block_size=BLOCK_SIZE,
    )
    launch = prepare(request, "cpu", _say)
    if settings["handover_mode"] == "dense":  # all of every request in the engine
        pools = launch.plan.pools
        engine_bytes = (args.concurrency * pools.longest_blocks + 8) * pools.block_bytes
        launch = prepare(replace(request, engine_bytes=engine_bytes), "cpu", _say)
    return launch


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def serving(launch: Launch, concurrency: int) -> Iterator[Process]:
    """Start one of each service, with bytes over TCP, and yield decode once it is ready.

    Args:
        launch: The plan of each engine.
        concurrency: Requests at a time, for which staging is large enough.
    """
    tables = tomllib.loads(file_for(launch, "model", "127.0.0.1:0"))
    pools = launch.plan.pools
    # All requests at a time and one that ends: their blocks, and beside them no more pages and maps than blocks.
    pool_bytes = (concurrency + 1) * 2 * (pools.longest_blocks + 2) * pools.block_bytes
    tables["staging"] |= {"locality": "remote", "transport": "tcp", "pool_bytes": pool_bytes}
    child = child_environment(environment("cpu", 1, os.environ), launch.model.path)
    with (
        TemporaryDirectory(prefix="oasiskv-") as folder,
        Cluster(split(toml(tables), Path(folder)), child, _say) as cluster,
    ):
        cluster.wait_ready()
        (decode,) = cluster.decodes
        yield decode


def _served(launch: Launch, prompts: Sequence[Prompt], args: argparse.Namespace) -> Row:
    with serving(launch, args.concurrency) as decode:
        waits, before, after, traffic = asyncio.run(_ask(decode, prompts, args.concurrency))
    count, pools = len(prompts), launch.plan.pools
    if after.num_handovers_total - before.num_handovers_total != count:
        raise EngineFailedError(
            f"handovers: expected {count}, got another number; some prompts were computed by decode"
        )

    def mib(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name)) / count / MIB

    windows = _windows(traffic)
    return {
        "requests": count,
        "handovers": count,
        "full_mib": mib("full_bytes_total"),
        "admitted_mib": mib("admitted_bytes_total"),
        "missed_mib": mib("missed_bytes_total"),
        "total_mib": mib("admitted_bytes_total") + mib("missed_bytes_total"),
        "host_mib": traffic.host_blocks * pools.block_bytes / MIB,
        "ttft_s": statistics.median(waits),
        "net_mb_per_s_peak": max(windows),
        "network_mb_per_s": windows,
    }


async def _ask(decode: Process, prompts: Sequence[Prompt], concurrency: int) -> tuple[list[float], Any, Any, Traffic]:
    """Return the seconds to each first token, the service's counts before and after, and what was seen between."""
    places = asyncio.Semaphore(concurrency)
    address = tomllib.loads(decode.config)["decode"]["address"]
    port = int(decode.http_address.rpartition(":")[2])
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = decode_pb2_grpc.DecodeStub(channel)
        before = await stub.Stats(decode_pb2.StatsRequest())
        traffic = Traffic()
        watching = asyncio.create_task(_watch(stub, port, traffic))
        try:
            waits = await asyncio.gather(*(_generate(stub, prompt, places) for prompt in prompts))
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        finally:
            await asyncio.sleep(POLL_S)  # one more look
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return list(waits), before, await stub.Stats(decode_pb2.StatsRequest()), traffic


async def _generate(stub: Any, prompt: Prompt, places: asyncio.Semaphore) -> float:
    request = decode_pb2.GenerateRequest(
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt.token_ids)),
        sampling=pb.Sampling(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=True),
    )
    async with places:
        started, first = time.perf_counter(), 0.0
        async for response in stub.Generate(request):
            if response.token_ids and not first:
                first = time.perf_counter() - started
        return first


async def _watch(stub: Any, port: int, traffic: Traffic) -> None:
    started = time.perf_counter()
    while True:
        stats = await stub.Stats(decode_pb2.StatsRequest())
        traffic.times_s.append(time.perf_counter() - started)
        traffic.fetched_bytes.append(stats.admitted_bytes_total + stats.missed_bytes_total)
        held = (await asyncio.to_thread(read_metrics, port)).get("oasiskv_host_blocks_held", 0)
        traffic.host_blocks = max(traffic.host_blocks, int(held))
        await asyncio.sleep(POLL_S)


def _windows(traffic: Traffic, window_s: float = 1.0) -> list[float]:
    """Return MB/s second by second."""
    windows = [0.0] * (int(traffic.times_s[-1] / window_s) + 1)
    pairs = zip(traffic.times_s[1:], traffic.fetched_bytes, traffic.fetched_bytes[1:], strict=False)
    for at_s, before, after in pairs:
        windows[int(at_s / window_s)] += (after - before) / 1e6 / window_s
    return [round(value, 3) for value in windows]
