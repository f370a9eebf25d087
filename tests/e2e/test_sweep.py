"""`oasiskv bench sweep` with real engines: what it finds, and that it goes on where it was cut off."""

import json
from pathlib import Path

import pytest

from oasiskv.cli.main import main
from oasiskv.engine.testing import write_tiny_model

pytestmark = pytest.mark.timeout(300)


def test_a_sweep_measures_every_round_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model", num_kv_heads=1, num_heads=2)
    results = tmp_path / "results" / "sweep.json"
    command = [
        "bench",
        "sweep",
        str(model),
        "--contexts",
        "200",
        "--tokens",
        "24",
        "--memory-share",
        "0.2",
        "--set",
        "budget_blocks=4",
    ]
    command += ["--host-memory", "64MiB", "--results", str(results), "--modes", "dense", "oasiskv", "--requests"]
    assert main([*command, "1", "3"]) == 0
    rows = {(row["mode"], row["requests"]): row for row in json.loads(results.read_text())["rows"]}
    assert rows.keys() == {("dense", 1), ("dense", 3), ("oasiskv", 1), ("oasiskv", 3)}
    for (mode, requests), row in rows.items():
        assert row["running"] == requests
        assert row["steps"] >= 10
        assert 0 < row["tpot_ms_p50"] <= row["tpot_ms_p99"]
        assert 0 < row["ttft_s_p50"] < row["wall_s"]
        if mode == "oasiskv":
            assert row["sparse_rows"] > 10 * requests
            assert 0 < row["cap_share"] <= 1
            assert 0 < row["hit_share"] < 1
            assert row["load_bytes_per_step"] > 0
    # Nothing is missing now, so no engine starts and the file stays as it is.
    before, lines = results.read_bytes(), capsys.readouterr().out
    assert main([*command, "3", "1"]) == 0
    assert results.read_bytes() == before
    assert capsys.readouterr().out == lines
    assert lines.count("oasiskv") == 2
