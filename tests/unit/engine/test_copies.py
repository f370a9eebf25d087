"""How other projects' copies are called, with stand-ins that copy as those say they do."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from oasiskv.engine.vllm import copies
from oasiskv.kernels import bench
from oasiskv.kernels.copies import Copy, copies_the_same, copy_engines
from oasiskv.kernels.transfer import reference

MODEL = bench.Model(
    num_layers=3, num_kv_heads=2, group=2, head_dim=16, budget=5, max_cap=3, hidden=32, intermediate=32,
    dtype=torch.float16,
)  # fmt: skip


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> bench.Step:
    torch.manual_seed(0)
    memory = bench.Memory(MODEL, 80, 30, torch.device("cpu"))
    # What the copies are compared with, without the interpreter.
    monkeypatch.setattr("oasiskv.kernels.bench.transfer_kernel", reference)
    return bench.Step(MODEL, memory, 4, 9, "minmax")


def gather(
    hosts: torch.Tensor, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor, counts: torch.Tensor
) -> None:
    assert source.dtype == target.dtype == counts.dtype == torch.int32
    assert source.is_contiguous()
    assert cache.dim() == 3
    assert hosts.dim() == 2
    for row, count in enumerate(counts.tolist()):
        for read, write in zip(source[row, :count].tolist(), target[row, :count].tolist(), strict=True):
            cache.view(-1, cache.shape[-1])[write] = hosts[read]


def swap(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    assert sources.dtype == targets.dtype == sizes.dtype == torch.int64
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.mark.parametrize(
    "make",
    [
        lambda step: copies.gather_compact(step, gather),
        lambda step: copies.swap_in(step, "swap", swap),
        lambda step: copies.swap_out(step, "swap", swap),
        *(lambda step, place=place: list(copy_engines(step))[place] for place in range(3)),
    ],
    ids=["gather_compact", "swap_in", "swap_out", "units", "blocks", "blocks to host"],
)
def test_every_way_copies_what_ours_copies(step: bench.Step, make: Callable[[bench.Step], Copy]) -> None:
    copy = make(step)
    assert copies_the_same(step, copy)
    assert copy.num_bytes == copy.num_layers * 4 * 2 * 3 * 16 * 2 * 16 * 2
    for layer in range(copy.num_layers):
        copy.action(layer)


def test_a_way_that_copies_nothing_or_elsewhere_is_found_out(step: bench.Step) -> None:
    for wrong in (lambda *_: None, lambda sources, targets, sizes: swap(sources.flip(0), targets, sizes)):
        assert not copies_the_same(step, copies.swap_in(step, "wrong", wrong))
        assert not copies_the_same(step, copies.swap_out(step, "wrong", wrong))


def test_what_this_build_of_vllm_lacks_is_named_with_the_reason(step: bench.Step) -> None:
    pytest.importorskip("vllm")
    found = list(copies.vllm_copies(step))
    assert [copy.name for copy in found] == [
        "hisparse_gather_compact",
        "swap_blocks_batch",
        "swap_blocks_batch, Triton",
        "swap_blocks_batch to host",
    ]
    if not torch.cuda.is_available():
        reasons = [getattr(copy, "reason", "") for copy in found]
        assert reasons[0] == "this build of vLLM has no operation hisparse_gather_compact"
        assert all(reason.startswith("this build of vLLM has no operation swap_blocks_batch") for reason in reasons[1:])
