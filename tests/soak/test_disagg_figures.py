"""What partial handovers save of traces like the published ones, by `oasiskv bench disagg` at its full length."""

import json
from pathlib import Path

import pytest

from oasiskv.cli.main import main

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize(
    ("trace", "host_less", "first_set", "host", "total"),
    [("24k", "2.25", 6.5, 2.2, None), ("32k", "2.65", 9.7, 2.6, 1.9)],
)
def test_one_setting_saves_in_each_place_what_is_published(
    trace: str, host_less: str, first_set: float, host: float, total: float | None, tmp_path: Path
) -> None:
    # A cap of 0.05 in so much less host memory than all KV takes; of 24K no total is published.
    command = ["bench", "disagg", "--traces", trace, "--layers", "1", "--requests", "1", "--concurrency", "1"]
    command += ["--modes", "full", "capped-0.05", "--host-less", host_less, "--links", "--no-plots"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    limited = rows[f"capped-0.05, host/{host_less}"]
    assert limited["first_set_x"] >= first_set
    assert min(limited["host_x"], limited["host_peak_x"]) >= host
    assert total is None or limited["total_x"] >= total
