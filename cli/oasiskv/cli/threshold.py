"""`oasiskv bench threshold`: up to which length prompts are better computed where they are decoded.

Real services answer the same kind of prompt both ways: handed over from a prefill service, and computed by decode.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from typing import Any

import grpc

from oasiskv.cli.disagg_report import lines_of
from oasiskv.cli.disagg_services import serving
from oasiskv.cli.evaluate import make_windows
from oasiskv.cli.launch import Request, find_device, prepare
from oasiskv.cli.server import stopped_by_sigterm
from oasiskv.cli.services_file import Process
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2 as pb
from oasiskv.services.rpc.status import error_of

Row = dict[str, Any]
TOKENS = 4
"""Of each answer; the second one is the first that decode makes after a handover."""

BLOCK_SIZE = 16


def run(args: argparse.Namespace) -> int:
    """Measure, print a table and a suggestion, and write `threshold-<date>-<cores>.json`.

    Raises:
        OasisError: Something could not be measured; nothing is written.
    """
    if not args.lengths or min(args.lengths) < 1 or args.repeats < 1:
        raise ConfigError("--lengths, --repeats: expected numbers of at least 1")
    if (device := find_device()) != "cpu":
        raise UnsupportedError(f"bench threshold: expected vLLM's CPU build, which hands requests over, got {device}")
    lengths = sorted(set(args.lengths))
    request = Request(
        model=args.model,
        budget_blocks=args.budget_blocks,
        settings=["switch=early"],
        max_model_len=-(-(lengths[-1] + TOKENS + 2) // BLOCK_SIZE) * BLOCK_SIZE,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
    )
    launch = prepare(request, "cpu", lambda line: print(line, file=sys.stderr))
    with stopped_by_sigterm(), serving(launch, 1) as decode:
        rows = asyncio.run(_measure(decode, launch.model.path, lengths, args.repeats))
    print(table(rows))
    print(f"local_prompt_tokens = {suggested(rows)}  # of [decode], by the second token")
    today, num_cpus = datetime.datetime.now(datetime.UTC).date().isoformat(), len(os.sched_getaffinity(0))
    report = {
        "date": today,
        "command": "oasiskv " + " ".join(sys.argv[1:]),
        "hardware": f"{num_cpus} cores of a server CPU",
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()},
        "budget_blocks": launch.plan.config.budget_blocks,
        "suggested": suggested(rows),
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"threshold-{today}-{num_cpus}-cores.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)
    return 0


def suggested(rows: Sequence[Row]) -> int:
    """Return the longest prompt up to which computing it locally gave the second token no later; 0 if none did.

    Args:
        rows: `length`, `local_second_s` and `remote_second_s`, which is None where nothing was handed over.
    """
    found = 0
    for row in sorted(rows, key=lambda row: row["length"]):
        if row["remote_second_s"] is not None:
            if row["local_second_s"] > row["remote_second_s"]:
                break
            found = row["length"]
    return found


def table(rows: Sequence[Row]) -> str:
    """Return one line per length."""
    names = ("local_first_s", "remote_first_s", "local_second_s", "remote_second_s")
    return lines_of(rows, {"length": "{}", **dict.fromkeys(names, "{:.3f}")})


async def _measure(decode: Process, model: str, lengths: Sequence[int], repeats: int) -> list[Row]:
    rows = []
    async with grpc.aio.insecure_channel(tomllib.loads(decode.config)["decode"]["address"]) as channel:
        stub: Any = decode_pb2_grpc.DecodeStub(channel)
        try:
            await _times(stub, make_windows(model, None, lengths[0], TOKENS, 1)[0].token_ids, is_local=True)
            for length in lengths:
                # A prompt of its own each time, since staging would still have the blocks of an earlier one.
                prompts = [one.token_ids for one in make_windows(model, None, length, TOKENS, 2 * repeats + 1)]
                before = (await stub.Stats(decode_pb2.StatsRequest())).num_handovers_total
                await _times(stub, prompts.pop(), is_local=False)  # the first of a length takes longer
                times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
                for number, prompt in enumerate(prompts):
                    times[number % 2 == 0].append(await _times(stub, prompt, is_local=number % 2 == 0))
                handed = (await stub.Stats(decode_pb2.StatsRequest())).num_handovers_total - before
                rows.append(_row(length, times, has_remote=handed == repeats + 1))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
    return rows


def _row(length: int, times: dict[bool, list[tuple[float, float]]], *, has_remote: bool) -> Row:
    row: Row = {"length": length}
    for name, is_local in (("local", True), ("remote", False)):
        for place, what in enumerate(("first", "second")):
            is_there = is_local or has_remote
            value = statistics.median(pair[place] for pair in times[is_local]) if is_there else None
            row[f"{name}_{what}_s"] = value
    return row


async def _times(stub: Any, ids: Sequence[int], *, is_local: bool) -> tuple[float, float]:
    """Return the seconds to the first and to the second token of an answer."""
    request = decode_pb2.GenerateRequest(
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)),
        # What depends on earlier tokens is never handed over.
        sampling=pb.Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, min_tokens=1 if is_local else None),
    )
    started, seen, times = time.perf_counter(), 0, list[float]()
    async for response in stub.Generate(request):
        seen += len(response.token_ids)
        while len(times) < min(seen, 2):
            times.append(time.perf_counter() - started)
    return times[0], times[1]
