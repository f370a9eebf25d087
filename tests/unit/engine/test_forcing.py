"""Teacher forcing: the rows of a changing batch, and what is kept of them."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from oasiskv.engine.vllm import forcing

CPU = torch.device("cpu")


def make(**changes: Any) -> BatchUpdate:
    return BatchUpdate(**{"batch_size": 3, "removed": [], "added": [], "moved": [], **changes})


Added = tuple[int, SamplingParams, list[int], list[int]]


def added(index: int, name: str, tokens: list[int], output: list[int]) -> Added:
    extra = {forcing.FORCED_TOKENS: tokens, forcing.FORCED_NAME: name}
    return index, SamplingParams(extra_args=extra), [], output


def test_each_step_is_kept_and_only_the_forced_token_stays_possible() -> None:
    processor, output = forcing.ForceTokens(None, CPU, False), list[int]()
    plain: Added = (1, SamplingParams(), [], [])
    processor.update_state(make(added=[added(0, "keeps", [4, 2], output), plain]))
    steps = [torch.randn(2, 6, generator=torch.Generator().manual_seed(step)) for step in range(2)]
    for step, logits in enumerate(steps):
        applied = processor.apply(logits.clone())
        assert int(applied[0].argmax()) == [4, 2][step]
        assert int(applied[0].isfinite().sum()) == 1
        assert torch.equal(applied[1], logits[1])
        output.append([4, 2][step])
    torch.testing.assert_close(forcing.recorded("keeps"), torch.stack(steps)[:, 0].log_softmax(-1))


def test_a_prompt_in_parts_keeps_the_step_of_its_last_part() -> None:
    processor = forcing.ForceTokens(None, CPU, False)
    processor.update_state(make(added=[added(0, "parts", [1], [])]))
    processor.apply(torch.zeros(1, 4))
    last = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    processor.apply(last.clone())
    torch.testing.assert_close(forcing.recorded("parts"), last.log_softmax(-1))


def test_rows_follow_their_requests_when_the_batch_changes() -> None:
    processor = forcing.ForceTokens(None, CPU, False)
    processor.update_state(make(added=[added(row, f"row{row}", [row], []) for row in range(3)]))
    processor.update_state(make(removed=[1], moved=[(2, 1, MoveDirectionality.UNIDIRECTIONAL)]))
    processor.update_state(make(moved=[(0, 1, MoveDirectionality.SWAP)]))
    processor.update_state(None)
    applied = processor.apply(torch.zeros(2, 4))
    assert applied.argmax(-1).tolist() == [2, 0]
