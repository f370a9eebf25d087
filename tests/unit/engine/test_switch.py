"""How a request becomes sparse in one layer, against brute force."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.layout import SparseLayout
from oasiskv.engine.state import CacheShape
from oasiskv.engine.switch import seat, switch_layer
from oasiskv.engine.tiny_worker import Texts, best_blocks
from oasiskv.kernels.predict.reference import scores_of
from oasiskv.kernels.rows import SummaryLayout
from oasiskv.kernels.summarize.reference import read_rows, summary_rows

BLOCK_SIZE = 16
HEAD_DIM = 16


def plain_seat(blocks: list[int]) -> list[int]:
    budget = len(blocks)
    slots = [slot if slot in blocks else None for slot in range(budget)]
    for block in sorted(block for block in blocks if block >= budget):
        slots[slots.index(None)] = block
    return [slot for slot in slots if slot is not None]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_a_block_with_a_slot_of_its_number_stays_and_the_others_fill_the_gaps_ascending(data: st.DataObject) -> None:
    budget, num_heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    one = st.lists(st.integers(0, 2 * budget + 3), min_size=budget, max_size=budget, unique=True)
    chosen = [data.draw(one) for _ in range(num_heads)]
    assert seat(torch.tensor(chosen, dtype=torch.int32)).tolist() == [plain_seat(blocks) for blocks in chosen]


def cache_shape(num_kv_heads: int, group_size: int, dtype: torch.dtype) -> CacheShape:
    return CacheShape(
        num_layers=1,
        num_target_layers=1,
        num_query_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        scale=0.5,
    )


@pytest.mark.parametrize("summary_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("summary", ["minmax", "mid"])
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 1), (3, 3), (1, 4), (2, 8)])
@pytest.mark.parametrize(("budget", "num_complete"), [(2, 3), (3, 5), (5, 17), (7, 16), (7, 33), (31, 35), (33, 50)])
def test_a_switched_layer_holds_exactly_the_best_blocks_and_all_summaries(
    summary: str, summary_dtype: str, num_kv_heads: int, group_size: int, budget: int, num_complete: int
) -> None:
    config = LookaheadConfig.from_mapping(
        {
            "budget_blocks": budget,
            "summary": summary,
            "summary_dtype": summary_dtype,
            "score_alpha": 0.25 if summary == "minmax" else 0,
            "sink_blocks": budget % 3 % budget,
        }
    )
    shape = cache_shape(num_kv_heads, group_size, torch.bfloat16 if budget == 7 else torch.float32)
    texts = Texts(1, num_complete * BLOCK_SIZE, shape, seed=budget + num_complete)
    layout = SummaryLayout.of(config, BLOCK_SIZE, HEAD_DIM, shape.dtype.itemsize)
    places = SparseLayout(budget_blocks=budget, rows_per_page=layout.rows_per_page).page_positions(num_complete)
    true = texts.kv[0, 0].reshape(num_complete, BLOCK_SIZE, num_kv_heads, -1).transpose(1, 2)  # [n, H, B, 2D]
    kv_cache = torch.full((num_complete + 9, *true.shape[1:]), 55, dtype=shape.dtype)
    table = random.Random(budget).sample(range(len(kv_cache)), num_complete)
    kv_cache[table] = true
    before = kv_cache.clone()
    query = texts.query[0, 0, -1]
    resident = torch.full((num_kv_heads, budget), -9, dtype=torch.int32)

    switch_layer(
        kv_cache,
        torch.tensor(table, dtype=torch.int32),
        torch.tensor([[0, len(table), 0, -1, 0]], dtype=torch.int32),
        torch.tensor([table[place] for place in places], dtype=torch.int32),
        query,
        torch.full((len(places) + 2, *true.shape[1:]), 66, dtype=shape.dtype),
        resident,
        layout=layout,
        config=config,
        scale=shape.scale,
    )

    for head in range(num_kv_heads):
        keys = texts.kv[0, 0, :, head, :HEAD_DIM]
        group = query.reshape(num_kv_heads, group_size, HEAD_DIM)[head]
        assert resident[head].tolist() == plain_seat(best_blocks(keys, group, num_complete, BLOCK_SIZE, config))
        for slot, block in enumerate(resident[head].tolist()):
            assert torch.equal(kv_cache[table[slot], head], true[block, head])
    rows = read_rows(kv_cache, torch.tensor([table[place] for place in places]), num_complete, layout)
    # The keys are small integers, which fp8 has too.
    assert torch.equal(rows.transpose(0, 1), summary_rows(true[..., :HEAD_DIM], layout).float())
    untouched = sorted(set(range(len(kv_cache))) - {*table[:budget], *(table[place] for place in places)})
    assert torch.equal(kv_cache[untouched], before[untouched])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from([(1, 1), (2, 3), (3, 4), (1, 8)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_score_with_alpha_1_bounds_every_product_of_a_query_of_the_group_with_a_key_of_the_block(
    seed: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num_kv_heads, group_size = shape
    random_numbers = torch.Generator().manual_seed(seed)
    keys = torch.randn(7, num_kv_heads, BLOCK_SIZE, HEAD_DIM, generator=random_numbers).to(dtype)
    query = torch.randn(num_kv_heads * group_size, HEAD_DIM, generator=random_numbers).to(dtype)
    layout = SummaryLayout(kind="minmax", block_size=BLOCK_SIZE, head_dim=HEAD_DIM)
    summaries = summary_rows(keys, layout).transpose(0, 1)
    score = scores_of(query, summaries, layout, 1, "max", 1.0)
    grouped = query.double().reshape(num_kv_heads, group_size, HEAD_DIM)
    true = torch.einsum("hgd,nhtd->hngt", grouped, keys.double()).amax((2, 3))
    assert bool((score.double() >= true - 1e-5).all())
