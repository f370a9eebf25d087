"""`oasiskv bench plot`: pictures of a sweep's results, of this run or of earlier ones.

`throughput.png` has a column per context, and rows for throughput, running batch and time per token against the number
of requests; `roofline.png` has throughput against the tokens that a byte of KV traffic gives, with the roofs of host
link and HBM.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasiskv.core.errors import ConfigError, UnsupportedError

Row = dict[str, Any]
Point = tuple[float, float]

PANELS = {
    "steady_tokens_per_s": "steady decode, tokens/s",
    "running": "running batch",
    "tpot_ms_mean": "time per token, ms",
}
"""Rows of `throughput.png`."""

TRAFFIC = {"host link": "load_bytes_per_step", "HBM": "hbm_read_bytes_per_step"}
"""The roofs of `roofline.png`, and what a row moves under each."""

ROOFS_GB_PER_S = {"NVIDIA H200": {"host link": 50.0, "HBM": 4250.0}}
"""By device: what copies reach, see docs/design/0002-kernels.md and 0006. On others the best of the rows stands."""


def add_parser(suites: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv bench plot`."""
    parser = suites.add_parser("plot", help="pictures of the results of bench sweep; needs matplotlib (extra plots)")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results; several are put together")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the pictures go")


def run(args: argparse.Namespace) -> int:
    """Draw.

    Raises:
        ConfigError: a file has no results of a sweep.
        UnsupportedError: matplotlib is not installed.
    """
    reports = [read_report(path) for path in args.files]
    for path in draw(reports, args.out):
        print(path)
    return 0


def curves(rows: Sequence[Row], context: int, value: str) -> dict[str, list[Point]]:
    """Return a value against the number of requests, by mode; of a round that is there twice the later one."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["context"] == context and value in row:
            points.setdefault(row["mode"], {})[row["requests"]] = row[value]
    return {mode: sorted(points[mode].items()) for mode in sorted(points)}


def roofline(rows: Sequence[Row], traffic: str) -> dict[str, list[Point]]:
    """Return (tokens per GB, tokens/s) of the rows that moved any bytes, by mode."""
    points: dict[str, list[Point]] = {}
    for row in rows:
        if row.get(traffic, 0) > 0:
            intensity = row["running"] / (row[traffic] / 1e9)
            points.setdefault(row["mode"], []).append((intensity, row["steady_tokens_per_s"]))
    return {mode: sorted(points[mode]) for mode in sorted(points)}


def roof_gb_per_s(reports: Sequence[Row], name: str) -> float | None:
    """Return the bytes per second of a roof; None where neither the device nor a row says."""
    known = [ROOFS_GB_PER_S[report["device"]][name] for report in reports if report.get("device") in ROOFS_GB_PER_S]
    rates = [
        row[TRAFFIC[name]] / 1e6 / row["tpot_ms_mean"]
        for report in reports
        for row in report["rows"]
        if row.get(TRAFFIC[name], 0) > 0
    ]
    return max(known) if known else max(rates, default=None)


def draw(reports: Sequence[Row], folder: Path) -> list[Path]:
    """Write the pictures and return their paths.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"plots: expected matplotlib (pip install 'oasiskv[plots]'), got {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for report in reports for row in report["rows"]]
    about = ", ".join(
        sorted({f"{report.get('model')} on {report.get('device')}, {report['date']}" for report in reports})
    )
    return [
        _draw_throughput(Figure, rows, about, folder / "throughput.png"),
        _draw_roofline(Figure, reports, about, folder / "roofline.png"),
    ]


def _draw_throughput(figure_class: Any, rows: Sequence[Row], about: str, path: Path) -> Path:
    contexts = sorted({row["context"] for row in rows})
    styles = _styles(rows)
    figure = figure_class(figsize=(1.5 + 4 * len(contexts), 9), layout="constrained")
    grid = figure.subplots(len(PANELS), len(contexts), squeeze=False, sharex="col")
    for column, context in enumerate(contexts):
        for place, (value, label) in enumerate(PANELS.items()):
            axes = grid[place][column]
            for mode, points in curves(rows, context, value).items():
                axes.plot(*zip(*points, strict=True), label=mode, **styles[mode])
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_ylabel(label if column == 0 else "")
        grid[0][column].set_title(f"{context:,} tokens of context")
        grid[-1][column].set_xlabel("requests at a time")
    _finish(figure, grid[0][0], about, path)
    return path


def _draw_roofline(figure_class: Any, reports: Sequence[Row], about: str, path: Path) -> Path:
    rows = [row for report in reports for row in report["rows"]]
    styles = _styles(rows)
    figure = figure_class(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(TRAFFIC), squeeze=False)[0]
    for axes, (name, traffic) in zip(panels, TRAFFIC.items(), strict=True):
        points = roofline(rows, traffic)
        for mode, pairs in points.items():
            axes.plot(*zip(*pairs, strict=True), label=mode, **(styles[mode] | {"linestyle": "none"}))
        ends = [intensity for pairs in points.values() for intensity, _ in pairs]
        if ends and (roof := roof_gb_per_s(reports, name)) is not None:
            span = [0.5 * min(ends), 2 * max(ends)]
            axes.plot(span, [roof * end for end in span], color="black")
            axes.set(xscale="log", yscale="log")
            name = f"{name}, {roof:,.0f} GB/s"
        axes.set(title=name, xlabel="tokens per GB of KV traffic", ylabel="steady decode, tokens/s")
        axes.grid(alpha=0.3)
    _finish(figure, panels[-1], about, path)
    return path


def _styles(rows: Sequence[Row]) -> Mapping[str, dict[str, Any]]:
    """Return a colour and a marker for each mode, the same in every picture of these rows."""
    markers = "osD^vP*X<>"
    modes = sorted({row["mode"] for row in rows})
    return {
        mode: {"color": f"C{place % 10}", "marker": markers[place % len(markers)], "linestyle": "-"}
        for place, mode in enumerate(modes)
    }


def _finish(figure: Any, labelled: Any, about: str, path: Path) -> None:
    handles, labels = labelled.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper")
    figure.suptitle(about, fontsize="small")
    figure.savefig(path, dpi=110)


def read_report(path: Path) -> Row:
    """Read what a sweep wrote.

    Raises:
        ConfigError: it is something else.
    """
    needed = {"mode", "context", "requests", "running", "steady_tokens_per_s", "tpot_ms_mean"}
    try:
        report: Row = json.loads(path.read_text())
        missing = sorted({name for row in report["rows"] for name in needed - row.keys()} | ({"date"} - report.keys()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"FILE: expected results of bench sweep, got {path}: {type(error).__name__}: {error}"
        ) from error
    if missing or not report["rows"]:
        raise ConfigError(f"FILE: expected results of bench sweep, got {path} without {', '.join(missing) or 'rows'}")
    return report
