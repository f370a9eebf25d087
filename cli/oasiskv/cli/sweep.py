"""`oasiskv bench sweep`: decode steps of dense vLLM and of OasisKV over contexts and concurrency, in one file.

Every (mode, context) has an engine process of its own, `oasiskv.engine.vllm.rounds`. Each round is written to the file
as soon as it is over, and one that the file already has is not run again, so a sweep may be cut off at any time.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oasiskv.cli.plots import draw
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, EngineFailedError
from oasiskv.engine.vllm.names import CONNECTOR, VLLM_VERSION, WORKERS

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to serve the same requests."""

    settings: Mapping[str, Any] | None = None
    """Of the backend; None is stock vLLM."""
    has_drafter: bool = False
    """Whether a drafter runs, if one is given."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `LLM`."""


MODES = {
    "dense": Mode(),
    "dense-drafter": Mode(has_drafter=True),
    "dense-fp8": Mode(engine={"kv_cache_dtype": "fp8"}),
    "oasiskv": Mode(settings={}, has_drafter=True),
    "oasiskv-self": Mode(settings={}),
    "oasiskv-fp8": Mode(settings={"host_dtype": "fp8"}, has_drafter=True),
    "oasiskv-kv-fp8": Mode(settings={}, has_drafter=True, engine={"kv_cache_dtype": "fp8"}),
    "oasiskv-early": Mode(settings={"switch": "early"}, has_drafter=True),
    "oasiskv-joined": Mode(settings={"switch": "early", "signal": "joined"}, has_drafter=True),
    "oasiskv-flags": Mode(settings={"switch": "early", "signal": "flags"}, has_drafter=True),
    "oasiskv-auto-cap": Mode(settings={"cap": "auto"}, has_drafter=True),
    "previous": Mode(settings={"switch": "early", "prediction": "previous"}),
    "on-demand": Mode(settings={"switch": "early", "prediction": "on-demand", "fetch_ratio": 1}),
    "resident": Mode(settings={"switch": "early", "prediction": "resident"}),
}
"""With `oasiskv-fp8` host units are fp8, with `oasiskv-kv-fp8` vLLM's own cache is, as with `dense-fp8`. The last three
are rules of others on our own kernels: FreeKV's selection with the last token's query, without its correction;
HiSparse's with the current one, all fetched before attention; and Quest's within a fixed set of blocks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `oasiskv bench sweep`."""
    parser.add_argument("model", help="model folder; with --weights dummy its config.json is enough")
    parser.add_argument("--drafter", metavar="FOLDER", help="EAGLE-3 head")
    parser.add_argument("--weights", choices=("auto", "dummy"), default="auto", help="dummy: random ones")
    parser.add_argument("--modes", nargs="+", default=["dense", "oasiskv"], metavar="MODE", help=", ".join(MODES))
    parser.add_argument(
        "--fetch-ratios",
        nargs="+",
        type=float,
        default=[],
        metavar="R",
        help="run each mode of the backend once for each, as MODE@R: 0.01 ... 1, which fetches all",
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384], metavar="N", help="prompt tokens")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 40], metavar="N", help="at a time")
    parser.add_argument("--tokens", type=int, default=70, metavar="N", help="to generate, at least (70)")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the device (0.515 of an H200 is 80 GB)")
    parser.add_argument("--host-memory", default="4GiB", help="for KV, per process (4GiB)")
    parser.add_argument("--set", dest="settings", action="append", type=setting, default=[], metavar="NAME=VALUE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the results, as bench plot does")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="JSON; continued if it is there")


