from pathlib import Path

import numpy as np
import pytest

from oasiskv.cli import main as frame
from oasiskv.cli.trace import stats_lines
from oasiskv.core.trace import SelectionTrace, load_trace


def test_a_generated_trace_is_described_beside_the_published_figures_and_never_as_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.npz"
    command = ["trace", "generate", "--fit", "32k", "--layers", "1", "--steps", "5", "--seed", "7", "--out", str(path)]
    assert frame.main(command) == 0
    made = capsys.readouterr().out
    assert "source    generated to fit 32k, seed 7" in made
    assert "5 steps, 1 layers, 8 KV heads, budget 128; prompt 32768 tokens in 2048 blocks" in made
    assert "(published: 211)" in made
    assert made.endswith("These are statistics of a trace, not results of a model.\n")
    assert frame.main(["trace", "stats", str(path)]) == 0
    assert capsys.readouterr().out == made
    assert load_trace(path).num_steps == 5


def test_a_recorded_trace_is_not_held_against_published_figures() -> None:
    blocks = np.tile(np.arange(4, dtype=np.uint16), (3, 1, 2, 1))
    recorded = SelectionTrace(num_tokens=80, block_size=16, num_sinks=1, source="recorded from m", blocks=blocks)
    lines = list(stats_lines(recorded))
    assert "published" not in "".join(lines)
    assert "drift     0.00 of 4 blocks a head and step" in lines
    assert "reuse     100.0 % of a selection was selected the step before" in lines


def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.npz"
    path.write_text("no trace")
    assert frame.main(["trace", "stats", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: trace: expected a file of the format oasiskv-trace")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "error"),
    [(["--context", "8"], "--context: expected at least 32"), (["--steps", "1"], "--steps: expected")],
)
def test_a_recording_that_cannot_be_is_refused_before_anything_starts(
    given: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    out = tmp_path / "trace.npz"
    assert frame.main(["trace", "record", *given, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")
    assert not out.exists()
