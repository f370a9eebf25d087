"""What `Runtime` does where the engine's own cache is fp8: tiny requests whose K, V and queries fp8 has exactly."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from oasiskv.core.commands import StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import CorruptBlockError, UnsupportedError
from oasiskv.engine.handover import Unattached
from oasiskv.engine.pipeline import ThreadPipeline
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.engine.switch import switch_layer
from oasiskv.engine.tiny_worker import Texts, TinyRow, TinyWorker
from oasiskv.kernels.formats import FP8
from oasiskv.kernels.rows import Row

BLOCK = 16
SHAPE = CacheShape(
    num_layers=3,
    num_target_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    block_size=BLOCK,
    dtype=FP8,
    query_dtype=torch.float32,
    scale=0.4,
)
TEXTS = Texts(2, 400, SHAPE, seed=7)
UNIT_BYTES = BLOCK * 2 * 4
Make = Callable[..., TinyWorker]


@pytest.fixture
def make() -> Iterator[Make]:
    workers = []

    def build(**changes: Any) -> TinyWorker:
        settings = {"budget_blocks": 3, "min_cap": 2, "fetch_ratio": 0, "debug_verify": True, **changes}
        worker = TinyWorker(
            LookaheadConfig.from_mapping(settings),
            SHAPE,
            TEXTS,
            num_engine_blocks=64,
            num_host_blocks=64,
            max_requests=2,
            max_blocks=26,
            pipeline=ThreadPipeline(SHAPE.num_layers, hold_layers=1),
        )
        workers.append(worker)
        return worker

    yield build
    for worker in workers:
        worker.runtime.close()


def decode(worker: TinyWorker, count: int) -> int:
    """Run a prompt of 8 blocks, switch it, and decode; return the tokens in place."""

    def row(num_computed: int, num_new: int, **more: Any) -> TinyRow:
        ids = list(range(1, 1 + -(-(num_computed + num_new) // BLOCK)))
        return TinyRow(request_id="a", text=0, num_computed=num_computed, num_new=num_new, block_ids=ids, **more)

    worker.run(StepCommands(host_blocks={"a": list(range(20, 45))}), [row(0, 8 * BLOCK)])
    worker.run(StepCommands(store={"a": (0, 8)}, switch={"a": 8}), [row(8 * BLOCK, 1)])
    for num_tokens in range(8 * BLOCK + 1, 8 * BLOCK + 1 + count):
        draft = {"num_drafts": 1, "has_usable_draft": True} if num_tokens % 3 == 0 else {}
        worker.run(StepCommands(), [row(num_tokens, 1 + len(draft) // 2, **draft)])
    return 8 * BLOCK + 1 + count


@pytest.mark.parametrize(
    ("changes", "given_dtype"),
    [
        ({}, torch.float32),
        ({"debug_poison": True, "score_alpha": 1.0}, FP8),
        ({"summary": "mid", "score_alpha": 0}, FP8),
        ({"group_reduction": "sum", "prediction": "on-demand"}, torch.float32),
    ],
    ids=["plain", "poison", "mid", "on-demand"],
)
def test_every_step_of_a_sparse_request_is_right(make: Make, changes: dict[str, Any], given_dtype: torch.dtype) -> None:
    # The tiny worker compares residents, bytes, summaries and outputs with the texts in every layer of every step.
    worker = make(**changes)
    worker.given_dtype = given_dtype
    decode(worker, 3 * BLOCK)
    worker.runtime.check_invariants()
    worker.runtime.fence()
    counts = worker.runtime.counts()
    assert counts["predicted"] == counts["hit"] + counts["fetched"] + counts["deferred"] > counts["hit"]
    assert counts["load_bytes"] == counts["fetched"] * UNIT_BYTES > 0
    assert counts["store_bytes"] == (8 + 3) * SHAPE.num_layers * 2 * UNIT_BYTES
    assert worker.pool.units.dtype == FP8
    assert worker.pool.config.total_bytes == 64 * SHAPE.num_layers * 2 * UNIT_BYTES


def test_a_resident_byte_that_differs_from_its_unit_is_found(make: Make) -> None:
    worker = make()
    decode(worker, 2)
    worker.runtime.fence()
    slot = worker.slot_of("a")
    unit = worker.kv_caches[1][int(worker.sets.slot_ids[slot, 2])]
    unit.view(torch.uint8)[1, 3, 5] ^= 1
    with pytest.raises(CorruptBlockError, match=r"bytes differ from host memory at \(head, slot\) \[\[1, 2\]\]"):
        worker.runtime.check_invariants()


def test_poison_is_the_largest_number_of_fp8(make: Make) -> None:
    from oasiskv.engine.checks import poison

    worker = make()
    decode(worker, 1)
    worker.runtime.fence()
    sets, cache, slot = worker.sets, worker.kv_caches[0], worker.slot_of("a")
    sets.plan[0, 0] = -1
    sets.plan[0, 0, 1, 0] = torch.tensor([5, 2])
    before, rows = cache.float().clone(), torch.zeros(1, len(Row), dtype=torch.int32)
    rows[0, Row.REQUEST] = slot
    poison(sets, cache, 0, rows)
    block = int(sets.slot_ids[slot, 2])
    assert (cache.float()[block, 1, :, 4:] == 448).all()
    assert (cache.float()[block, 1, :, :4] == 0).all()
    before[block, 1] = cache.float()[block, 1]
    assert torch.equal(cache.float(), before)


def first_set(cache: torch.Tensor, query: torch.Tensor, shape: CacheShape, scale: float) -> list[list[int]]:
    """Return what a switch with the reduction `softmax` chooses from 16 blocks."""
    config = LookaheadConfig(budget_blocks=3, sink_blocks=0, score_alpha=1.0, group_reduction="softmax")
    sets = WorkingSets(config, shape, 1, 20, torch.device("cpu"))
    resident = torch.zeros(2, 3, dtype=torch.int32)
    switch_layer(
        cache,
        torch.arange(16, dtype=torch.int32),
        torch.tensor([[0, 16, 0, -1, 0]], dtype=torch.int32),
        torch.tensor([17], dtype=torch.int32),
        query,
        sets.switch_pages,
        resident,
        layout=sets.summaries,
        config=config,
        scale=scale,
    )
    chosen: list[list[int]] = resident.sort(-1).values.tolist()
    return chosen


def test_shares_of_a_softmax_are_those_of_the_keys_with_their_scale() -> None:
    # How sharp the softmax of each query head is decides whose favourites are chosen, and the keys' scale decides that.
    random, num_wrong = torch.Generator().manual_seed(4), 0
    for key_scale in (0.01, 0.03, 3.0) * 8:
        # Blocks whose keys are alike, else the bounds of all blocks would be.
        numbers = torch.randint(-7, 8, (20, 2, 1, 8), generator=random).float()
        numbers = numbers + torch.randint(-1, 2, (20, 2, BLOCK, 8), generator=random)
        query = torch.randn(4, 4, generator=random) * torch.tensor([1.0, 0.1, 1.0, 0.1])[:, None]
        shape = replace(SHAPE, key_scales=(1.0, key_scale, 1.0))
        wanted = first_set(numbers * key_scale, query, replace(shape, dtype=torch.float32), shape.scale)
        cache = numbers.to(FP8)
        assert first_set(cache.clone(), query, shape, shape.score_scale(1)) == wanted
        num_wrong += first_set(cache.clone(), query, shape, shape.scale) != wanted
    assert num_wrong > 4


def test_requests_of_an_fp8_cache_are_not_handed_over(make: Make) -> None:
    with pytest.raises(UnsupportedError, match=r"^--kv-cache-dtype: expected auto where .* handed over, got fp8"):
        make().runtime.attach(Unattached())


@pytest.mark.parametrize(
    ("changes", "kv_cache_dtype", "message"),
    [
        ({}, "fp8_e5m2", "^--kv-cache-dtype: expected one of auto, fp8, fp8_e4m3, got fp8_e5m2"),
        ({"host_dtype": "fp8"}, "fp8", "^host_dtype: expected auto with --kv-cache-dtype fp8, .*, got fp8"),
        ({"summary_dtype": "fp8"}, "fp8_e4m3", "^summary_dtype: expected auto with --kv-cache-dtype fp8_e4m3, .*, got"),
    ],
)
def test_a_setting_that_does_not_go_with_an_fp8_cache_is_named(
    changes: dict[str, str], kv_cache_dtype: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        LookaheadConfig.from_mapping(changes).check_cache_dtype(kv_cache_dtype)


def test_auto_and_both_names_of_e4m3_are_taken() -> None:
    assert [LookaheadConfig().check_cache_dtype(name) for name in ("auto", "fp8", "fp8_e4m3")] == [False, True, True]
    assert not LookaheadConfig(host_dtype="fp8", summary_dtype="fp8").check_cache_dtype("auto")