def setting(text: str) -> tuple[str, Any]:
    """Read a setting of the backend; its value is JSON, or else text.

    Raises:
        ConfigError: there is no `=` in it.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set: expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def missing(rows: Sequence[Row], mode: str, context: int, requests: Sequence[int]) -> list[int]:
    """Return the numbers of requests for which there is no row yet."""
    known = {row["requests"] for row in rows if (row["mode"], row["context"]) == (mode, context)}
    return [count for count in requests if count not in known]


def modes_of(args: argparse.Namespace) -> dict[str, Mode]:
    """Return the modes to run by name, those of the backend once for each fetch ratio.

    Raises:
        ConfigError: a mode is unknown.
    """
    modes: dict[str, Mode] = {}
    for name in args.modes:
        if name not in MODES:
            raise ConfigError(f"--modes: expected {', '.join(MODES)}, got {name!r}")
        mode = MODES[name]
        if mode.settings is None or not args.fetch_ratios:
            modes[name] = mode
            continue
        for ratio in args.fetch_ratios:
            # The ratio alone shall count, so nothing holds the cap up.
            settings = {**mode.settings, "fetch_ratio": ratio, "min_cap": 1, "cap": None}
            modes[f"{name}@{ratio:g}"] = replace(mode, settings=settings)
    return modes


def engine_arguments(args: argparse.Namespace, mode: Mode, context: int, *, is_cuda: bool) -> Row:
    """Return the arguments of vLLM's `LLM` for a mode.

    Raises:
        ConfigError: a setting of the backend is wrong.
    """
    drafter = args.drafter if mode.has_drafter else None
    longest = context + args.tokens + 2 * max(args.requests) + 2
    arguments: Row = {
        "model": args.model,
        "load_format": args.weights,
        "skip_tokenizer_init": True,
        "block_size": 16 if is_cuda or mode.settings is not None else 32,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": max(args.requests),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": args.memory_share,
        **mode.engine,
    }
    if is_cuda:
        # Full graphs of exactly the rounds' sizes; with a drafter each request computes two tokens.
        sizes = [(2 if drafter else 1) * count for count in args.requests]
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if drafter:
        arguments["speculative_config"] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 1}
    if mode.settings is not None:
        settings = {"host_pool_bytes": args.host_memory, **mode.settings, **dict(args.settings)}
        LookaheadConfig.from_mapping(settings)
        arguments["worker_cls"] = WORKERS["cuda" if is_cuda else "cpu"]
        arguments["kv_transfer_config"] = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
    return arguments


def run(args: argparse.Namespace) -> int:
    """Run the rounds that the file does not hold yet, and print the table.

    Raises:
        ConfigError: a mode or a setting is unknown.
        EngineFailedError: an engine ended by itself; the rounds before it are kept.
    """
    import torch

    modes = modes_of(args)
    is_cuda = torch.cuda.is_available()
    report: Row = json.loads(args.results.read_text()) if args.results.exists() else _about(args, is_cuda=is_cuda)
    for context in args.contexts:
        for name, mode in modes.items():
            if counts := missing(report["rows"], name, context, args.requests):
                engine = engine_arguments(args, mode, context, is_cuda=is_cuda)
                for row in _rounds(args, engine, context, counts):
                    report["rows"].append({"mode": name, "context": context, **row})
                    _save(args.results, report)
    print(table(report["rows"]))
    if args.plots is not None:
        draw([report], args.plots)
    return 0


def table(rows: Sequence[Row]) -> str:
    """Return one line per round."""
    columns = {
        "mode": "{}",
        "context": "{}",
        "requests": "{}",
        "running": "{}",
        "tpot_ms_mean": "{:.2f}",
        "tpot_ms_p50": "{:.2f}",
        "tpot_ms_p99": "{:.2f}",
        "steady_tokens_per_s": "{:.0f}",
        "tokens_per_s": "{:.0f}",
        "ttft_s_p50": "{:.2f}",
        "cap_mean": "{:.1f}",
        "cap_share": "{:.2f}",
        "deferred_share": "{:.3f}",
        "load_bytes_per_step": "{:.3g}",
        "link_gb_per_s": "{:.1f}",
        "stall_ms_per_step": "{:.2f}",
        "hbm_kv_bytes": "{:.3g}",
        "host_kv_bytes": "{:.3g}",
    }
    ordered = sorted(rows, key=lambda row: (row["context"], row["requests"], row["mode"]))
    cells = [list(columns)]
    cells += [[form.format(row[name]) if name in row else "-" for name, form in columns.items()] for row in ordered]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _rounds(args: argparse.Namespace, engine: Row, context: int, counts: Sequence[int]) -> Iterator[Row]:
    """Yield the rounds of one engine process, each when it is over."""
    with tempfile.TemporaryDirectory(prefix="oasiskv-") as folder:
        results, log = Path(folder, "rows.jsonl"), Path(folder, "log.txt")
        results.touch()
        job = {
            "engine": engine,
            "context": context,
            "requests": list(counts),
            "num_tokens": args.tokens,
            "results": str(results),
        }
        Path(folder, "job.json").write_text(json.dumps(job))
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, "-m", "oasiskv.engine.vllm.rounds", str(Path(folder, "job.json"))]
        rows = 0
        for row in follow(command, environment, log, results):
            yield row
            rows += 1
        if rows < len(counts):
            raise EngineFailedError(f"the engine ran {rows} of {len(counts)} rounds; last words:\n{_last_words(log)}")


def follow(
    command: Sequence[str], environment: Mapping[str, str], log: Path, results: Path
) -> Generator[Row, None, None]:
    """Run a process that appends lines of JSON to a file, and yield each as soon as it is there.

    The process ends with the generator.

    Args:
        command: The process.
        environment: Its environment.
        log: Written: what it prints.
        results: The file, which exists.

    Raises:
        EngineFailedError: It ended by itself with an exit code other than 0; its lines were yielded before.
    """
    text = ""
    with log.open("w") as out, results.open() as lines:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            while True:
                has_ended = process.poll() is not None
                *whole, text = (text + lines.read()).split("\n")
                yield from map(json.loads, whole)
                if has_ended:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise EngineFailedError(
            f"the engine ended with exit code {process.returncode}; last words:\n{_last_words(log)}"
        )


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _about(args: argparse.Namespace, *, is_cuda: bool) -> Row:
    import datetime
    import platform

    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if is_cuda else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "vllm": VLLM_VERSION},
        "weights": args.weights,
        "model": Path(args.model).name,
        "memory_share": args.memory_share,
        "host_memory": args.host_memory,
        "settings": dict(args.settings),
        "rows": [],
    }


def _save(path: Path, report: Row) -> None:
    """Replace the file at once, so that it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(path)
