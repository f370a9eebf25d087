"""Try the shapes that the kernels can be launched in, on one GPU, and print one JSON line per shape."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from oasiskv.kernels import bench

PREDICT = [
    {"tile": tile, "num_stages": stages, "num_warps": warps}
    for tile, stages, warps in [(64, 2, 4), (64, 3, 4), (64, 4, 4), (128, 2, 4), (128, 2, 8), (128, 3, 8), (128, 4, 8)]
]
SHARES = [768, 1600, 3200]
SELECT = [{"num_warps": warps} for warps in (1, 2, 4, 8)]
# Programs, bytes a batch, warps, stages; 0 stages keep two batches in registers.
TRANSFER = [
    {"num_programs": programs, "batch_bytes": kib << 10, "num_warps": warps, "num_stages": stages}
    for programs, kib, warps, stages in [
        (8, 32, 8, 0), (4, 32, 8, 0), (4, 64, 16, 0), (2, 64, 16, 0), (16, 32, 8, 0), (16, 16, 4, 0),
        (1, 8, 4, 24), (2, 8, 4, 12), (2, 8, 4, 20), (4, 8, 4, 6), (4, 8, 4, 10), (4, 8, 4, 16), (8, 8, 4, 4),
        (8, 8, 4, 8), (4, 16, 4, 6), (4, 16, 8, 8), (2, 16, 8, 12), (8, 16, 8, 4), (16, 8, 4, 4), (4, 32, 8, 4),
    ]
]  # fmt: skip
STORE = [
    {"num_programs": programs, "batch_bytes": kib << 10}
    for programs, kib in [(1, 32), (2, 32), (4, 32), (8, 32), (4, 16), (16, 16)]
]


def say(kind: str, options: dict[str, Any], **found: float) -> None:
    print(json.dumps({"op": kind, **options, **{name: round(value, 3) for name, value in found.items()}}), flush=True)


def compile_all(part: int, parts: int) -> None:
    """Compile every shape on small inputs, so that several processes can fill Triton's cache at once."""
    model, device = bench.Model(num_layers=1), torch.device("cuda")
    memory = bench.Memory(model, 1200, 64, device)
    steps = {kind: bench.Step(model, memory, 4, 1024, kind) for kind in ("minmax", "mid")}
    jobs: list[Any] = []
    for step in steps.values():
        jobs += [lambda s=step, o=options: s.predict(0, **o) for options in PREDICT]
    step = steps["minmax"]
    jobs += [lambda o=options: step.transfer(0, **o) for options in TRANSFER]
    jobs += [lambda o=options: step.select(0, **o) for options in SELECT]
    jobs += [lambda o=options: step.store(0, **o) for options in STORE]
    for job in jobs[part::parts]:
        job()
    torch.cuda.synchronize()


def sweep(num_rows: int, until: float) -> None:
    model, device = bench.Model(), torch.device("cuda")
    memory = bench.Memory(model, 19000, 8192, device)
    say("ceilings", bench.ceilings(memory))
    for kind in ("minmax", "mid"):
        step = bench.Step(model, memory, 96, 1024, kind)
        for options in PREDICT:
            for programs in SHARES:
                with_programs = options | {"num_programs": programs}
                ms = bench.measure([lambda l, s=step, o=with_programs: s.predict(l, **o)], 36, repeats=6)
                say(f"predict-{kind}-96", with_programs, ms=ms, gbps=step.predict_bytes / ms / 1e6)
        for rows in (1, 16, 40):
            small = bench.Step(model, memory, rows, 1024, kind)
            for programs in SHARES:
                ms = bench.measure([lambda l, s=small, p=programs: s.predict(l, num_programs=p)], 36, repeats=6)
                say(f"predict-{kind}-{rows}", {"num_programs": programs}, ms=ms, gbps=small.predict_bytes / ms / 1e6)
    step = bench.Step(model, memory, 96, 1024, "minmax")
    step.predict(0)
    for options in SELECT:
        ms = bench.measure([lambda l, o=options: step.select(l, **o)], 36, step.reset, repeats=6)
        say("select-96", options, ms=ms)
    for options in STORE:
        ms = bench.measure([lambda l, o=options: step.store(l, **o)], 36, repeats=3)
        say("store-96", options, ms=ms, gbps=step.transfer_bytes / ms / 1e6)
    foreground = bench.Foreground(model, num_rows, device)
    step = bench.Step(model, memory, num_rows, 1024, "minmax")
    stream = torch.cuda.Stream()

    def all_layers() -> None:
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
            break
        action = lambda l, o=options: step.transfer(l, **o)  # noqa: E731
        ms = bench.measure([action], 36, repeats=5)
        beside, own = bench.measure_beside(graph, [action], 36)
        together = bench.measure_together(foreground, [], [action])
        everything = bench.measure_together(foreground, [step.predict, step.select], [action], step.reset)
        say(f"transfer-{num_rows}", options, ms=ms, gbps=step.transfer_bytes / ms / 1e6, slowdown=beside / alone - 1,
            beside_gbps=step.transfer_bytes / own / 1e6, together=together, everything=everything)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "PARTS"), help="only fill Triton's cache")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    if args.compile:
        compile_all(*args.compile)
    else:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
        sweep(args.rows, time.monotonic() + args.seconds)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
