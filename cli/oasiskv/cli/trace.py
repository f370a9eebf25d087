"""`oasiskv trace`: which blocks a request selects step by step, recorded from a model or generated to fit figures."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oasiskv.cli.evaluate import make_windows
from oasiskv.cli.launch import Launch, Request, check_context, environment, find_device, prepare, told_as
from oasiskv.cli.offline import Offline
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import size
from oasiskv.core.trace import SelectionTrace, load_trace, save_trace, trace_stats
from oasiskv.core.trace_model import FITS, generate_trace

BLOCK_SIZE = 16


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv trace`."""
    parser = subparsers.add_parser("trace", help="record, generate or describe which blocks requests select")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    record = actions.add_parser("record", help="from a model that reads a text, on vLLM's CPU build")
    record.add_argument("--model", default="smollm2-135m", help="a folder or a known name (%(default)s)")
    record.add_argument("--context", type=int, default=4096, help="tokens of the prompt (%(default)s)")
    record.add_argument("--steps", type=int, default=128, help="decode steps, forced along the text (%(default)s)")
    record.add_argument("--budget-blocks", type=int, help="resident blocks; default an eighth of the context")
    record.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the backend")
    record.add_argument("--text", type=Path, help="plain text; default: Ruth and Samuel")
    generate = actions.add_parser("generate", help="from random numbers, so that published figures come out")
    generate.add_argument("--fit", choices=FITS, default="32k", help="length of the prompt (%(default)s)")
    generate.add_argument("--layers", type=int, default=4, help="each made on its own (%(default)s)")
    generate.add_argument("--steps", type=int, default=2048, help="decode steps (%(default)s)")
    generate.add_argument("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    for action in (record, generate):
        action.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the trace goes (.npz)")
    stats = actions.add_parser("stats", help="what a trace is like")
    stats.add_argument("trace", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Make or read a trace and print its statistics.

    Raises:
        ConfigError: a number or a file is wrong.
        UnsupportedError: the engine is one whose steps cannot be forced.
        EngineFailedError: the engine failed.
    """
    if args.action == "record":
        _record(args)
    elif args.action == "generate":
        save_trace(generate_trace(args.fit, num_layers=args.layers, num_steps=args.steps, seed=args.seed), args.out)
    path: Path = args.trace if args.action == "stats" else args.out
    print(f"file      {path}, {size(path.stat().st_size)}" if path.is_file() else f"file      {path}")
    for line in stats_lines(load_trace(path)):
        print(line)
    return 0


def stats_lines(trace: SelectionTrace) -> Iterator[str]:
    """Yield what a person wants to know of a trace; published figures beside those of one that was made for them."""
    stats = trace_stats(trace)
    fit = next((fit for name, fit in FITS.items() if trace.source.startswith(f"generated to fit {name}")), None)
    published = dict(fit.published) if fit is not None else {}

    def beside(field: str) -> str:
        return f" (published: {published[field]:g})" if field in published else ""

    yield f"source    {trace.source}"
    yield (
        f"shape     {stats.num_steps} steps, {stats.num_layers} layers, {stats.num_kv_heads} KV heads, budget "
        f"{stats.budget_blocks}; prompt {trace.num_tokens} tokens in {stats.num_prompt_blocks} blocks"
    )
    first = f"{stats.first_union:.1f} blocks at first{beside('first_union')}"
    yield f"union     over heads: {first}, {stats.union:.1f} a step"
    yield f"drift     {stats.drift:.2f} of {stats.budget_blocks} blocks a head and step{beside('drift')}"
    yield f"reuse     {100 * stats.reuse:.1f} % of a selection was selected the step before"
    yield (
        f"touched   {stats.touched:.0f} of the prompt's blocks in a layer{beside('touched')}, "
        f"{100 * stats.touched_share:.1f} %"
    )
    yield "These are statistics of a trace, not results of a model."


def _record(args: argparse.Namespace) -> None:
    device = find_device()
    if device != "cpu":
        raise UnsupportedError(f"trace record: expected vLLM's CPU build, got {device}")
    for name, least in (("context", 32), ("steps", 2)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    request = Request(
        model=args.model,
        budget_blocks=args.context // 8 // BLOCK_SIZE if args.budget_blocks is None else args.budget_blocks,
        settings=[*args.set, "switch=early"],
        max_model_len=-(-(args.context + args.steps + 2) // BLOCK_SIZE) * BLOCK_SIZE,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
    )
    check_context(request, args.context, args.steps + 2, _say)
    with told_as("--context", "--max-model-len"):
        launch = prepare(request, device, _say)
    (prompt,) = make_windows(launch.model.path, args.text, args.context, args.steps + 1, 1)
    name, text = Path(launch.model.path).name, "Ruth and Samuel" if args.text is None else args.text.name
    source = f"recorded from {name} reading {text}, {launch.plan.pools.shape.dtype} on a CPU"
    child = {**environment(device, 1, os.environ), "HF_HUB_OFFLINE": "1"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with Offline(_engine(launch), [prompt], child, trace=str(args.out.resolve()), source=source) as job:
        job.wait()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _engine(launch: Launch) -> dict[str, Any]:
    pools = launch.plan.pools
    return {
        "model": launch.model.path,
        "dtype": pools.shape.dtype,
        "max_model_len": pools.max_model_len,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "kv_cache_memory_bytes": (pools.longest_blocks + 8) * pools.block_bytes,
        **launch.engine_arguments(),
    }
