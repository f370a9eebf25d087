"""Host pools that are registered with CUDA: copies are asynchronous and right, and `close` ends the registration."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.core.host_memory import HostPoolConfig
from oasiskv.engine import host_pool
from oasiskv.engine.host_pool import HostPool

CONFIG = HostPoolConfig(num_blocks=97, num_layers=3, num_kv_heads=7, block_size=16, head_dim=24, dtype_bytes=2)
MAKERS = pytest.mark.parametrize("make", [HostPool.private, HostPool.shared], ids=["private", "shared"])
Make = Callable[..., HostPool]
CUDA: Any = torch.cuda  # untyped in part
# About half a second of the device: far longer than the host needs to queue what follows.
LONG_CYCLES = 1_000_000_000


def noise(pool: HostPool) -> torch.Tensor:
    return torch.randn(pool.units.shape, generator=torch.Generator().manual_seed(3)).to(pool.units.dtype)


@pytest.fixture
def owner() -> Iterator[HostPool]:
    with HostPool.shared(CONFIG, torch.bfloat16) as pool:
        yield pool


@MAKERS
def test_all_memory_is_pinned_until_close(make: Make) -> None:
    pool = make(CONFIG, torch.bfloat16, pin=True)
    view = pool.units.view(-1)
    assert all(piece.is_pinned() for piece in view.chunk(61))
    pool.close()
    assert not any(piece.is_pinned() for piece in view.chunk(61))


@MAKERS
def test_without_pin_nothing_is_pinned(make: Make) -> None:
    with make(CONFIG, torch.bfloat16) as pool:
        assert not pool.units.is_pinned()


@MAKERS
def test_a_copy_to_the_device_and_back_is_asynchronous_and_right(make: Make) -> None:
    with make(CONFIG, torch.bfloat16, pin=True) as pool:
        expected = noise(pool)
        pool.units.copy_(expected)
        other = expected.flip(0).to("cuda")
        on_device = torch.zeros_like(other)
        done = CUDA.Event()
        CUDA._sleep(LONG_CYCLES)
        on_device.copy_(pool.units, non_blocking=True)
        pool.units.copy_(other, non_blocking=True)
        done.record()
        assert not done.query()
        done.synchronize()
        assert torch.equal(on_device.cpu(), expected)
        assert torch.equal(pool.units, expected.flip(0))


@pytest.mark.parametrize("writable", [False, True])
def test_an_attached_pool_is_pinned_and_copied_asynchronously(owner: HostPool, writable: bool) -> None:
    expected = noise(owner)
    owner.units.copy_(expected)
    with HostPool.attach(owner.fd, CONFIG, torch.bfloat16, writable=writable, pin=True) as attached:
        assert attached.units.is_pinned()
        assert attached.units[-1, -1, -1].is_pinned()
        done = CUDA.Event()
        CUDA._sleep(LONG_CYCLES)
        on_device = attached.units.to("cuda", non_blocking=True)
        done.record()
        assert not done.query()
        assert torch.equal(on_device.cpu(), expected)


def test_close_waits_for_copies_under_way() -> None:
    pool = HostPool.private(CONFIG, torch.bfloat16, pin=True)
    expected = noise(pool)
    pool.units.copy_(expected)
    CUDA._sleep(LONG_CYCLES)
    on_device = pool.units.to("cuda", non_blocking=True)
    pool.close()
    assert CUDA.current_stream().query()
    assert torch.equal(on_device.cpu(), expected)


@MAKERS
def test_a_refused_registration_leaves_the_device_usable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = CUDA.cudart()

    class UnknownFlags:
        """A real refusal: CUDA knows no such flag."""

        cudaError = cudart.cudaError
        cudaGetErrorString = staticmethod(cudart.cudaGetErrorString)

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
            return cudart.cudaHostRegister(address, num_bytes, 1 << 20)

    monkeypatch.setattr(host_pool, "_cudart", UnknownFlags)
    with pytest.raises(ConfigError, match=r"^host_pool_bytes: expected memory that CUDA can register, got .*: invalid"):
        make(CONFIG, torch.bfloat16, pin=True)
    assert torch.ones(2, device="cuda").sum().item() == 2


@MAKERS
def test_pools_can_be_made_and_closed_again_and_again(make: Make) -> None:
    for _ in range(20):
        with make(CONFIG, torch.bfloat16, pin=True) as pool:
            assert pool.units.is_pinned()


@MAKERS
def test_pools_can_be_made_and_dropped_again_and_again(make: Make) -> None:
    for _ in range(20):
        assert make(CONFIG, torch.bfloat16, pin=True).units.numel() > 0


def test_a_large_pool_is_registered_as_one_piece() -> None:
    """Past 4 GiB, with one copy over all of it."""
    config = HostPoolConfig(num_blocks=2200, num_layers=36, num_kv_heads=8, block_size=16, head_dim=128, dtype_bytes=2)
    with HostPool.private(config, torch.bfloat16, pin=True) as pool:
        pool.units[-1].fill_(1)
        on_device = pool.units.to("cuda", non_blocking=True)
        assert (on_device[-1] == 1).all()
        assert not on_device[:-1].any()
