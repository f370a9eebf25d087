"""The picture of `oasiskv bench kernels`: shares of the ceilings, and what a background costs its foreground."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oasiskv.core.errors import UnsupportedError

Row = Mapping[str, Any]
Points = list[tuple[float, float]]


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return each measured operation and the share of its ceiling that it reached, in percent."""
    return {
        f"{row['op']} {row['rows']}x{row['blocks']} {row['kind']}": 100 * row["share"]
        for row in rows
        if row.get("share")
    }


def curves(rows: Sequence[Row], value: str) -> dict[str, Points]:
    """Return a value of whole steps against the requests in the batch, by operation."""
    points: dict[str, Points] = {}
    for row in rows:
        if value in row:
            points.setdefault(row["op"], []).append((row["rows"], row[value]))
    return {op: sorted(points[op]) for op in points}


def draw(found: Row, path: Path) -> None:
    """Write the picture of one run.

    Args:
        found: What the run's JSON file holds.
        path: The picture.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"plots: expected matplotlib (pip install 'oasiskv[plots]'), got {error}") from error
    rows, bars = found["results"], shares(found["results"])
    figure = Figure(figsize=(15, max(4.5, 1.5 + 0.16 * len(bars))), layout="constrained")
    left, *others = figure.subplots(1, 3)
    left.barh(list(bars), list(bars.values()), color="#33628d")
    left.set_xlabel("% of the bandwidth of a plain copy")
    left.set_xlim(0, 105)
    left.tick_params(axis="y", labelsize=6)
    left.invert_yaxis()
    for axes, value, label, scale in zip(
        others, ("step_ms", "slowdown"), ("ms a step", "% slower beside it without a pause"), (1, 100), strict=True
    ):
        for op, points in curves(rows, value).items():
            axes.plot([rows for rows, _ in points], [scale * at for _, at in points], marker="o", label=op)
        axes.set_xlabel("requests in the batch, 1,024 blocks each")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=6)
    versions = found["versions"]
    figure.suptitle(
        f"{found['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {found['date']}", fontsize=9
    )
    figure.savefig(path, dpi=110)
