"""Try the shapes that the kernels can be launched in, on one GPU, and print one JSON line per shape."""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from oasiskv.kernels import bench

PREDICT = [
    {"tile": tile, "num_stages": stages, "num_warps": warps}
    for tile, stages, warps in [(64, 2, 4), (64, 3, 4), (64, 4, 4), (128, 2, 8), (128, 3, 8), (128, 2, 4)]
]
SHARES = [400, 640, 800, 1600]
SELECT = [
    {"num_warps": warps, "tile": tile} for warps, tile in [(1, 16), (1, 32), (1, 128), (2, 32), (2, 128), (4, 128)]
]
TRANSFER = [
    {"num_programs": programs, "depth": depth, "num_warps": warps}
    for programs, depth, warps in [
        (4, 10, 4), (4, 16, 4), (4, 24, 4), (3, 24, 4), (2, 24, 4), (6, 12, 4), (8, 6, 4), (8, 10, 4), (4, 16, 2),
        (12, 6, 4), (16, 4, 4),
    ]
]  # fmt: skip
STORE = [
    {"num_programs": programs, "batch_bytes": kib << 10}
    for programs, kib in [(1, 32), (2, 32), (4, 32), (8, 32), (4, 16), (16, 16)]
]


def say(kind: str, options: dict[str, Any], **found: float) -> None:
    print(json.dumps({"op": kind, **options, **{name: round(value, 3) for name, value in found.items()}}), flush=True)


def compile_all(part: int, parts: int, *, is_fp8: bool) -> None:
    """Compile every shape on small inputs, so that several processes can fill Triton's cache at once."""
    model, device = bench.Model(num_layers=1), torch.device("cuda")
    memory = bench.Memory(model, 1200, 64, device)
    steps = {kind: bench.Step(model, memory, 4, 1024, kind, is_fp8=is_fp8) for kind in ("minmax", "mid")}
    jobs: list[Any] = []
    for step in steps.values():
        jobs += [partial(step.predict, 0, **options) for options in PREDICT]
    step = steps["minmax"]
    jobs += [partial(step.transfer, 0, **options) for options in TRANSFER]
    jobs += [partial(step.select, 0, **options) for options in SELECT]
    jobs += [partial(step.store, 0, **options) for options in STORE]
    for job in jobs[part::parts]:
        job()
    torch.cuda.synchronize()


def sweep(parts: list[str], batches: list[int], until: float, *, is_fp8: bool) -> None:
    model, device = bench.Model(), torch.device("cuda")
    memory = bench.Memory(model, 19000, 8192, device)
    say("ceilings", bench.ceilings(memory))
    kinds: tuple[Literal["minmax", "mid"], ...] = ("minmax", "mid")
    for kind in kinds if "alone" in parts else ():
        step = bench.Step(model, memory, 96, 1024, kind)
        for options in PREDICT:
            for programs in SHARES:
                with_programs = options | {"num_programs": programs}
                ms = bench.measure([partial(step.predict, **with_programs)], 36, repeats=6)
                say(f"predict-{kind}-96", with_programs, ms=ms, gbps=step.predict_bytes / ms / 1e6)
        for rows in (1, 16, 40):
            small = bench.Step(model, memory, rows, 1024, kind)
            for programs in SHARES:
                ms = bench.measure([partial(small.predict, num_programs=programs)], 36, repeats=6)
                say(f"predict-{kind}-{rows}", {"num_programs": programs}, ms=ms, gbps=small.predict_bytes / ms / 1e6)
    step = bench.Step(model, memory, 96, 1024, "minmax", is_fp8=is_fp8)
    step.predict(0)
    for options in SELECT if "alone" in parts else ():
        ms = bench.measure([partial(step.select, **options)], 36, step.reset, repeats=6)
        say("select-96", options, ms=ms)
    for options in STORE if "alone" in parts else ():
        ms = bench.measure([partial(step.store, **options)], 36, repeats=3)
        say("store-96", options, ms=ms, gbps=step.transfer_bytes / ms / 1e6)
    for every in (1, 16) if "alone" in parts else ():
        rows = step.finished(every)
        ms = bench.measure([partial(step.complete, rows=rows)], 36, step.reset, repeats=4)
        say("complete-96", {"every": every}, ms=ms)
    ms = bench.measure([step.summarize], 36, repeats=4)
    say("summarize-1024", {}, ms=ms, gbps=36 * 1024 * model.num_kv_heads * model.unit_bytes / 2 / ms / 1e6)
    for num_rows in batches if "beside" in parts else ():
        foreground = bench.Foreground(model, num_rows, device)
        step = bench.Step(model, memory, num_rows, 1024, "minmax", is_fp8=is_fp8)
        stream = torch.cuda.Stream()

        def all_layers(foreground: bench.Foreground = foreground) -> None:
            for layer in range(model.num_layers):
                foreground.layer(layer)

        graph = bench.capture(all_layers, stream)
        alone = bench.milliseconds(graph, stream)
        say(f"foreground-{num_rows}", {}, ms=alone)
        predict_and_select = bench.measure_together(foreground, [step.predict, step.select], [], step.reset)
        say(f"foreground-{num_rows}+predict+select", {}, ms=predict_and_select, bytes_ms=step.predict_bytes / 4.3e9)
        for options in TRANSFER:
            if time.monotonic() > until:
                print("out of time", flush=True)
                return
            action = partial(step.transfer, **options)
            ms = bench.measure([action], 36, repeats=4)
            beside, own = bench.measure_beside(graph, [action], 36)
            together = bench.measure_together(foreground, [], [action])
            everything = bench.measure_together(foreground, [step.predict, step.select], [action], step.reset)
            found = {
                "ms": ms,
                "gbps": step.transfer_bytes / ms / 1e6,
                "slowdown": beside / alone - 1,
                "beside_gbps": step.transfer_bytes / own / 1e6,
                "together": together,
                "everything": everything,
            }
            say(f"transfer-{num_rows}", options, **found)
        del foreground, graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help="only fill Triton's cache")
    parser.add_argument("--parts", nargs="+", choices=("alone", "beside"), default=["alone", "beside"])
    parser.add_argument("--rows", type=int, nargs="+", default=[40, 96])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--fp8", action="store_true", help="copy fp8 units, in rings twice as deep")
    args = parser.parse_args()
    if args.fp8:
        TRANSFER[:] = [{**options, "depth": 2 * options["depth"]} for options in TRANSFER]
    if args.compile:
        compile_all(*args.compile, is_fp8=args.fp8)
    else:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
        sweep(args.parts, args.rows, time.monotonic() + args.seconds, is_fp8=args.fp8)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
