"""Devices and dtypes of the kernel tests: natively on a GPU, else in Triton's interpreter, whose bfloat16 is wrong."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton decides when a kernel is decorated, so this comes before the first import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 warns where this is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=["reference", "kernel"])
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
