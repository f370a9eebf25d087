"""Translates the messages of `generation.v1`, which prefill and decode share."""

from collections.abc import Mapping, Sequence

from oasiskv.core.errors import InvalidRequestError
from oasiskv.core.generation import Logprob, Sampling
from oasiskv.protos.generation.v1 import generation_pb2 as pb

FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
MAX_ID_CHARS = 128

Prompt = Sequence[int] | str | Sequence[Mapping[str, str]]


def prompt_of(message: pb.Prompt) -> Prompt:
    """Return token ids, a text, or messages.

    Raises:
        InvalidRequestError: There is none.
    """
    match message.WhichOneof("prompt"):
        case "token_ids":
            return list(message.token_ids.ids)
        case "text":
            return message.text
        case "messages":
            if message.messages.messages:
                return [{"role": one.role, "content": one.content} for one in message.messages.messages]
    raise InvalidRequestError("prompt: expected token ids, a text or messages, got none")


def sampling_of(message: pb.Sampling) -> Sampling:
    """Return how to sample.

    Raises:
        InvalidRequestError: A field is out of its range.
    """
    given = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        given[name] = tuple(given.get(name, ()))
    return Sampling(**given)


def sampling_message(sampling: Sampling) -> pb.Sampling:
    """Return the message of how to sample."""
    values = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    return pb.Sampling(**{name: value for name, value in values.items() if value is not None})


def logprobs_of(message: pb.TokenLogprobs) -> list[Logprob]:
    """Return the log probabilities of a token."""
    return [Logprob(token_id=one.token_id, logprob=one.logprob, rank=one.rank) for one in message.candidates]


def logprobs_message(logprobs: Sequence[Logprob]) -> pb.TokenLogprobs:
    """Return the message of a token's log probabilities."""
    return pb.TokenLogprobs(
        candidates=[pb.Logprob(token_id=one.token_id, logprob=one.logprob, rank=one.rank) for one in logprobs]
    )


def check_request_id(request_id: str) -> None:
    """Refuse an id that is empty or too long.

    Raises:
        InvalidRequestError: It is.
    """
    if not 0 < len(request_id) <= MAX_ID_CHARS:
        raise InvalidRequestError(f"request_id: expected 1 to {MAX_ID_CHARS} characters, got {len(request_id)}")
