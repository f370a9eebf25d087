"""The needle prompt: its parts, its length, its refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oasiskv.core.errors import ConfigError, InvalidRequestError
from oasiskv.core.needle import Needle, build_needle_prompt

TEXT = (Path(__file__).parents[3] / "examples" / "texts" / "ruth-1samuel.txt").read_text()
NUM_FRAME_WORDS = 24
"""Words of the instruction, the fact and the question."""
FACT = "The secret number of the old lighthouse is 48213. Remember it."


def count_words(prompt: str) -> int:
    return len(prompt.split())


def build(text: str = TEXT, needle: Needle | None = None, *, num_tokens: int = 3001) -> str:
    return build_needle_prompt(text, needle or Needle(), num_tokens=num_tokens, count_tokens=count_words)


def test_the_prompt_is_instruction_text_fact_text_question() -> None:
    text = "One line here.\nAnother line.\nA third one."
    assert build(text, Needle(depth=0.6), num_tokens=count_words(text) + NUM_FRAME_WORDS) == (
        "Read this text.\nOne line here.\nAnother line.\n"
        f"{FACT}\nA third one.\nQuestion: What is the secret number of the old lighthouse?"
    )


@pytest.mark.parametrize("num_tokens", [24, 25, 100, 101, 3001, 20011])
def test_the_prompt_fills_its_length_to_the_word(num_tokens: int) -> None:
    assert count_words(build(num_tokens=num_tokens)) == num_tokens


def test_a_counter_that_jumps_still_bounds_the_length() -> None:
    prompt = build_needle_prompt(TEXT, Needle(), num_tokens=1000, count_tokens=lambda s: 7 * (count_words(s) // 7 + 1))
    assert 987 <= count_words(prompt) < 1000


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_fact_stands_once_on_a_line_of_its_own_at_its_depth(depth: float) -> None:
    lines = build(needle=Needle(depth=depth)).split("\n")
    assert lines.count(FACT) == 1
    body = lines[1:-1]
    before = sum(map(len, body[: body.index(FACT)]))
    after = sum(map(len, body[body.index(FACT) + 1 :]))
    longest = max(map(len, body))
    assert abs(before - depth * (before + after)) <= longest


def test_the_text_keeps_its_words_and_order() -> None:
    body = [line for line in build().split("\n")[1:-1] if line != FACT]
    assert TEXT.startswith("\n".join(body))


def test_another_wording_and_number_are_used() -> None:
    prompt = build(
        needle=Needle(number="7", fact="Gate {number} is open.", question="Which gate is open?", instruction="Read.")
    )
    assert prompt.startswith("Read.\n")
    assert "\nGate 7 is open.\n" in prompt
    assert prompt.endswith("\nWhich gate is open?")


def test_an_answer_must_hold_the_whole_number() -> None:
    needle = Needle(number="4821")
    assert needle.is_answered_by("It is 4821.")
    assert not needle.is_answered_by("It is 48213.")
    assert not needle.is_answered_by("It is 14821.")
    assert not needle.is_answered_by("")


def test_a_text_too_short_is_refused_with_its_length() -> None:
    with pytest.raises(InvalidRequestError, match=r"^num_tokens: expected at most 27.*got 28$"):
        build("Three short words.", num_tokens=28)


def test_a_length_below_fact_and_question_is_refused_with_the_least_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"^num_tokens: expected at least 24, got 23$"):
        build(num_tokens=23)


def test_a_text_that_holds_the_number_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^text: .*48213"):
        build("In the year 48213 it rained.")


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("number", lambda: Needle(number="")),
        ("number", lambda: Needle(number="12a")),
        ("depth", lambda: Needle(depth=-0.1)),
        ("depth", lambda: Needle(depth=1.5)),
        ("fact", lambda: Needle(fact="No number here.")),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, make: Callable[[], Needle]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected "):
        make()
