from pathlib import Path

import pytest

from oasiskv.cli import main as frame


def test_without_a_gpu_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert frame.main(["bench", "kernels", "--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err.startswith("error: bench kernels: expected a CUDA device, got torch ")
    assert list(tmp_path.iterdir()) == []


def test_a_suite_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        frame.main(["bench"])
    assert "suite" in capsys.readouterr().err
