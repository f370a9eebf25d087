"""The needle question: one numbered fact hidden in a long text and asked for at the end.

A model that lost the fact's blocks cannot answer.
"""

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass

from oasiskv.core.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A fact with a number in it, and the question whose answer is that number.

    SmolLM2-135M answers the default wording rightly with full attention at 6,000 to 7,500 tokens and depth 0.5.
    """

    number: str = "48213"
    """The answer: digits only."""
    depth: float = 0.5
    """Where the fact stands: 0 is before the text, 1 is after it."""
    instruction: str = "Read this text."
    """First line of the prompt."""
    fact: str = "The secret number of the old lighthouse is {number}. Remember it."
    """The hidden line; `{number}` stands for the number."""
    question: str = "Question: What is the secret number of the old lighthouse?"
    """Last line of the prompt. Without its first word a small model takes it for a part of the text now and then."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a field breaks its promise.
        """
        if not re.fullmatch("[0-9]+", self.number):
            raise ConfigError(f"number: expected digits, got {self.number!r}")
        if not 0 <= self.depth <= 1:
            raise ConfigError(f"depth: expected 0 to 1, got {self.depth}")
        if "{number}" not in self.fact:
            raise ConfigError(f"fact: expected a text with {{number}} in it, got {self.fact!r}")

    def is_answered_by(self, answer: str) -> bool:
        """Tell whether the number stands in the answer, and not merely as a part of a longer one."""
        return re.search(rf"(?<![0-9]){self.number}(?![0-9])", answer) is not None


def build_needle_prompt(text: str, needle: Needle, *, num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Build the longest needle prompt of at most `num_tokens` tokens from the beginning of a text.

    The text is cut at a word; the fact goes to the line break of the cut text that is nearest to the needle's depth.

    Args:
        text: lines of plain text without the needle's number.
        needle: the fact, where to hide it, and the question.
        num_tokens: most tokens that the prompt may have, by `count_tokens`.
        count_tokens: the number of tokens of a prompt as the model will see it, so with the chat template where one is
            used; must not fall when the prompt grows by a word.

    Raises:
        InvalidRequestError: the number is in the text already, the text is too short to fill `num_tokens`, or
            `num_tokens` does not even hold the fact and the question.
    """
    if needle.number in text:
        raise InvalidRequestError(f"text: expected none of the number {needle.number} in it, got a text that holds it")
    words = re.findall(r"\s*\S+", text)

    def build(num_words: int) -> str:
        return _hide("".join(words[:num_words]).strip(), needle)

    num_words = bisect.bisect_right(range(len(words) + 1), num_tokens, key=lambda n: count_tokens(build(n))) - 1
    if num_words < 0:
        raise InvalidRequestError(f"num_tokens: expected at least {count_tokens(build(0))}, got {num_tokens}")
    prompt = build(num_words)
    if num_words == len(words) and (longest := count_tokens(prompt)) < num_tokens:
        raise InvalidRequestError(
            f"num_tokens: expected at most {longest}, for the text is no longer, got {num_tokens}"
        )
    return prompt


def _hide(body: str, needle: Needle) -> str:
    breaks = [0, *(match.end() for match in re.finditer("\n", body)), len(body)]
    cut = min(breaks, key=lambda place: abs(place - needle.depth * len(body)))
    parts = (
        needle.instruction,
        body[:cut].rstrip("\n"),
        needle.fact.replace("{number}", needle.number),
        body[cut:],
        needle.question,
    )
    return "\n".join(part for part in parts if part)
