"""What the scheduler's side measures for pieces of prompts, and what it tells vLLM."""

from typing import Any

import pytest

from oasiskv.core.chunks import ChunkRule
from oasiskv.engine.chunks import Chunks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Three sparse decodes and a prompt that computes what it may, at 20 us a token; transfers take 60 ms a step."""

    def __init__(self, chunks: Chunks, clock: Clock) -> None:
        self.chunks, self.clock, self.stall_s = chunks, clock, 0.0

    def run(self, steps: int, *, has_sparse: bool = True) -> None:
        for _ in range(steps):
            tokens = min(8192, self.chunks.limit or 8192)
            busy_s = 0.01 + 20e-6 * tokens
            step_s = max(busy_s, 0.06 if has_sparse else 0)
            self.chunks.step({"a": 2, "b": 1, "c": 2, "prompt": tokens}, has_sparse=has_sparse)
            self.clock.now += step_s
            self.stall_s += step_s - busy_s
        self.chunks.take(self.stall_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_prompt_comes_to_compute_what_fits_the_wait(clock: Clock) -> None:
    engine = Engine(Chunks(ChunkRule(512, 8192), 0, clock), clock)
    assert engine.chunks.limit == 0
    for _ in range(30):
        engine.run(16)
    assert 0.75 * 0.05 / 20e-6 < engine.chunks.limit < 1.02 * 0.05 / 20e-6


def test_without_sparse_decodes_the_engine_s_own_limit_holds_and_nothing_is_learned(clock: Clock) -> None:
    engine = Engine(Chunks(ChunkRule(512, 8192), 3000, clock), clock)
    for _ in range(5):
        engine.run(16, has_sparse=False)
        assert engine.chunks.limit == 3000
    assert engine.chunks.tokens == 512


def test_prompts_share_what_fits_and_the_engine_s_own_limit_is_never_passed(clock: Clock) -> None:
    chunks = Chunks(ChunkRule(512, 8192), 0, clock)
    both: dict[str, Any] = {"one": 256, "two": 300, "decode": 2}
    assert chunks.step(both, has_sparse=True) == 256
    assert chunks.step({"decode": 2}, has_sparse=True) == 512
    own = Chunks(ChunkRule(512, 8192), 100, clock)
    assert own.step({"decode": 2}, has_sparse=True) == 100


def test_rounds_with_a_step_without_sparse_decodes_are_left_out(clock: Clock) -> None:
    chunks = Chunks(ChunkRule(512, 8192), 0, clock)
    chunks.take(0.0)
    for has_sparse in (True, False, True):
        chunks.step({"prompt": 512}, has_sparse=has_sparse)
        clock.now += 0.1
    chunks.take(0.25)
    assert chunks.tokens == 512
    chunks.step({"prompt": 512}, has_sparse=True)
    clock.now += 0.1
    chunks.take(0.33)
    assert chunks.tokens == 768


def test_of_several_ranks_the_one_that_waited_least_decides() -> None:
    news = pytest.importorskip("oasiskv.engine.vllm.connector").WorkerNews
    assert news({"a": 3}, 0.5).aggregate(news({"a": 4, "b": 1}, 0.2)) == news({"a": 4, "b": 1}, 0.2)
    assert news({}, None).aggregate(news({}, 0.7)) == news({}, 0.7)
    assert news({"a": 1}).aggregate(news({})) == news({"a": 1}, None)
