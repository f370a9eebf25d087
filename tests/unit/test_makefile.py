"""What `make` would do in a checkout that is set up already; nothing is run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # This test may run below a make that was told other things.
    told = ("PYTHON", "ENGINE", "MODEL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = ["make", "-n", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def set_up(checkout: Path, engine: str) -> None:
    (checkout / ".venv" / "ready").write_text(f"{engine}\n")
    os.utime(checkout / "pyproject.toml", (0, 0))


def test_the_other_build_of_vllm_is_refused_beside_the_one_that_is_there(checkout: Path) -> None:
    set_up(checkout, "cpu")
    done = make(checkout, "install", "ENGINE=cuda")
    assert done.returncode == 2
    assert "ENGINE: expected cpu, which .venv holds, got cuda" in done.stderr
    assert make(checkout, "clean", "ENGINE=cuda").returncode == 0


def test_an_environment_that_is_there_is_used_and_renewed_with_its_own_build(checkout: Path) -> None:
    set_up(checkout, "cuda")
    assert "pip install" not in make(checkout, "run").stdout
    os.utime(checkout / ".venv" / "ready", (1, 1))
    os.utime(checkout / "pyproject.toml", (2, 2))
    renewed = make(checkout, "install").stdout
    assert ".[cuda,services" in renewed
    assert "uninstall" not in renewed


def test_a_new_environment_gets_the_build_for_the_cpu(checkout: Path) -> None:
    assert ".[cpu,services" in make(checkout, "install").stdout
    assert ".[cuda,services" in make(checkout, "install", "ENGINE=cuda").stdout
