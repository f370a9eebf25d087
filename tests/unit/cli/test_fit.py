import json
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli.main import main
from oasiskv.core.switch_fit import MeasuredStep, StepSizes, estimate_ms
from oasiskv.core.switch_rule import DEVICE_SPEEDS

SIZES = {
    "weight_bytes": 15_000_000_000, "num_layers": 36, "num_kv_heads": 8, "unit_bytes": 8192, "rows_per_page": 16,
    "budget_blocks": 128, "block_size": 16,
}  # fmt: skip


def a_sweep(device: str = "NVIDIA H200") -> dict[str, Any]:
    """Results of an H200 that is as DEVICE_SPEEDS says, a hundredth slower in every second round."""
    rows: list[dict[str, Any]] = []
    for context in (4096, 16384):
        for count in (1, 16, 40):
            for mode in ("dense", "oasiskv-early"):
                load = 6 * count * 36 * 8 * 8192 if mode != "dense" else 0
                step = MeasuredStep(
                    sizes=StepSizes(**SIZES), context=context, num_requests=count, step_ms=1, is_sparse=mode != "dense",
                    load_bytes=load,
                )  # fmt: skip
                ms = estimate_ms(DEVICE_SPEEDS["NVIDIA H200"], step) * (1.01 if len(rows) % 2 else 1)
                row: dict[str, Any] = {"mode": mode, "context": context, "requests": count, "running": count}
                row |= {"tpot_ms_mean": ms, "steady_tokens_per_s": 1e3 * count / ms, "step_sizes": SIZES}
                rows.append(row | ({"sparse_share": 1.0, "load_bytes_per_step": load} if load else {}))
    return {"date": "2026-11-30", "device": device, "rows": rows}


def test_one_command_turns_a_sweep_into_the_entry_of_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(a_sweep()))
    assert main(["bench", "fit", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '    "NVIDIA H200": DeviceSpeed('
    entry = dict(line.strip(" ,").split("=") for line in lines[1:8])
    assert float(entry["memory_bytes_per_s"]) == pytest.approx(4.25e12, rel=0.02)
    assert float(entry["link_bytes_per_s"]) == 49.5e9
    assert lines[9].startswith("now      largest error 1.0 %")
    assert lines[10].startswith("fitted   largest error ")
    assert float(lines[10].split()[3]) <= 1.1
    assert sum(line.startswith(("dense ", "sparse ")) for line in lines) == 12
    rule = [line for line in lines if line.startswith("rule ")]
    assert len(rule) == 6
    assert all(float(line.split()[-3]) <= 1 for line in rule)


def test_results_of_two_kinds_of_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("NVIDIA H200", "another"):
        (tmp_path / name).write_text(json.dumps(a_sweep(name)))
    assert main(["bench", "fit", str(tmp_path / "NVIDIA H200"), str(tmp_path / "another")]) == 2
    assert capsys.readouterr().err.startswith("error: FILE: expected results of one kind of device, got NVIDIA H200, ")


def test_an_unknown_device_needs_the_speed_of_its_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(a_sweep("another")))
    assert main(["bench", "fit", str(tmp_path / "sweep.json")]) == 2
    assert capsys.readouterr().err.startswith("error: --link-gb-per-s: expected a number for another,")
    assert main(["bench", "fit", str(tmp_path / "sweep.json"), "--link-gb-per-s", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --link-gb-per-s: expected more than 0, got 0.0")
    assert main(["bench", "fit", str(tmp_path / "sweep.json"), "--link-gb-per-s", "49.5"]) == 0
    assert "now " not in capsys.readouterr().out
