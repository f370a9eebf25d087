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
        # 14 blocks of 16 tokens, or 7 of 32, of 2 layers: one head of 32 numbers for K and for V in bfloat16.
        token_bytes = 2 * 2 * 32 * 2
        assert row["hbm_kv_bytes"] >= 200 * token_bytes
        assert row["hbm_kv_bytes"] % (16 * token_bytes) == 0
        sizes = row["step_sizes"]
        assert (sizes["num_layers"], sizes["num_kv_heads"], sizes["block_size"]) == (
            2,
            1,
            32 if mode == "dense" else 16,
        )
        if mode == "oasiskv":
            assert sizes["budget_blocks"] == 4
            assert row["sparse_rows"] > 10 * requests
            assert 0 < row["cap_share"] <= 1
            assert 0 < row["hit_share"] < 1
            assert row["load_bytes_per_step"] > 0
            assert row["cap_mean"] == 4
            assert 0.5 < row["sparse_share"] <= 1
            assert 0 < row["host_kv_bytes"] <= row["host_bytes"] == 2**26
            # Requests are short while they decode, but their prompts were whole.
            assert row["hbm_read_bytes_per_step"] < rows["dense", requests]["hbm_read_bytes_per_step"]
    # Nothing is missing now, so no engine starts and the file stays as it is.
    before, lines = results.read_bytes(), capsys.readouterr().out
    assert main([*command, "3", "1"]) == 0
    assert results.read_bytes() == before
    assert capsys.readouterr().out == lines
    assert lines.count("oasiskv") == 2
