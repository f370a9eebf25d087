"""Rooms of one worker: what a layer keeps when places get few, and that what is said to be here is what was fetched."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from oasiskv.engine.fetched import FetchedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.state import CacheShape

NUM_LAYERS, NUM_BLOCKS, SLOT = 2, 40, 1
SHAPE = CacheShape(
    num_layers=NUM_LAYERS,
    num_target_layers=NUM_LAYERS,
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype=torch.bfloat16,
    scale=1.0,
)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool.private(SHAPE.host_pool(64), SHAPE.host_dtype)
    yield made
    made.close()


def opened(pool: HostPool, host_ids: list[int]) -> FetchedBlocks:
    fetched = FetchedBlocks(NUM_LAYERS, torch.full((2, NUM_BLOCKS), -1, dtype=torch.int32), pool)
    fetched.open(SLOT, NUM_BLOCKS)
    fetched.resize(SLOT, 0, host_ids)
    return fetched


def content(layer: int, block: int) -> torch.Tensor:
    """Return the bytes of a block: numbers that no other has."""
    return torch.full((2, 16, 16), 100.0 * layer + block, dtype=torch.bfloat16)


def keep(fetched: FetchedBlocks, layer: int, blocks: list[int], resident: list[int]) -> None:
    data = torch.stack([content(layer, block) for block in blocks])
    fetched.keep(layer, SLOT, torch.tensor(blocks), data, torch.tensor(resident))


def here(fetched: FetchedBlocks, pool: HostPool, layer: int) -> set[int]:
    """Return the blocks that a layer has, each of which must be what was fetched."""
    blocks = torch.nonzero(~fetched.absent[layer, SLOT, :NUM_BLOCKS]).flatten().tolist()
    places = [int(fetched.table(layer)[SLOT, block]) for block in blocks]
    assert len(set(places)) == len(places)
    for block, place in zip(blocks, places, strict=True):
        assert torch.equal(pool.units[place, layer], content(layer, block))
    return set(blocks)


def test_the_copy_that_was_resident_last_longest_ago_gives_its_place_up(pool: HostPool) -> None:
    fetched = opened(pool, [10, 11, 12, 13])
    keep(fetched, 0, [1, 2, 3], [1, 2, 3])
    keep(fetched, 0, [4], [1, 4])
    # 2 and 3 have left, 3 comes back, which no fetch tells but the next one's residents.
    keep(fetched, 0, [5], [1, 3, 4, 5])
    assert here(fetched, pool, 0) == {1, 3, 4, 5}
    keep(fetched, 0, [6], [3, 6])
    assert here(fetched, pool, 0) in ({3, 4, 5, 6}, {1, 3, 5, 6}, {1, 3, 4, 6})
    # A layer of its own.
    assert here(fetched, pool, 1) == set()


def test_a_block_for_which_everybody_is_resident_is_not_kept(pool: HostPool) -> None:
    fetched = opened(pool, [10, 11])
    keep(fetched, 0, [1, 2], [1, 2])
    keep(fetched, 0, [3], [1, 2, 3])
    assert here(fetched, pool, 0) == {1, 2}


def test_a_room_that_shrinks_keeps_what_was_resident_last_whatever_its_place(pool: HostPool) -> None:
    fetched = opened(pool, [10, 11, 12, 13, 14])
    for layer, last in ((0, [4, 5]), (1, [1, 5])):
        keep(fetched, layer, [1, 2, 3, 4, 5], [])
        keep(fetched, layer, [6], last)
    before = [here(fetched, pool, layer) for layer in range(NUM_LAYERS)]
    assert all(6 in kept for kept in before)
    fetched.resize(SLOT, 3, [])
    assert [here(fetched, pool, layer) for layer in range(NUM_LAYERS)] == [{4, 5, 6}, {1, 5, 6}]
    # What was given back may hold another's bytes from now on.
    pool.units[13:15] = -1
    assert [here(fetched, pool, layer) for layer in range(NUM_LAYERS)] == [{4, 5, 6}, {1, 5, 6}]
    fetched.resize(SLOT, 1, [20])
    assert all(len(here(fetched, pool, layer)) == 1 for layer in range(NUM_LAYERS))
    keep(fetched, 0, [7], [7])
    assert 7 in here(fetched, pool, 0)
    assert len(here(fetched, pool, 0)) == 2
    fetched.resize(SLOT, 0, [])
    assert [here(fetched, pool, layer) for layer in range(NUM_LAYERS)] == [set(), set()]


def test_any_order_of_fetching_and_resizing_keeps_what_is_said_to_be_here(pool: HostPool) -> None:
    random = np.random.default_rng(0)
    fetched, host_ids = opened(pool, []), list[int]()
    for _ in range(300):
        if random.random() < 0.3:
            num_kept = int(random.integers(0, len(host_ids) + 1))
            host_ids = host_ids[:num_kept]
            free = [number for number in range(64) if number not in host_ids]
            new = random.choice(free, int(random.integers(0, 6)), replace=False).tolist()
            fetched.resize(SLOT, num_kept, new)
            host_ids += new
            taken = [number for number in range(64) if number not in host_ids]
            pool.units[taken] = -1
        for layer in range(NUM_LAYERS):
            absent = torch.nonzero(fetched.absent[layer, SLOT, :NUM_BLOCKS]).flatten().numpy()
            blocks = random.choice(absent, min(len(absent), 3), replace=False).tolist()
            others = random.choice(NUM_BLOCKS, 5, replace=False).tolist()
            keep(fetched, layer, blocks, blocks + others)
            assert len(here(fetched, pool, layer)) <= len(host_ids)
