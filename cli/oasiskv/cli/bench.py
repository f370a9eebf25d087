"""`oasiskv bench`: measure on this machine, print a line per result, and keep all of them in one JSON file."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from oasiskv.cli import disagg, fit, kernel_plots, plots, sweep
from oasiskv.core.errors import ConfigError, UnsupportedError

Row = dict[str, object]

KERNEL_PARTS = (
    "predict", "select", "transfer", "store", "complete", "summarize", "round_blocks", "others", "beside",
)  # fmt: skip
"""Of `bench kernels`, as `oasiskv.kernels.bench` names them; naming them must not need torch."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv bench`."""
    parser = subparsers.add_parser("bench", help="measure the speed of OasisKV on this machine")
    suites = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    kernels = suites.add_parser(
        "kernels", help="every operation on device tensors, alone and beside attention and matrix products; one GPU"
    )
    kernels.add_argument(
        "--parts", nargs="+", metavar="PART", help=f"only these: {', '.join(KERNEL_PARTS)}; beside is the whole step"
    )
    kernels.add_argument("--requests", nargs="+", type=int, metavar="N", help="only batches of so many requests")
    staging = suites.add_parser(
        "staging", help="the staging tier: bytes by every path beside a plain copy of the same, and calls; no GPU"
    )
    staging.add_argument("--pool-bytes", type=int, default=2**27, metavar="N", help="size of the pool (128 MiB)")
    staging.add_argument("--repeats", type=int, default=9, metavar="N", help="copies of each kind (9)")
    staging.add_argument("--block-sizes", nargs="+", type=int, metavar="N", help="in tokens (2 16 128)")
    staging.add_argument(
        "--memory",
        choices=("host", "pinned", "gpu"),
        default="host",
        help="where bytes come from and go to; pinned and gpu need a CUDA device (host)",
    )
    staging.add_argument("--paths", nargs="+", metavar="PATH", help="only these paths, as the table names them")
    sweep.add_arguments(
        suites.add_parser("sweep", help="decode steps of dense vLLM and of OasisKV over contexts and concurrency")
    )
    plots.add_parser(suites)
    fit.add_parser(suites)
    apart = suites.add_parser(
        "disagg", help="prefill and decode apart: bytes, memory and links by the way of handing over; no GPU"
    )
    disagg.add_arguments(apart)
    threshold = suites.add_parser(
        "threshold", help="up to which length prompts are better computed where they are decoded; no GPU"
    )
    threshold.add_argument(
        "--model", default="smollm2-135m", metavar="MODEL", help="a folder or a known name (%(default)s)"
    )
    threshold.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048], help="in tokens")
    threshold.add_argument("--repeats", type=int, default=5, help="prompts of each length, each way (%(default)s)")
    threshold.add_argument("--budget-blocks", type=int, default=4, help="resident blocks (%(default)s)")
    for suite in (kernels, staging, apart, threshold):
        suite.add_argument(
            "--out", type=Path, default=Path("benchmarks/results"), metavar="FOLDER", help="where the JSON file goes"
        )


def run(args: argparse.Namespace) -> int:
    """Measure, and write `<suite>-<date>-<machine>.json`.

    Raises:
        UnsupportedError: There is no CUDA device to measure, or a package is not installed.
        ConfigError: What should be measured, or be fitted, is not known.
    """
    if args.suite == "sweep":
        return sweep.run(args)
    if args.suite == "disagg":
        return disagg.run(args)
    if args.suite == "threshold":
        return _run_threshold(args)
    if args.suite == "plot":
        return plots.run(args)
    if args.suite == "fit":
        return fit.run(args)
    return _run_kernels(args) if args.suite == "kernels" else _run_staging(args)


def _run_threshold(args: argparse.Namespace) -> int:
    try:
        from oasiskv.cli import threshold
    except ImportError as error:
        raise UnsupportedError(f"bench threshold: expected the extra services, got {error}") from error
    return threshold.run(args)


def _run_kernels(args: argparse.Namespace) -> int:
    for part in args.parts or ():
        if part not in KERNEL_PARTS:
            raise ConfigError(f"--parts: expected {', '.join(KERNEL_PARTS)}, got {part!r}")
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench kernels: expected a CUDA device, got torch {torch.__version__} without one")
    import triton

    from oasiskv.engine.vllm.copies import vllm_copies
    from oasiskv.kernels import bench

    gpu = torch.cuda.get_device_name()
    results: list[Row] = []
    sizes, batches = list(bench.SIZES), list(bench.BATCHES)
    if args.requests:
        sizes = [size for size in sizes if size.rows in args.requests]
        batches = args.requests
    memory = bench.Memory(bench.Model(), 19000, 8192, torch.device("cuda"))
    about: Row = {
        "command": f"oasiskv {' '.join(sys.argv[1:])}",
        "gpu": gpu,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "model": "36 layers, 8 KV heads of 4 query heads, head_dim 128, block_size 16, budget 128, cap 6, bfloat16",
    }
    try:
        bench.Bench(memory, _emitter(results), args.parts or bench.PARTS).run(sizes, batches, vllm_copies)
    finally:
        # What was measured before an error is worth as much as without one.
        path = _write(args.out, "kernels", gpu, about, results)
    try:
        kernel_plots.draw(json.loads(path.read_text()), path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    except UnsupportedError as error:
        print(f"no picture: {error}")
    return 0


def _run_staging(args: argparse.Namespace) -> int:
    try:
        from oasiskv.services.staging import bench
    except ImportError as error:
        raise UnsupportedError(f"bench staging: expected the extras services and nixl, got {error}") from error
    paths = args.paths or list(bench.ALL_PATHS)
    for path in paths:
        if path not in bench.ALL_PATHS:
            raise UnsupportedError(f"paths: expected one of {', '.join(bench.ALL_PATHS)}, got {path!r}")
    results: list[Row] = []
    num_cpus = len(os.sched_getaffinity(0))
    about: Row = {
        "command": f"oasiskv bench staging --pool-bytes {args.pool_bytes} --repeats {args.repeats}",
        "memory": args.memory,
        "cpu": f"{_cpu()}, {num_cpus} cores",
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "versions": {name: _version(name) for name in ("nixl-cu13", "nixl-cu12", "grpcio", "xxhash", "numpy")}
        | {"python": platform.python_version()},
        "model": f"{bench.NUM_LAYERS} layers, 8 KV heads, head_dim 128, float16; medians",
    }
    try:
        bench.run(
            _emitter(results),
            pool_bytes=args.pool_bytes,
            num_repeats=args.repeats,
            paths=paths,
            block_sizes=args.block_sizes or bench.BLOCK_SIZES,
            memory=args.memory,
        )
    finally:
        # What was measured before an error is worth as much as without one.
        if results:
            machine = f"{num_cpus} cores" if args.memory == "host" else f"{num_cpus} cores {_gpu()} {args.memory}"
            _write(args.out, "staging", machine, about, results)
    return 0


def _emitter(results: list[Row]) -> Callable[[Row], None]:
    def emit(row: Row) -> None:
        results.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    return emit


def _write(out: Path, suite: str, machine: str, about: Row, results: list[Row]) -> Path:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{suite}-{today}-{machine.replace(' ', '-').lower()}.json"
    path.write_text(json.dumps({"date": today, **about, "results": results}, indent=1) + "\n")
    print(path)
    return path


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
