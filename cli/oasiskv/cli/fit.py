"""`oasiskv bench fit`: the constants of the rule that keeps requests dense, from the results of a sweep."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from oasiskv.cli.plots import read_report
from oasiskv.core.errors import ConfigError
from oasiskv.core.switch_fit import Choice, MeasuredStep, choices, estimate_ms, fit, read_rows
from oasiskv.core.switch_rule import DEVICE_SPEEDS, DeviceSpeed


def add_parser(suites: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv bench fit`."""
    parser = suites.add_parser("fit", help="from bench sweep --modes dense oasiskv-early: when requests become sparse")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results of one kind of device")
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        metavar="N",
        help="what transfer reaches with nothing beside it, by bench kernels; default: as the device is known",
    )


def run(args: argparse.Namespace) -> int:
    """Print the fitted device, its errors, and what the rule chooses with it.

    Raises:
        ConfigError: a file has no results of a sweep, devices differ or are not known, or the rounds are too few.
    """
    reports = [read_report(path) for path in args.files]
    devices = sorted({str(report.get("device")) for report in reports})
    if len(devices) != 1:
        raise ConfigError(f"FILE: expected results of one kind of device, got {', '.join(devices)}")
    steps = [step for report in reports for step in read_rows(report["rows"])]
    known = DEVICE_SPEEDS.get(devices[0])
    if args.link_gb_per_s is not None:
        link_bytes_per_s = 1e9 * args.link_gb_per_s
    elif known is not None:
        link_bytes_per_s = known.link_bytes_per_s
    else:
        raise ConfigError(f"--link-gb-per-s: expected a number for {devices[0]}, which is not known, got none")
    if link_bytes_per_s <= 0:
        raise ConfigError(f"--link-gb-per-s: expected more than 0, got {args.link_gb_per_s}")
    speed = fit(steps, link_bytes_per_s)
    print(entry(devices[0], speed))
    if known is not None:
        print(f"now      largest error {100 * worst(known, steps):.1f} %")
    print(f"fitted   largest error {100 * worst(speed, steps):.1f} %")
    for step in steps:
        kind = "sparse" if step.is_sparse else "dense"
        estimate = estimate_ms(speed, step)
        print(
            f"{kind:6}  {step.context:7} tokens  {step.num_requests:4} requests  measured {step.step_ms:7.2f} ms  "
            f"estimated {estimate:7.2f} ms  ({100 * (estimate / step.step_ms - 1):+.1f} %)"
        )
    for choice in choices(speed, steps):
        print(line_of(choice))
    return 0


def entry(device: str, speed: DeviceSpeed) -> str:
    """Return the entry of `DEVICE_SPEEDS` in core/switch_rule.py."""
    values = {field.name: getattr(speed, field.name) for field in fields(speed)}
    lines = [f"        {name}={value:.3g}," for name, value in values.items()]
    return "\n".join([f'    "{device}": DeviceSpeed(', *lines, "    ),"])


def worst(speed: DeviceSpeed, steps: Sequence[MeasuredStep]) -> float:
    """Return the largest relative error of the estimates."""
    return max(abs(estimate_ms(speed, step) / step.step_ms - 1) for step in steps)


def line_of(choice: Choice) -> str:
    """Return what the rule does with the requests of a round."""
    kind = "sparse" if choice.is_sparse else "dense"
    return (
        f"rule    {choice.context:7} tokens  {choice.num_requests:4} requests  {kind:6}  "
        f"dense {choice.dense_ms:.2f} ms, sparse {choice.sparse_ms:.2f} ms: {1 + choice.loss:.3f} x dense"
    )
