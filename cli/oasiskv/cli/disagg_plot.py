"""Pictures of what `oasiskv bench disagg` found, with matplotlib, which is the extra `plots`."""

from pathlib import Path
from typing import Any

from oasiskv.core.errors import UnsupportedError

Row = dict[str, Any]


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
    names = list(dict.fromkeys(row["trace"] for row in report["rows"]))
    figure, axes = pyplot.subplots(len(names), 4, figsize=(19, 4 * len(names)), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        rows = [row for row in report["rows"] if row["trace"] == name]
        _bytes(line[0], name, rows)
        _network(line[1], rows)
        _host(line[2], rows)
        _links(line[3], [row for row in report["links"] if row["trace"] == name])
    figure.suptitle(f"{report['what']}; {report['hardware']}, {report['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _bytes(axis: Any, name: str, rows: list[Row]) -> None:
    modes = [row["mode"] for row in rows]
    admitted, missed = ([row[part] for row in rows] for part in ("admitted_gib", "missed_gib"))
    axis.bar(modes, admitted, label="at admission")
    axis.bar(modes, missed, bottom=admitted, label="misses while decoding")
    axis.set_title(f"{name}: network bytes of a request")
    axis.set_ylabel("GiB")
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
    if modes:
        axis.legend(fontsize=7)
