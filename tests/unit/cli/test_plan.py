"""What a server will take: the arithmetic against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from oasiskv.cli.plan import ModelShape, Plan, Pools, budget_blocks_of
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, UnsupportedError

SMOLLM2: dict[str, Any] = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}
BLOCK_BYTES = 30 * 3 * 16 * 2 * 64 * 4


def make_pools(**changes: Any) -> Pools:
    values = {"block_size": 16, "num_workers": 1, "max_model_len": 8192, "max_num_seqs": 4, **changes}
    return Pools(shape=ModelShape.of(SMOLLM2), **values)


def make_plan(pools: Pools, **changes: Any) -> Plan:
    config = LookaheadConfig(budget_blocks=changes.pop("budget_blocks", 128), host_pool_bytes=2000 * BLOCK_BYTES)
    return Plan(pools=pools, config=config, engine_bytes=changes.pop("engine_bytes", 1025 * BLOCK_BYTES), **changes)


def test_the_shape_reads_what_the_kv_cache_depends_on() -> None:
    shape = ModelShape.of(SMOLLM2, num_draft_layers=1)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype) == (31, 3, 64, "float32")
    assert ModelShape.of({"text_config": SMOLLM2}) == ModelShape.of(SMOLLM2)
    plain = {name: value for name, value in SMOLLM2.items() if name not in ("num_key_value_heads", "dtype")}
    assert ModelShape.of({**plain, "head_dim": 32, "torch_dtype": "torch.bfloat16"}) == ModelShape(
        num_layers=30, num_kv_heads=9, head_dim=32, dtype="bfloat16", max_positions=8192
    )


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        ModelShape.of({"num_attention_heads": 3})


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--dtype: .*float8"):
        ModelShape.of(SMOLLM2, "float8")


def test_a_sparse_request_holds_budget_pages_and_active_blocks() -> None:
    pools, config = make_pools(), LookaheadConfig(budget_blocks=128)
    # 512 complete blocks have 32 pages of 16 summaries.
    assert pools.held_blocks(8192, config) == 128 + 32
    assert pools.held_blocks(8192 + 1, config) == 128 + 32 + 1
    assert pools.dense_blocks(8193) == 513
    assert pools.held_blocks(8192, LookaheadConfig(budget_blocks=128, summary="mid", score_alpha=0)) == 128 + 16


def test_fp8_rows_take_fewer_pages_and_the_plan_says_so() -> None:
    config = LookaheadConfig(budget_blocks=128, summary_dtype="fp8")
    # A page of float32 has 8,192 bytes in each head: 63 rows of 128 bytes and their exponents.
    assert make_pools().held_blocks(8192, config) == 128 + 9
    bfloat16 = replace(make_pools(), shape=ModelShape.of(SMOLLM2, "bfloat16"))
    assert bfloat16.held_blocks(8192, config) == 128 + 17
    plan = Plan(pools=make_pools(), config=replace(config, host_pool_bytes=2**30), engine_bytes=1025 * BLOCK_BYTES)
    assert "; summaries as fp8" in "\n".join(plan.lines())
    assert list(plan.lines())[-1].split()[1:3] == ["512", "137"]


def test_fp8_rows_that_do_not_fit_the_model_are_refused() -> None:
    pools = replace(make_pools(), shape=replace(make_pools().shape, head_dim=36))
    with pytest.raises(UnsupportedError, match=r"^summary_dtype: expected auto with head_dim 36"):
        pools.held_blocks(8192, LookaheadConfig(budget_blocks=128, summary_dtype="fp8"))


def test_a_request_that_may_not_switch_holds_what_dense_holds() -> None:
    pools, config = make_pools(), LookaheadConfig(budget_blocks=128)
    # 136 complete blocks would be 128 slots and 9 pages: more than the blocks themselves.
    assert pools.held_blocks(136 * 16, config) == 136
    assert pools.held_blocks(137 * 16, config) == 128 + 9


@pytest.mark.parametrize(("workers", "heads"), [(1, 3), (3, 1), (6, 1)])
def test_a_worker_has_its_share_of_heads_and_never_less_than_one(workers: int, heads: int) -> None:
    assert make_pools(num_workers=workers).block_bytes == BLOCK_BYTES * heads // 3


@pytest.mark.parametrize(("max_model_len", "budget"), [(131072, 128), (8192, 64), (2000, 15), (100, 2)])
def test_the_default_budget_is_128_blocks_or_an_eighth_of_the_longest(max_model_len: int, budget: int) -> None:
    assert make_pools(max_model_len=max_model_len).default_budget_blocks() == budget


def test_default_host_memory_holds_all_requests_within_what_there_is() -> None:
    pools = make_pools(num_workers=3)
    assert pools.default_host_bytes(LookaheadConfig(), 2**50) == 4 * 513 * BLOCK_BYTES // 3
    assert pools.default_host_bytes(LookaheadConfig(), 2**30) == 2**30 // 3
    # Less than one request is never chosen: the limit refuses it in its own words.
    assert pools.default_host_bytes(LookaheadConfig(), 3 * 2**20) == 513 * BLOCK_BYTES // 3


def test_the_default_engine_pool_holds_one_prefill_and_the_other_requests_sparse() -> None:
    pools, config = make_pools(), LookaheadConfig(budget_blocks=64)
    assert pools.default_engine_bytes(config) == (513 + 3 * (64 + 32) + 1) * BLOCK_BYTES


def test_requests_at_a_time_are_counted_by_tier() -> None:
    plan = make_plan(make_pools())
    assert plan.num_engine_blocks == 1024
    assert plan.concurrency(8192) == {"dense": 2, "engine": 1024 // 160, "host": 2000 // 512, "seqs": 4}


def test_fp8_units_let_host_memory_hold_more_and_leave_the_engine_as_it_is() -> None:
    # A quarter of float32, and a line of scales in each layer.
    block_bytes = 30 * (3 * 16 * 2 * 64 + 128)
    config = LookaheadConfig(budget_blocks=128, host_pool_bytes=2000 * block_bytes + 1, host_dtype="fp8")
    pools = make_pools()
    plan = Plan(pools=pools, config=config, engine_bytes=1025 * BLOCK_BYTES)
    assert pools.host_block_bytes(config) == block_bytes
    assert pools.default_host_bytes(config, 2**50) == 4 * 513 * block_bytes
    assert (plan.num_host_blocks, plan.num_engine_blocks) == (2000, 1024)
    assert plan.concurrency(8192)["host"] == 2000 // 512
    lines = list(plan.lines())
    assert "host 358.9 MiB (2,000 blocks as fp8)" in lines[2]
    assert lines[-1].split()[7:9] == ["91.9", "MiB"]
    with pytest.raises(ConfigError, match=r"^--host-memory: expected at least 92\.1 MiB"):
        Plan(pools=pools, config=replace(config, host_pool_bytes=512 * block_bytes), engine_bytes=None)


def test_an_fp8_cache_takes_a_quarter_of_float32_in_both_tiers_and_the_plan_says_so() -> None:
    block_bytes, config = BLOCK_BYTES // 4, LookaheadConfig(budget_blocks=128, host_pool_bytes=2000 * BLOCK_BYTES // 4)
    pools = make_pools(is_fp8_cache=True)
    plan = Plan(pools=pools, config=config, engine_bytes=1025 * block_bytes)
    assert pools.block_bytes == pools.host_block_bytes(config) == block_bytes
    assert (plan.num_host_blocks, plan.num_engine_blocks) == (2000, 1024)
    # A page still has a row for each of its tokens.
    assert pools.held_blocks(8192, config) == make_pools().held_blocks(8192, config) == 128 + 32
    assert "3 KV heads of 64, float32, KV cache in fp8; " in next(iter(plan.lines()))


def test_an_unknown_engine_pool_is_shown_as_unknown_and_a_guess_as_a_guess() -> None:
    plan = make_plan(make_pools(), engine_bytes=None)
    assert plan.concurrency(8192)["dense"] is None
    assert "finds free" in "\n".join(plan.lines())
    assert "about 720.0 MiB (1,023 blocks)" in "\n".join(
        make_plan(make_pools(), engine_bytes=None, guessed_engine_bytes=1024 * BLOCK_BYTES).lines()
    )


def test_the_printed_row_of_the_longest_context_has_both_counts() -> None:
    row = list(make_plan(make_pools()).lines())[-1].split()
    assert row == ["8,192", "512", "160", "360.0", "MiB", "112.5", "MiB", "360.0", "MiB", "2", "3", "3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": make_pools(max_model_len=9000)}, "^--max-model-len: expected at most 8192"),
        ({"config": LookaheadConfig(host_pool_bytes=512 * BLOCK_BYTES)}, "^--host-memory: expected at least 360.7 MiB"),
        ({"engine_bytes": 513 * BLOCK_BYTES}, "^--kv-cache-memory-bytes: expected at least 361.4 MiB"),
    ],
)
def test_a_longest_request_without_a_place_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"pools": make_pools(), "config": LookaheadConfig(), "engine_bytes": None, **changes}
    with pytest.raises(ConfigError, match=message):
        Plan(**values)


def test_a_budget_in_tokens_is_rounded_up_to_blocks() -> None:
    assert [budget_blocks_of(tokens, 16) for tokens in (1, 16, 17)] == [1, 1, 2]
    with pytest.raises(ConfigError, match=r"^--budget-tokens: expected at least 1, got 0"):
        budget_blocks_of(0, 16)
