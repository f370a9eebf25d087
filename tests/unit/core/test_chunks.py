import itertools
from dataclasses import dataclass

import pytest

from oasiskv.core.chunks import BACKOFF, GROWTH, ChunkRule, Paced
from oasiskv.core.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """Decodes take `compute_s` and their transfers `transfer_s`; prompts 20 us a token."""

    compute_s: float
    transfer_s: float

    def step(self, num_tokens: int) -> Paced:
        busy_s = self.compute_s + num_tokens * 20e-6
        step_s = max(busy_s, self.transfer_s)
        return Paced(step_s=step_s, stall_s=step_s - busy_s, num_tokens=num_tokens)


def settle(rule: ChunkRule, device: Device, rounds: int = 40) -> list[int]:
    return [rule.learn(device.step(rule.tokens)) for _ in range(rounds)]


@pytest.mark.parametrize("transfer_s", [0.025, 0.04, 0.08])
def test_prompts_fill_the_time_that_decodes_wait_and_little_more(transfer_s: float) -> None:
    device = Device(compute_s=0.01, transfer_s=transfer_s)
    found = settle(ChunkRule(256, 8192), device)[20:]
    fits = (transfer_s - 0.01) / 20e-6
    assert all(0.75 * fits < tokens < 1.02 * fits for tokens in found)
    # A step takes hardly longer than its transfers.
    assert all(device.step(tokens).step_s <= 1.02 * transfer_s for tokens in found)


def test_where_nothing_waits_prompts_get_the_least() -> None:
    rule = ChunkRule(256, 8192)
    settle(rule, Device(0.01, 0.06))
    assert rule.tokens > 2000
    assert settle(rule, Device(0.03, 0.02))[-1] == 256


def test_chunks_grow_by_half_at_a_time_and_never_beyond_what_the_engine_computes() -> None:
    rule = ChunkRule(256, 3000)
    found = [256, *settle(rule, Device(0.01, 1.0))]
    assert all(later <= GROWTH * before for before, later in itertools.pairwise(found))
    assert found[-1] == 3000


def test_steps_without_prompts_tell_how_long_layers_wait_once_the_speed_is_known() -> None:
    rule = ChunkRule(256, 8192)
    waits = Paced(step_s=0.05, stall_s=0.04, num_tokens=0)
    assert rule.learn(waits) == 256
    rule.learn(Device(0.01, 0.05).step(256))
    for _ in range(10):
        rule.learn(waits)
    assert 0.04 / 60e-6 * 0.9 < rule.tokens < 0.04 / 20e-6


def test_a_measurement_that_says_nothing_changes_nothing() -> None:
    rule = ChunkRule(256, 8192)
    settle(rule, Device(0.01, 0.06))
    before = rule.tokens
    assert rule.learn(Paced(step_s=0.02, stall_s=0.02, num_tokens=900)) == before
    assert rule.learn(Paced(step_s=0.06, stall_s=0.0, num_tokens=before)) == int(BACKOFF * before)


@pytest.mark.parametrize(("least", "most"), [(0, 5), (6, 5)])
def test_limits_out_of_order_are_refused(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=f"^chunks: expected 1 <= least <= most tokens, got {least} and {most}"):
        ChunkRule(least, most)
