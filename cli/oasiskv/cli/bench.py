"""`oasiskv bench`: measure on this machine, print a line per result, and keep all of them in one JSON file."""

import argparse
import datetime
import json
import platform
from pathlib import Path

from oasiskv.core.errors import UnsupportedError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv bench`."""
    parser = subparsers.add_parser("bench", help="measure the speed of OasisKV on this machine")
    suites = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    kernels = suites.add_parser(
        "kernels", help="every operation on device tensors, alone and beside attention and matrix products; one GPU"
    )
    kernels.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), metavar="FOLDER", help="where the JSON file goes"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and write `kernels-<date>-<gpu>.json`.

    Raises:
        UnsupportedError: there is no CUDA device to measure.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(f"bench kernels: expected a CUDA device, got torch {torch.__version__} without one")
    import triton

    from oasiskv.kernels import bench

    gpu = torch.cuda.get_device_name()
    results: list[dict[str, object]] = []

    def emit(row: dict[str, object]) -> None:
        results.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    bench.run(emit)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {
        "command": "oasiskv bench kernels",
        "date": today,
        "gpu": gpu,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "model": "36 layers, 8 KV heads of 4 query heads, head_dim 128, block_size 16, budget 128, cap 6, bfloat16",
        "results": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"kernels-{today}-{gpu.replace(' ', '-').lower()}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)
    return 0
