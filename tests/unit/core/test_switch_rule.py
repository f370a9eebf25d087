from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.switch_rule import DEVICE_SPEEDS, LEAST_GAIN, StepCost, SwitchRule

# Qwen3-8B in bfloat16: 36 layers, 8 KV heads, units of 16 tokens with head_dim 128.
COST = DEVICE_SPEEDS["NVIDIA H200"].step_cost(
    LookaheadConfig(),
    weight_bytes=15_137_000_000,
    num_layers=36,
    num_kv_heads=8,
    unit_bytes=8192,
    rows_per_page=16,
)
RULE = SwitchRule(cost=COST)
MEASURED_DENSE_MS = [
    (1, 1024, 5.81),
    (4, 1024, 7.49),
    (16, 1024, 14.12),
    (1, 256, 5.85),
    (16, 256, 8.13),
    (64, 256, 15.83),
]
"""Requests, blocks of each, and the step of stock vLLM on an H200 host; dummy weights, 2026-11-29."""
MEASURED_SPARSE_MS = [(1, 6.26), (4, 6.80), (16, 8.53), (28, 11.20), (40, 13.63)]
"""Requests of 16,000 tokens, all sparse with a cap of 6, and the step on an H200 host; dummy weights, 2026-11-30.

That of 16 is with an experimental transfer kernel: the host was disturbed while the plain one ran.
"""
LENGTHS = st.lists(st.integers(1, 8192), max_size=12)


def freed(dense: dict[str, int], budget: int = 128) -> dict[str, int]:
    return {name: max(0, blocks - budget - -(-blocks // 16)) for name, blocks in dense.items()}


def choose(rule: SwitchRule, dense: dict[str, int], *, sparse: tuple[int, ...] = (), needed: int = 0) -> dict[str, str]:
    return dict(rule.choose(dense, [], sparse, needed, freed(dense)))


@pytest.mark.parametrize(("num_requests", "num_blocks", "measured_ms"), MEASURED_DENSE_MS)
def test_the_cost_of_dense_steps_is_what_was_measured(num_requests: int, num_blocks: int, measured_ms: float) -> None:
    assert COST.step_ms([num_blocks] * num_requests, []) == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize(("num_requests", "measured_ms"), MEASURED_SPARSE_MS)
def test_the_cost_of_sparse_steps_is_what_was_measured(num_requests: int, measured_ms: float) -> None:
    assert COST.step_ms([], [1000] * num_requests) == pytest.approx(measured_ms, rel=0.06)


def test_the_early_rule_switches_whatever_may() -> None:
    assert choose(SwitchRule(is_early=True), {"a": 1, "b": 900}) == {"a": "early", "b": "early"}


def test_without_a_cost_nothing_switches_until_blocks_are_needed() -> None:
    dense = {"a": 300, "b": 900, "c": 500}
    assert choose(SwitchRule(), dense) == {}
    assert choose(SwitchRule(), dense, needed=1) == {"b": "memory"}
    assert choose(SwitchRule(), dense, needed=freed(dense)["b"] + 1) == {"b": "memory", "c": "memory"}
    assert choose(SwitchRule(), dense, needed=10_000).keys() == dense.keys()


def test_short_contexts_stay_dense_and_long_ones_of_a_large_batch_switch() -> None:
    assert choose(RULE, {str(i): 256 for i in range(64)}) == {}
    assert choose(RULE, {"a": 1024}) == {}
    long = {f"{i:02}": 1024 for i in range(16)}
    assert choose(RULE, long) == dict.fromkeys(long, "speed")


def test_a_long_request_switches_where_short_ones_stay() -> None:
    assert choose(RULE, {"long": 8192, **{str(i): 200 for i in range(20)}}) == {"long": "speed"}


def test_what_the_link_cannot_carry_stays_dense() -> None:
    slow = SwitchRule(cost=replace(COST, transfer_ms=3.0))
    chosen = choose(slow, {f"{i:02}": 2048 for i in range(20)})
    assert 0 < len(chosen) < 20


@given(lengths=LENGTHS, others=LENGTHS, sparse=LENGTHS, needed=st.integers(-100, 20_000), has_cost=st.booleans())
def test_every_choice_covers_the_need_if_it_can_and_never_slows_the_step_beyond_it(
    lengths: list[int], others: list[int], sparse: list[int], needed: int, has_cost: bool
) -> None:
    rule = RULE if has_cost else SwitchRule()
    dense = {f"r{i:02}": length for i, length in enumerate(lengths)}
    gives = freed(dense)
    chosen = rule.choose(dense, others, sparse, needed, gives)
    assert chosen.keys() <= dense.keys()
    assert sum(gives[name] for name in chosen) >= min(needed, sum(gives.values()))

    def step_ms(switched: set[str]) -> float:
        stay = [blocks for name, blocks in dense.items() if name not in switched]
        return COST.step_ms([*others, *stay], [*sparse, *(dense[name] for name in switched)])

    for_memory = {name for name, reason in chosen.items() if reason == "memory"}
    if len(chosen) > len(for_memory):
        assert has_cost
        assert step_ms(set(chosen)) < (1 - LEAST_GAIN) * step_ms(for_memory)


def test_the_same_requests_in_another_order_get_the_same_choice() -> None:
    dense = {"b": 1024, "a": 1024, "c": 1024, "d": 64}
    needed = freed(dense)["a"] + 1
    assert choose(SwitchRule(), dense, needed=needed) == {"a": "memory", "b": "memory"}
    assert choose(SwitchRule(), dict(reversed(dense.items())), needed=needed) == {"a": "memory", "b": "memory"}


def test_a_step_without_sparse_requests_costs_nothing_of_them() -> None:
    cost = StepCost(
        fixed_ms=1,
        row_ms=0.5,
        block_ms=0.25,
        sparse_ms=100,
        predict_ms=100,
        transfer_ms=100,
        overlap_loss=0.5,
        budget_blocks=4,
    )
    assert cost.step_ms([4, 8], []) == 1 + 2 * 0.5 + 12 * 0.25
    assert cost.step_ms([], [8]) == 1 + 0.5 + 4 * 0.25 + 100 + 800 + 0.5 * 100
    assert cost.step_ms([], [0] * 20) == 2000 + 0.5 * (1 + 20 * (0.5 + 4 * 0.25) + 100)
