"""Marks tests by their folder, and skips with a reason what this host cannot run."""

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from oasiskv.cli.model import fetch

TESTS = Path(__file__).parent
FOLDER_MARKS = {"e2e", "gpu", "soak"}

# `make test` tries the same few examples every time; `make soak` as many new ones as its time allows.
settings.register_profile("test", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True)
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
