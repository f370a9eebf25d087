import json
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli import plots
from oasiskv.cli.main import main


def a_row(mode: str, context: int, requests: int, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"mode": mode, "context": context, "requests": requests, "running": min(requests, 20)}
    return row | {"steady_tokens_per_s": 100.0 * row["running"], "tpot_ms_mean": 10.0} | more


def a_report(*rows: dict[str, Any], device: str = "NVIDIA H200") -> dict[str, Any]:
    return {"date": "2026-11-30", "device": device, "model": "m", "rows": list(rows)}


ROWS = [
    a_row("dense", 4096, 16, hbm_read_bytes_per_step=2e9),
    a_row("dense", 4096, 1, hbm_read_bytes_per_step=1e9),
    a_row("oasiskv", 4096, 16, load_bytes_per_step=4e8, hbm_read_bytes_per_step=5e8),
    a_row("oasiskv", 16384, 40, load_bytes_per_step=5e8, hbm_read_bytes_per_step=5e8),
    a_row("dense", 4096, 16, steady_tokens_per_s=7.0),
]


def test_a_curve_goes_through_the_rounds_of_a_context_in_order_and_the_later_of_two_counts() -> None:
    assert plots.curves(ROWS, 4096, "steady_tokens_per_s") == {
        "dense": [(1, 100.0), (16, 7.0)],
        "oasiskv": [(16, 1600.0)],
    }
    assert plots.curves(ROWS, 16384, "running") == {"oasiskv": [(40, 20)]}
    assert plots.curves(ROWS, 4096, "load_bytes_per_step") == {"oasiskv": [(16, 4e8)]}


def test_a_roofline_has_only_rows_that_moved_bytes() -> None:
    assert plots.roofline(ROWS, "load_bytes_per_step") == {"oasiskv": [(40.0, 1600.0), (40.0, 2000.0)]}
    assert list(plots.roofline(ROWS, "hbm_read_bytes_per_step")) == ["dense", "oasiskv"]


def test_a_roof_is_that_of_the_device_or_else_the_best_of_the_rows() -> None:
    assert plots.roof_gb_per_s([a_report(*ROWS)], "host link") == 50
    assert plots.roof_gb_per_s([a_report(*ROWS, device="x86_64")], "host link") == pytest.approx(50.0)
    assert plots.roof_gb_per_s([a_report(*ROWS, device="x86_64")], "HBM") == pytest.approx(200.0)
    assert plots.roof_gb_per_s([a_report(ROWS[4], device="x86_64")], "HBM") is None


def test_results_of_several_runs_are_drawn_together_those_without_newer_columns_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "new.json", tmp_path / "old.json"]
    files[0].write_text(json.dumps(a_report(*ROWS)))
    files[1].write_text(json.dumps(a_report(a_row("dense", 16384, 20))))
    assert main(["bench", "plot", *map(str, files), "--out", str(tmp_path / "plots")]) == 0
    pictures = [tmp_path / "plots" / "throughput.png", tmp_path / "plots" / "roofline.png"]
    assert capsys.readouterr().out.split() == [str(path) for path in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in pictures)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}', '{"rows": [{"mode": "dense"}], "date": "today"}'])
def test_a_file_without_results_of_a_sweep_is_refused_and_nothing_is_drawn(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.json").write_text(text)
    assert main(["bench", "plot", str(tmp_path / "file.json"), "--out", str(tmp_path / "plots")]) == 2
    assert capsys.readouterr().err.startswith("error: FILE: expected results of bench sweep, got ")
    assert not (tmp_path / "plots").exists()
