"""Paged attention against a dense float64 one over each row's own tokens."""

import random

import pytest
import torch

from oasiskv.engine.attention import SHORT_QUERY, attend, group_rows

HEAD_DIM = 8
NUM_BLOCKS = 64
SCALE = 0.3

MIXES = {
    "one decode row": [(1, 40)],
    "decode rows with and without a draft": [(1, 17), (2, 17), (2, 33), (1, 1), (2, 2), (1, 64)],
    "a whole prompt": [(50, 50)],
    "a prompt's later chunk": [(20, 53)],
    "chunks, decodes and an empty row": [(20, 53), (1, 40), (2, 47), (0, 0), (9, 9), (9, 30), (8, 24), (1, 16)],
    "rows about a block's edge": [(2, 16), (2, 17), (2, 18), (1, 15), (1, 16), (1, 17), (2, 32), (2, 33)],
}


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend token by token, head by head; `query` are the last tokens."""
    num_queries, num_heads, _ = query.shape
    num_tokens, num_kv_heads, _ = key.shape
    output = torch.empty(query.shape, dtype=torch.float64)
    for index in range(num_queries):
        seen = num_tokens - num_queries + index + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            weights = torch.softmax(key[:seen, kv_head].double() @ query[index, head].double() * SCALE, 0)
            output[index, head] = weights @ value[:seen, kv_head].double()
    return output


@pytest.mark.parametrize("rows", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(1, 1), (2, 3), (3, 1), (1, 8), (2, 4)])
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_row_attends_to_its_own_tokens_up_to_each_query(
    rows: list[tuple[int, int]], num_kv_heads: int, group_size: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(len(rows) + num_kv_heads)
    free = random.Random(5).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    # Whatever no row wrote is huge, so that a query which sees it shows.
    kv_cache = torch.full((NUM_BLOCKS, num_kv_heads, block_size, 2 * HEAD_DIM), 1e4)
    width = max(-(-length // block_size) for _, length in rows) + 2
    block_table = torch.zeros(len(rows), width, dtype=torch.int32)
    tokens = [torch.randn(length, num_kv_heads, 2 * HEAD_DIM, generator=generator) for _, length in rows]
    for row, (_, length) in enumerate(rows):
        for block in range(width):
            block_table[row, block] = free.pop() if block * block_size < length else NUM_BLOCKS - 1
        for position in range(length):
            kv_cache[block_table[row, position // block_size], :, position % block_size] = tokens[row][position]
    num_queries = [queries for queries, _ in rows]
    query_start_loc = torch.tensor([0, *num_queries]).cumsum(0).int()
    seq_lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    query = torch.randn(sum(num_queries) + 3, num_kv_heads * group_size, HEAD_DIM, generator=generator)
    output = torch.full_like(query, float("nan"))

    attend(query, kv_cache, group_rows(query_start_loc, seq_lens, block_table, block_size), SCALE, output)

    for row, (queries, _) in enumerate(rows):
        mine = slice(int(query_start_loc[row]), int(query_start_loc[row]) + queries)
        key, value = tokens[row][..., :HEAD_DIM], tokens[row][..., HEAD_DIM:]
        torch.testing.assert_close(output[mine].double(), dense(query[mine], key, value), rtol=1e-4, atol=1e-5)
    # Padding tokens behind the last row are nobody's.
    assert output[sum(num_queries) :].isnan().all()


def test_rows_of_equal_short_queries_share_a_group_and_long_ones_do_not() -> None:
    lens = [1, 2, 1, SHORT_QUERY, SHORT_QUERY, SHORT_QUERY + 1, SHORT_QUERY + 1, 0, 2]
    query_start_loc = torch.tensor([0, *lens]).cumsum(0).int()
    block_table = torch.arange(1, 1 + 2 * len(lens), dtype=torch.int32).view(len(lens), 2)
    groups = group_rows(query_start_loc, torch.full((len(lens),), 20), block_table, 16)
    members = [(len(group.tokens), group.tokens.shape[1]) for group in groups]
    assert members == [(2, 1), (2, 2), (2, SHORT_QUERY), (1, SHORT_QUERY + 1), (1, SHORT_QUERY + 1)]
    together = torch.cat([group.tokens.flatten() for group in groups])
    assert together.sort().values.tolist() == list(range(sum(lens)))


def test_an_empty_batch_has_no_groups() -> None:
    nobody = torch.zeros(0, dtype=torch.int32)
    assert group_rows(torch.zeros(1, dtype=torch.int32), nobody, torch.zeros(0, 4, dtype=torch.int32), 16) == []


def test_entries_behind_a_row_are_never_read() -> None:
    """A table may hold anything there: other requests' blocks, or numbers that are no blocks."""
    block_table = torch.tensor([[3, 9999, -7], [4, 5, 9999]], dtype=torch.int32)
    (group,) = group_rows(torch.tensor([0, 1, 2]), torch.tensor([16, 17]), block_table, 16)
    assert group.block_table.tolist() == [[3, 0], [4, 5]]
    assert group.mask.sum(-1).tolist() == [[16], [17]]
