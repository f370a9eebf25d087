"""What services and engines say about generating text: how tokens are chosen, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from oasiskv.core.errors import InvalidRequestError

RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, float("inf"), "at least 0"),
    "top_p": (1e-9, 1, "above 0 and at most 1"),
    "top_k": (0, float("inf"), "at least 0"),
    "min_p": (0, 1, "from 0 to 1"),
    "max_tokens": (1, float("inf"), "at least 1"),
    "min_tokens": (0, float("inf"), "at least 0"),
    "presence_penalty": (-2, 2, "from -2 to 2"),
    "frequency_penalty": (-2, 2, "from -2 to 2"),
    "repetition_penalty": (1e-9, float("inf"), "above 0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; `generation.proto` says what each field means."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequestError: A field is out of its range.
        """
        for name, (least, most, text) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidRequestError(f"{name}: expected {text}, got {getattr(self, name)}")

    def looking_back(self) -> list[str]:
        """Return the fields in use whose effect depends on what was generated before."""
        names = ("min_tokens", "presence_penalty", "frequency_penalty", "stop")
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token with its log probability and rank, 1 for the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What came of a request since the last time."""

    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[Sequence[Logprob]] = ()
    """By token: the token itself first, then the most likely ones."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error` with the last tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A prompt that was computed elsewhere."""

    first_token_id: int
    first_logprobs: Sequence[Logprob] = ()
    finish_reason: str | None = None
    """`stop` or `length` if the first token is also the last; then there is no handle."""
    handle: str = ""
    num_tokens: int = 0
    num_blocks: int = 0
    budget_blocks: int = 0
    summary: str = ""
    summary_dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request whose prompt was computed elsewhere."""

    first: Handover
    lease: str = ""
    """What its KV is read under; empty if it is finished."""
