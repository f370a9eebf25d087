"""`oasiskv bench disagg --model` and `bench threshold` start services of their own, and stop them."""

import json
from pathlib import Path

import pytest

from oasiskv.cli.main import main
from oasiskv.engine.testing import write_tiny_model, write_word_tokenizer

pytestmark = pytest.mark.timeout(1200)

PART_MIB = 2 * 16 * 2 * 32 * 4 / 2**20
"""One layer of a block of the tiny model: 2 KV heads, 16 tokens, K and V of 32 in float32."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "model", num_layers=3)
    write_word_tokenizer(folder, 256)
    return folder


def test_requests_are_handed_over_and_what_crosses_is_counted(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "disagg", "--model", str(model), "--context", "390", "--tokens", "20", "--requests", "2"]
    command += ["--concurrency", "1", "--modes", "capped-0.1", "--no-plots", "--out", str(tmp_path / "results")]
    assert main(command) == 0
    (path,) = (tmp_path / "results").iterdir()
    assert path.name.startswith("disagg-services-")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["mode"], row["requests"], row["handovers"]) == ("capped-0.1", 2, 2)
    # 24 complete blocks and an active one; budget 3, so at most 6 blocks of a layer at first, and 2 pages, active, map.
    assert row["full_mib"] == pytest.approx(25 * 3 * PART_MIB)
    assert (3 + 4) * 3 * PART_MIB <= row["admitted_mib"] <= (6 + 4) * 3 * PART_MIB
    assert row["total_mib"] == row["admitted_mib"] + row["missed_mib"]
    assert sum(row["network_mb_per_s"]) == pytest.approx(2 * row["total_mib"] * 2**20 / 1e6, rel=0.01)
    assert row["ttft_s"] > 0
    assert "capped-0.1" in capfd.readouterr().out


def test_prompts_are_answered_both_ways(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "threshold", "--model", str(model), "--lengths", "40", "200", "600", "--repeats", "3"]
    assert main([*command, "--out", str(tmp_path / "results")]) == 0
    (path,) = (tmp_path / "results").iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row["length"] for row in rows] == [40, 200, 600]
    assert [row["remote_second_s"] is None for row in rows] == [True, False, False]
    assert "local_prompt_tokens = " in capfd.readouterr().out
