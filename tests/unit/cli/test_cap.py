from pathlib import Path

import pytest

from oasiskv.cli.main import main
from oasiskv.core.cap import CapInput, CapLimits, CapRule, Measured, log_head, log_line


def a_log(path: Path, *, harm: bool = False) -> Path:
    limits = CapLimits(least=4, most=32, first=6)
    rule, lines = CapRule(limits), [log_head(limits)]
    measured = Measured(step_s=0.01, stall_s=0.001, transfer_s=0.002, num_units=1000, num_rows=3, cap=6)
    for given in (CapInput(num_rows=3), CapInput(num_rows=3, measured=measured)):
        lines.append(log_line(given, rule.step(given) + (harm and given.measured is not None)))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_that_replays_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_log(tmp_path / "cap.jsonl")
    assert main(["cap", "replay", str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}: 2 steps, cap 6 to 10, last 10, 1 changes; waits 1.000 ms a step over 1 measurements\n"
    )


def test_a_log_whose_caps_the_rule_would_not_choose_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = a_log(tmp_path / "good.jsonl"), a_log(tmp_path / "bad.jsonl", harm=True)
    assert main(["cap", "replay", str(good), str(bad)]) == 1
    assert capsys.readouterr().err == f"error: {bad}: the rule chooses another cap in step 1 of the log\n"


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cap", "replay", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: FILE: expected a log, got ")
