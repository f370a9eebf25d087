"""The packaging rules of one namespace over several folders; each of them fails silently when broken."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL = PYPROJECT["tool"]
FOLDERS = sorted({path.parent.name for path in ROOT.glob("*/oasiskv")} - {"helm"})  # helm/oasiskv is the chart


def test_folders_and_namespace_have_no_init() -> None:
    assert [*ROOT.glob("*/__init__.py"), *ROOT.glob("*/oasiskv/__init__.py")] == []


def test_no_test_folder_is_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_each_folder_holds_one_typed_package_of_its_own_name() -> None:
    assert {"cli", "core", "engine", "kernels", "operator", "protos", "services"} <= set(FOLDERS)
    for folder in FOLDERS:
        assert [path.parent.name for path in ROOT.glob(f"{folder}/oasiskv/*/__init__.py")] == [folder]
        assert (ROOT / folder / "oasiskv" / folder / "py.typed").is_file()


def test_every_folder_below_a_package_is_a_package() -> None:
    sources = [path for folder in FOLDERS for path in (ROOT / folder / "oasiskv" / folder).rglob("*.py")]
    assert [path for path in sources if not (path.parent / "__init__.py").is_file()] == []


def test_every_folder_is_registered() -> None:
    assert sorted(TOOL["hatch"]["build"]["dev-mode-dirs"]) == FOLDERS
    assert sorted(TOOL["hatch"]["build"]["targets"]["wheel"]["packages"]) == [f"{folder}/oasiskv" for folder in FOLDERS]
    assert sorted(TOOL["mypy"]["mypy_path"].split(":")) == FOLDERS
    assert set(FOLDERS) <= set(TOOL["mypy"]["files"])
    assert sorted(TOOL["pyright"]["extraPaths"]) == FOLDERS
    assert sorted(TOOL["ruff"]["src"]) == FOLDERS
    assert sorted(TOOL["ruff"]["namespace-packages"]) == FOLDERS


def test_stdlib_modules_win_over_our_folders_in_the_repository_root() -> None:
    # PYTHONSAFEPATH, which the Makefile sets, would hide the trap.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = "import operator; operator.add(1, 2)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0


def test_no_source_file_has_500_lines_or_more() -> None:
    files = [path for folder in [*FOLDERS, "tests"] for path in (ROOT / folder).rglob("*.py")]
    written = [path for path in files if "_pb2" not in path.name]
    assert [path for path in written if len(path.read_text().splitlines()) >= 500] == []
