"""What stands before vLLM's HTTP server refuses new requests in the words of their protocol."""

import asyncio
from typing import Any

import httpx
import pytest

from oasiskv.core.errors import OasisError, PeerUnavailableError, PoolExhaustedError
from oasiskv.engine.vllm.gate import Gate


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"answered"})


async def ask(error: OasisError | None, method: str, path: str) -> httpx.Response:
    def check_room() -> None:
        if error is not None:
            raise error

    transport = httpx.ASGITransport(Gate(app, check_room))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await client.request(method, path)


@pytest.mark.parametrize(
    ("error", "code"),
    [(PeerUnavailableError("service: it drains"), 503), (PoolExhaustedError("max_requests: 3"), 429)],
)
def test_new_requests_are_refused_as_their_protocol_has_it_and_questions_are_answered(
    error: OasisError, code: int
) -> None:
    answer = asyncio.run(ask(error, "POST", "/v1/completions"))
    name = type(error).__name__
    expected = {"error": {"message": str(error), "type": name, "param": None, "code": code}}
    assert (answer.status_code, answer.json(), answer.headers["Retry-After"]) == (code, expected, "1")
    answer = asyncio.run(ask(error, "POST", "/v2/models/m/infer"))
    assert (answer.status_code, answer.json()) == (code, {"error": str(error), "type": name})
    assert asyncio.run(ask(error, "GET", "/v1/models")).text == "answered"
    assert asyncio.run(ask(None, "POST", "/v1/completions")).text == "answered"
