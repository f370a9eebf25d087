"""How many prompt tokens a step computes beside sparse decodes: as many as fit the time that layers wait for the link.

Where decode steps wait for transfers, the device idles, and a piece of a prompt that is computed in that time costs
the decodes nothing. `ChunkRule` sees numbers alone, so that its choices can be tried without a device.
"""

from dataclasses import dataclass

from oasiskv.core.errors import ConfigError

LATE_SHARE = 0.02
"""Share of a step that layers may wait and still count as not waiting."""

BACKOFF = 0.9
"""What a chunk shrinks to where nothing waited: it may have been too large."""

GROWTH = 1.5
"""Most that chunks grow at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What a few steps with sparse decodes took, as means per step."""

    step_s: float
    """From step to step, waits included."""
    stall_s: float
    """What layers waited for transfers, on the rank that waited least."""
    num_tokens: float
    """Prompt tokens computed."""


class ChunkRule:
    """Chooses how many prompt tokens a step may compute beside sparse decodes.

    Args:
        least: Tokens that prompts get in any case, so that they come to an end.
        most: Tokens that the engine computes in a step.

    Attributes:
        tokens: The last choice.
    """

    def __init__(self, least: int, most: int) -> None:
        """Start with the least.

        Raises:
            ConfigError: least and most are not in order.
        """
        if not 1 <= least <= most:
            raise ConfigError(f"chunks: expected 1 <= least <= most tokens, got {least} and {most}")
        self.least, self.most = least, most
        self.tokens = least
        self._tokens_per_s: float | None = None

    def learn(self, paced: Paced) -> int:
        """Choose anew after some steps, and return the choice."""
        compute_s = paced.step_s - paced.stall_s
        if compute_s <= 0:
            return self.tokens
        if paced.num_tokens >= self.least / 2:
            # The decodes' own time is in it, so this errs towards small chunks.
            self._tokens_per_s = paced.num_tokens / compute_s
        if self._tokens_per_s is None:
            return self.tokens
        if paced.stall_s > LATE_SHARE * paced.step_s:
            wanted = paced.num_tokens + paced.stall_s * self._tokens_per_s
        else:
            wanted = BACKOFF * paced.num_tokens
        self.tokens = int(max(self.least, min(wanted, self.most, GROWTH * self.tokens)))
        return self.tokens
