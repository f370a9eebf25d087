"""Draw what `oasiskv bench kernels` found: shares of the ceilings, and how long a step takes with its background."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def draw(found: dict[str, Any], path: Path) -> None:
    rows = found["results"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    alone = [row for row in rows if row.get("share")]
    names = [f"{row['op']} {row['rows']}x{row['blocks']} {row['kind']}" for row in alone]
    left.barh(names, [100 * row["share"] for row in alone], color="#33628d")
    left.set_xlabel("% of the bandwidth of a plain copy")
    left.set_xlim(0, 105)
    left.tick_params(axis="y", labelsize=7)
    left.invert_yaxis()
    for op in dict.fromkeys(row["op"] for row in rows if "step_ms" in row):
        points = [(row["rows"], row["step_ms"]) for row in rows if row["op"] == op]
        right.plot(*zip(*points, strict=True), marker="o", label=op)
    right.set_xlabel("requests in the batch, 1,024 blocks each")
    right.set_ylabel("ms a step")
    right.legend(fontsize=7)
    versions = found["versions"]
    figure.suptitle(
        f"{found['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {found['date']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a JSON file of `oasiskv bench kernels`")
    path = parser.parse_args().results
    draw(json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
