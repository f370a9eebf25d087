"""A trace replayed through the backend fetches what a plain reading of the trace says, and nothing twice."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, LeaseExpiredError
from oasiskv.core.trace import SelectionTrace
from oasiskv.engine.replay import Replay, fetch_dense, handover_layout, replay_shape, stage_prompt
from oasiskv.engine.tiny_worker import WorkingSetModel

BUDGET, NUM_LAYERS, NUM_HEADS, NUM_TOKENS, NUM_STEPS = 4, 2, 3, 16 * 20 + 5, 40


class Shelf:
    """Staged blocks in a dictionary; counts what is read."""

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], torch.Tensor] = {}
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self.is_lost = False

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        for place, index in enumerate(block_indices):
            for layer in range(data.shape[1]):
                self.parts[index, first_layer + layer] = data[place, layer].clone()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        done: Future[None] = Future()
        if self.is_lost:
            done.set_exception(LeaseExpiredError("lease: ended"))
            return done
        for place, index in enumerate(block_indices):
            for layer in range(out.shape[1]):
                self.reads[lease, index, first_layer + layer] += 1
                out[place, layer] = self.parts[index, first_layer + layer]
        done.set_result(None)
        return done

    def receipt(self, lease: str) -> bytes:
        return b"receipt"

    def forget(self, lease: str) -> None:
        pass

    def close(self) -> None:
        pass


def random_trace(seed: int = 0) -> SelectionTrace:
    """Return a trace of any blocks that are complete, block 0 always among them."""
    random = np.random.default_rng(seed)
    blocks = np.zeros((NUM_STEPS + 1, NUM_LAYERS, NUM_HEADS, BUDGET), np.uint16)
    for step, layer, head in np.ndindex(*blocks.shape[:3]):
        num_complete = (NUM_TOKENS + max(0, step - 1)) // 16
        blocks[step, layer, head, 1:] = 1 + random.choice(num_complete - 1, BUDGET - 1, replace=False)
    return SelectionTrace(num_tokens=NUM_TOKENS, block_size=16, num_sinks=1, source="test", blocks=blocks)


def settings(mode: str) -> LookaheadConfig:
    return LookaheadConfig.from_mapping(
        {"budget_blocks": BUDGET, "min_cap": 1, "fetch_ratio": 0, "handover_mode": mode, "debug_verify": True}
    )


def expected_blocks(trace: SelectionTrace, cap: int) -> list[set[tuple[int, int]]]:
    """Return the (layer, prompt block) pairs that cross, by step, as plain working sets name them."""
    models = {
        (layer, head): WorkingSetModel.start(trace.blocks[0, layer, head].tolist(), 1)
        for layer, head in np.ndindex(NUM_LAYERS, NUM_HEADS)
    }
    here = {(layer, block) for (layer, _), model in models.items() for block in model.slots}
    crossed = [set(here)]
    num_complete = trace.num_prompt_blocks
    for step in range(1, trace.num_steps + 1):
        now = trace.num_complete(step)
        for (layer, head), model in models.items():
            if now > num_complete:
                model.complete(now - 1, 1, step)
            model.select(trace.blocks[step, layer, head].tolist(), cap, step)
        num_complete = now
        held = {(layer, b) for (layer, _), model in models.items() for b in model.slots if b < trace.num_prompt_blocks}
        crossed.append(held - here)
        here |= held
    return crossed


@pytest.mark.parametrize(("mode", "cap"), [("partial", BUDGET), ("capped", 1)])
def test_what_crosses_in_each_step_is_what_plain_working_sets_lack(mode: str, cap: int) -> None:
    trace, config, shelf = random_trace(), settings(mode), Shelf()
    shape = replay_shape(trace, 8)
    assert stage_prompt(trace, config, shape, shelf, "lease") == b"receipt"
    layout = handover_layout(trace, config, shape)
    assert len(shelf.parts) == layout.num_blocks * NUM_LAYERS
    replay = Replay(trace, config, shape, 1)
    replay.attach(shelf)
    part_bytes, expected = NUM_HEADS * shape.unit_bytes, expected_blocks(trace, cap)
    beside = (layout.num_pages + 2) * NUM_LAYERS * part_bytes
    on_host = 0
    for number in range(1, trace.num_steps + 1):
        step = replay.step([("a", "lease")] if number == 1 else [])
        if number == 1:
            assert step.first_set_bytes == len(expected[0]) * part_bytes
            assert step.admitted_bytes == step.first_set_bytes + beside
            on_host = len(expected[0])
        else:
            assert step.admitted_bytes == step.first_set_bytes == 0
        assert step.missed_bytes == len(expected[number]) * part_bytes, f"step {number}"
        on_host += len(expected[number])
        num_own = (NUM_TOKENS + number - 1) // 16 - trace.num_prompt_blocks
        assert step.host_bytes == (on_host + num_own * NUM_LAYERS) * part_bytes
        assert step.ended == (("a",) if number == trace.num_steps else ())
    replay.check()
    assert set(shelf.reads.values()) == {1}
    counts = replay.counts()
    assert counts["predicted"] == counts["hit"] + counts["fetched"] + counts["deferred"] > 0
    assert (counts["deferred"] > 0) == (mode == "capped")
    replay.close()


def test_full_mode_brings_all_at_admission_and_nothing_later() -> None:
    trace, config, shelf = random_trace(), settings("full"), Shelf()
    shape = replay_shape(trace, 8)
    stage_prompt(trace, config, shape, shelf, "lease")
    replay = Replay(trace, config, shape, 1)
    replay.attach(shelf)
    first = replay.step([("a", "lease")])
    assert first.first_set_bytes == trace.num_prompt_blocks * shape.host_block_bytes
    assert sum(replay.step().missed_bytes for _ in range(trace.num_steps - 1)) == first.missed_bytes == 0
    replay.close()


def test_requests_that_begin_later_fetch_the_same_and_leave_room_for_others() -> None:
    trace, config, shelf = random_trace(), settings("capped"), Shelf()
    shape = replay_shape(trace, 8)
    stage_prompt(trace, config, shape, shelf, "lease")
    replay = Replay(trace, config, shape, 2)
    replay.attach(shelf)
    begins = {0: "a", 25: "b", NUM_STEPS: "c", NUM_STEPS + 25: "d"}
    ends = dict[str, int]()
    for number in range(2 * NUM_STEPS + 25):
        step = replay.step([(begins[number], begins[number])] if number in begins else [])
        ends |= {name: number for name in step.ended}
        if number % 7 == 0:
            replay.check()
    assert ends == {name: number + NUM_STEPS - 1 for number, name in begins.items()}
    assert replay.num_requests == 0
    by_lease = {name: {key[1:] for key in shelf.reads if key[0] == name} for name in begins.values()}
    assert by_lease["a"] == by_lease["b"] == by_lease["c"] == by_lease["d"]
    replay.close()


def test_dense_fetches_every_token_and_no_summaries() -> None:
    trace, config, shelf = random_trace(), settings("full"), Shelf()
    shape = replay_shape(trace, 8)
    stage_prompt(trace, config, shape, shelf, "lease")
    step = fetch_dense(trace, shape, shelf, "lease")
    assert step.admitted_bytes == 21 * shape.host_block_bytes
    assert step.host_bytes == 0
    assert {index for _, index, _ in shelf.reads} == set(range(21))


def test_a_block_that_does_not_come_ends_the_replay() -> None:
    trace, config, shelf = random_trace(), settings("capped"), Shelf()
    shape = replay_shape(trace, 8)
    stage_prompt(trace, config, shape, shelf, "lease")
    replay = Replay(trace, config, shape, 1)
    replay.attach(shelf)
    shelf.is_lost = True
    with pytest.raises(LeaseExpiredError):
        replay.step([("a", "lease")])
    replay.close()


def test_settings_that_are_not_the_traces_are_refused() -> None:
    trace = random_trace()
    config = LookaheadConfig(budget_blocks=BUDGET + 1)
    with pytest.raises(ConfigError, match=r"^budget_blocks: expected 4, as in the trace, got 5"):
        Replay(trace, config, replay_shape(trace, 8), 1)
