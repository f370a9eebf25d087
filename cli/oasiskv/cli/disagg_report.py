"""Tables and pictures of what `oasiskv bench disagg` found; pictures need matplotlib, the extra `plots`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oasiskv.core.errors import UnsupportedError

Row = dict[str, Any]


def lines_of(rows: Sequence[Row], columns: dict[str, str]) -> str:
    """Return rows under their names, each value in its column's form; a dash where there is none."""
    cells = [list(columns)]
    cells += [[form.format(row[name]) if row.get(name) is not None else "-" for name, form in columns.items()]
              for row in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def draw(report: Row, path: Path) -> None:
    """Write a picture of a report.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as cause:
        raise UnsupportedError(f"plots: expected the extra plots (matplotlib), got {cause}") from cause
    names = (
        list(dict.fromkeys(row["trace"] for row in report["rows"]))
        if "links" in report
        else [report["rows"][0]["model"]]
    )
    figure, axes = pyplot.subplots(len(names), 4, figsize=(19, 4 * len(names)), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        if "links" in report:
            _draw_replay(line, name, report)
        else:
            _draw_services(line, name, report["rows"])
    figure.suptitle(f"{report['what']}; {report['hardware']}, {report['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _draw_replay(line: Sequence[Any], name: str, report: Row) -> None:
    rows = [row for row in report["rows"] if row["trace"] == name]
    _bytes(line[0], name, rows, "gib")
    _network(line[1], rows)
    _host(line[2], rows)
    links = [row for row in report["links"] if row["trace"] == name]
    if links:
        _links(line[3], links)
    else:
        line[3].set_axis_off()


def _draw_services(line: Sequence[Any], name: str, rows: list[Row]) -> None:
    _bytes(line[0], name, rows, "mib")
    for row in rows:
        line[1].plot(row["network_mb_per_s"], label=row["mode"], linewidth=0.9)
    line[1].set_title("network")
    line[1].set_xlabel("s")
    line[1].set_ylabel("MB/s")
    line[1].legend(fontsize=7)
    for axis, field, title, unit in (
        (line[2], "host_mib", "decode host memory that requests held, at most", "MiB"),
        (line[3], "ttft_s", "time to first token, median", "s"),
    ):
        axis.bar([row["mode"] for row in rows], [row[field] for row in rows])
        axis.set_title(title)
        axis.set_ylabel(unit)
        axis.tick_params(axis="x", labelsize=7)


def _bytes(axis: Any, name: str, rows: list[Row], unit: str) -> None:
    modes = [row["mode"] for row in rows]
    admitted, missed = ([row[part] for row in rows] for part in (f"admitted_{unit}", f"missed_{unit}"))
    axis.bar(modes, admitted, label="at admission")
    axis.bar(modes, missed, bottom=admitted, label="misses while decoding")
    axis.set_title(f"{name}: network bytes of a request")
    axis.set_ylabel({"gib": "GiB", "mib": "MiB"}[unit])
    axis.tick_params(axis="x", labelsize=7)
    axis.legend(fontsize=7)


def _network(axis: Any, rows: list[Row]) -> None:
    for row in rows:
        values = row["network_gb_per_s"]
        axis.plot([row["window_s"] * place for place in range(len(values))], values, label=row["mode"], linewidth=0.9)
    axis.set_title(f"network, {rows[0]['concurrency']} requests at a time")
    axis.set_xlabel("s, at the stated time of a step")
    axis.set_ylabel("GB/s")
    axis.legend(fontsize=7)


def _host(axis: Any, rows: list[Row]) -> None:
    for row in rows:
        values = row["host_gib_over_time"]
        axis.plot([row["window_s"] * place for place in range(len(values))], values, label=row["mode"], linewidth=0.9)
    axis.set_title("decode host memory for KV")
    axis.set_xlabel("s, at the stated time of a step")
    axis.set_ylabel("GiB")
    axis.legend(fontsize=7)


def _links(axis: Any, rows: list[Row]) -> None:
    links, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("link", "mode"))
    for number, mode in enumerate(modes):
        found = {row["link"]: row["admission_s"] for row in rows if row["mode"] == mode}
        places = [place + 0.25 * number for place in range(len(links))]
        axis.bar(places, [found[link] for link in links], width=0.25, label=mode)
    axis.set_xticks([place + 0.25 for place in range(len(links))], links)
    axis.set_yscale("log")
    axis.set_title("from lease to the first step's end, shaped links")
    axis.set_ylabel("s")
    axis.legend(fontsize=7)
