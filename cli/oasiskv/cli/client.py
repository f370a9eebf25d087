"""What `run` asks of a server on loopback: one streamed chat completion, and the numbers on /metrics."""

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from oasiskv.core.errors import InvalidRequestError, PeerUnavailableError

TIMEOUT_S = 600.0
"""Longest silence: a long prompt prefills for minutes on a busy CPU."""

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)")


@dataclass(slots=True, kw_only=True)
class Answer:
    """One completion."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    """When each piece of the text came, in seconds after the question."""

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: all tokens but the first, which the prefill makes."""
        seconds = self.token_times[-1] - self.token_times[0] if self.token_times else 0.0
        return (self.num_tokens - 1) / seconds if seconds > 0 else 0.0


def ask(
    port: int, request: Mapping[str, Any], show: Callable[[str], None], path: str = "/v1/chat/completions"
) -> Answer:
    """Ask a server on this host and hand on the answer piece by piece.

    Args:
        port: On loopback.
        request: A chat completion without the fields of streaming.
        show: Receives each piece as it comes.
        path: Of the OpenAI API.

    Raises:
        InvalidRequestError: the server refused.
        PeerUnavailableError: it does not answer, or stopped in the middle.
    """
    answer, started = Answer(), time.monotonic()
    body = {**request, "stream": True, "stream_options": {"include_usage": True}}
    for event in _events(port, path, body):
        if "error" in event:
            raise PeerUnavailableError(f"server: expected an answer, got {event['error']}")
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                answer.token_times.append(time.monotonic() - started)
                answer.text += piece
                show(piece)
        if (usage := event.get("usage")) is not None:
            answer.num_prompt_tokens, answer.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return answer


def read_metrics(port: int, prefix: str = "oasiskv_") -> dict[str, float]:
    """Return the server's metrics of that prefix, summed over their labels.

    Raises:
        PeerUnavailableError: it does not answer.
    """
    return parse_metrics(_request(port, "GET", "/metrics").read().decode(), prefix)


def parse_metrics(text: str, prefix: str = "oasiskv_") -> dict[str, float]:
    """Read the Prometheus text format; creation times are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and sample["name"].startswith(prefix) and not sample["name"].endswith("_created"):
            found[sample["name"]] = found.get(sample["name"], 0.0) + float(sample["value"])
    return found


def _events(port: int, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    response = _request(port, "POST", path, body)
    if response.status != 200:
        raise InvalidRequestError(f"request: expected one that the server takes, got {response.read().decode()}")
    try:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as cause:
        raise PeerUnavailableError(f"server: expected the whole answer, got {cause}") from cause


def _request(port: int, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
        return connection.getresponse()
    except (OSError, http.client.HTTPException) as cause:
        raise PeerUnavailableError(f"server: expected an answer on port {port}, got {cause}") from cause
