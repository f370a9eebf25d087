"""Teacher forcing through the engine: each request continues with given tokens, and what the model said is kept.

For evaluation in one process with model runner V1: vLLM makes the processor, and `recorded` reads what it kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

FORCED_TOKENS = "oasiskv_forced_tokens"
"""Key in `SamplingParams.extra_args`: the token ids to continue with."""
FORCED_NAME = "oasiskv_forced_name"
"""Key in `SamplingParams.extra_args`: the name under which the request is recorded."""

_recorded: dict[str, dict[int, torch.Tensor]] = {}


@dataclass(slots=True)
class _Forced:
    name: str
    tokens: Sequence[int]
    output: list[int] = field(repr=False)
    """The request's tokens so far, which vLLM extends."""


class ForceTokens(LogitsProcessor):
    """Keeps the log-probabilities of every step of a forced request, then leaves only the forced token possible."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Start with an empty batch."""
        self._rows: dict[int, _Forced] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._rows.pop(index, None)
            extra: dict[str, Any] = (params.extra_args if isinstance(params, SamplingParams) else None) or {}
            if FORCED_TOKENS in extra:
                self._rows[index] = _Forced(extra[FORCED_NAME], extra[FORCED_TOKENS], output)
        for first, second, direction in batch_update.moved:
            moved, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if moved is not None:
                self._rows[second] = moved
            if direction == MoveDirectionality.SWAP and other is not None:
                self._rows[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, forced in self._rows.items():
            step = len(forced.output)
            if step < len(forced.tokens):
                # A prompt that prefills in parts comes here after each part; the last one counts.
                _recorded.setdefault(forced.name, {})[step] = logits[row].float().log_softmax(-1).cpu()
                logits[row] = float("-inf")
                logits[row, forced.tokens[step]] = 0.0
        return logits


def recorded(name: str) -> torch.Tensor:
    """Return the log-probabilities of a request, `float32[num_steps, vocab_size]`, step 0 made by the prefill."""
    steps = _recorded[name]
    return torch.stack([steps[step] for step in range(len(steps))])
