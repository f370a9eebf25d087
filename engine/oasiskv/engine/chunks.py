"""What the scheduler's side measures to size pieces of prompts beside sparse decodes; the rule is `core.chunks`."""

import time
from collections.abc import Callable, Mapping

from oasiskv.core.chunks import ChunkRule, Paced

TELL_STEPS = 16
"""Steps after which workers tell how long layers waited; their counters come about as often."""

LEAST_TOKENS = 512
"""Prompt tokens that a step computes in any case."""

DECODE_TOKENS = 2
"""Most tokens that a decoding request computes in a step, its draft included."""


class Chunks:
    """Follows the steps of an engine and says how many tokens a prompt may compute in the next one.

    Args:
        rule: The rule.
        own_limit: What the engine itself is configured to; 0 for no limit.
        clock: Seconds, as `time.perf_counter`.

    Attributes:
        limit: Tokens that each prompt may compute in a step, as vLLM's `long_prefill_token_threshold`; 0 for no limit.
    """

    def __init__(self, rule: ChunkRule, own_limit: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without a limit of our own."""
        self._rule, self._own_limit, self._clock = rule, own_limit, clock
        self.limit = own_limit
        self._began_s = clock()
        self._num_steps = self._num_tokens = 0
        self._has_others = False
        self._stall_s: float | None = None

    @property
    def tokens(self) -> int:
        """The rule's last choice."""
        return self._rule.tokens

    def step(self, num_scheduled: Mapping[str, int], *, has_sparse: bool) -> int:
        """Note a step that was just scheduled, and return the limit for the next.

        Args:
            num_scheduled: Tokens of each request.
            has_sparse: Whether any of them decodes sparse.
        """
        prompts = [count for count in num_scheduled.values() if count > DECODE_TOKENS]
        self._num_steps += 1
        self._num_tokens += sum(prompts)
        self._has_others |= not has_sparse
        self.limit = self._own_limit
        if has_sparse:
            # The limit is one for each prompt; those that begin now share the next step.
            share = max(1, self._rule.tokens // max(1, len(prompts)))
            self.limit = min(share, self._own_limit) if self._own_limit else share
        return self.limit

    def take(self, stall_s: float) -> None:
        """Take what workers tell.

        Args:
            stall_s: Time that layers waited since the start, on the rank where that is least.
        """
        now = self._clock()
        before, self._stall_s = self._stall_s, stall_s
        if before is not None and self._num_steps > 0 and not self._has_others:
            paced = Paced(
                step_s=(now - self._began_s) / self._num_steps,
                stall_s=(stall_s - before) / self._num_steps,
                num_tokens=self._num_tokens / self._num_steps,
            )
            self._rule.learn(paced)
        self._began_s, self._num_steps, self._num_tokens, self._has_others = now, 0, 0, False
