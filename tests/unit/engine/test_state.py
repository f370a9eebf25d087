"""What the backend takes on the device, it takes with the working sets: before the engine looks at what is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.pipeline import InlinePipeline
from oasiskv.engine.runtime import Runtime
from oasiskv.engine.state import CacheShape, WorkingSets

SHAPE = CacheShape(
    num_layers=2,
    num_target_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype=torch.float32,
    scale=0.4,
)
CONFIG = LookaheadConfig(budget_blocks=8)
DEVICE = torch.device("meta")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the bytes of each tensor that is made on the device."""
    sizes: list[int] = []

    def count(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            if tensor.device == DEVICE:
                sizes.append(tensor.nbytes)
            return tensor

        return made

    with monkeypatch.context() as patch:
        for name in ("zeros", "ones", "empty", "full", "arange"):
            patch.setattr(torch, name, count(getattr(torch, name)))
        yield sizes


def bytes_taken(max_blocks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes on the device of the working sets, and of everything that is made later."""
    caches = [torch.empty(20, 2, 16, 16, device=DEVICE) for _ in range(SHAPE.num_layers)]
    pool = HostPool.private(SHAPE.host_pool(4), SHAPE.host_dtype)
    with counted(monkeypatch) as first:
        sets = WorkingSets(CONFIG, SHAPE, 4, max_blocks, DEVICE)
    with counted(monkeypatch) as later:
        runtime = Runtime(CONFIG, SHAPE, sets, caches, pool, InlinePipeline())
    runtime.close()
    return sum(first), sum(later)


def test_what_grows_with_the_longest_request_is_taken_with_the_working_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    (short_first, short_later), (long_first, long_later) = (bytes_taken(n, monkeypatch) for n in (100, 10_000))
    assert long_first > short_first
    assert long_later == short_later > 0
    assert long_later < long_first / 100
