"""What the documents name exists: files that they link to and targets of make."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_named_exists(document: Path) -> None:
    named = set(re.findall(r"(?:`|^\$ )make ([a-z]+)", document.read_text(), flags=re.MULTILINE))
    assert named <= TARGETS


def test_the_first_screen_names_the_two_commands_to_try() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert "$ make run" in first_screen
    assert "$ make test" in first_screen


def test_every_setting_that_is_refused_is_documented() -> None:
    sources = set((ROOT / "engine/oasiskv/engine/vllm").glob("*.py")) - {ROOT / "engine/oasiskv/engine/vllm/testing.py"}
    named = {
        name
        for source in sources
        for name in re.findall(
            r"[f(\s]\"((?:--|speculative_config\.|kv_transfer_config\.)[\w-]+)[\":]", source.read_text()
        )
    }
    assert len(named) > 15
    document = (ROOT / "docs/limits.md").read_text()
    assert sorted(name for name in named if f"`{name}`" not in document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_named_exists(document: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", document.read_text()):
        assert re.search(rf"^(?:def {name}\(|{name} = )", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_test_named_without_its_file_exists() -> None:
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {(each.name, name) for each in DOCUMENTS for name in re.findall(r"`(test_\w+)`", each.read_text())}
    assert len(named) > 30
    assert sorted((document, name) for document, name in named if name not in defined) == []


def test_each_of_the_ten_invariants_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+)\. .*::test_", (ROOT / "docs/invariants.md").read_text(), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 11)]
