"""Marks tests by their folder, and skips with a reason what this host cannot run."""

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from oasiskv.cli.model import fetch

if TYPE_CHECKING:
    from oasiskv.engine.testing import EngineProcess

TESTS = Path(__file__).parent
FOLDER_MARKS = {"e2e", "gpu", "soak"}

# `make test` tries the same few examples every time; `make soak` as many new ones as its time allows.
settings.register_profile("test", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("soak", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("test")


@cache
def why_no_cuda() -> str | None:
    """Return why torch cannot use a CUDA device here, or None where it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def pytest_configure() -> None:
    # Triton decides when a kernel is decorated, so this must be set before the first kernel module is imported.
    if why_no_cuda() is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # A shell starts background jobs with SIGINT ignored, and so would be every program that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKS:
            item.add_marker(folder)
        if folder == "gpu" and (reason := why_no_cuda()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct: from the user's cache, or fetched into it (100 MB) the first time."""
    return fetch("smollm2-135m")


def _engine_process(log_folder: Path, name: str, *, use_v2: bool = False) -> "Iterator[EngineProcess]":
    # Needs torch, which not every test does.
    from oasiskv.engine.testing import EngineProcess

    process = EngineProcess(log_folder / f"{name}.log", use_v2=use_v2)
    yield process
    process.close()


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-logs")


@pytest.fixture(scope="session")
def stock(log_folder: Path) -> "Iterator[EngineProcess]":
    """Return a process for engines without the backend."""
    yield from _engine_process(log_folder, "stock")


@pytest.fixture(scope="session")
def backend(log_folder: Path) -> "Iterator[EngineProcess]":
    """Return a process for engines with the backend, on model runner V1."""
    yield from _engine_process(log_folder, "backend")


@pytest.fixture(scope="session")
def stock_v2(log_folder: Path) -> "Iterator[EngineProcess]":
    """Return a process for engines without the backend, on model runner V2 by Triton's interpreter."""
    yield from _engine_process(log_folder, "stock-v2", use_v2=True)


@pytest.fixture(scope="session")
def backend_v2(log_folder: Path) -> "Iterator[EngineProcess]":
    """Return a process for engines with the backend, on model runner V2 by Triton's interpreter."""
    yield from _engine_process(log_folder, "backend-v2", use_v2=True)
