"""Draw what `oasiskv bench staging` found: GB/s by path and size of a part, beside plain copies of the same bytes."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def draw(found: dict[str, Any], path: Path) -> None:
    rows = [row for row in found["results"] if "parts_per_s" in row or row["path"] == "SSD"]
    names = list(dict.fromkeys(row["path"] for row in rows))
    panels = [(op, what) for what in ("one layer", "all layers") for op in ("write", "read")]
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7), sharey=True)
    for axis, (op, what) in zip(axes.flat, panels, strict=True):
        chosen = [row for row in rows if (row["op"], row["bytes"]) == (op, what)]
        for number, name in enumerate(names):
            points = sorted((row["part_KiB"], row) for row in chosen if row["path"] == name)
            if not points:
                continue
            sizes = [size for size, _ in points]
            axis.plot(sizes, [row["gb_per_s"] for _, row in points], marker="o", color=f"C{number}", label=name)
            if all("plain_gb_per_s" in row for _, row in points):
                axis.plot(sizes, [row["plain_gb_per_s"] for _, row in points], linestyle=":", color=f"C{number}")
        axis.set_title(f"{op}, {what}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("KiB a part")
        axis.set_ylabel("GB/s (dotted: plain copy)")
        axis.grid(visible=True, which="both", alpha=0.2)
    axes.flat[3].legend(fontsize=7)
    figure.suptitle(f"{found['cpu']}, NIXL {found['versions']['nixl-cu13']}, {found['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file of `oasiskv bench staging`")
    path = parser.parse_args().results
    draw(json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
