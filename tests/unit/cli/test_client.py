"""Questions to a server on loopback that answers from a script."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from oasiskv.cli.client import Answer, ask, parse_metrics, read_metrics
from oasiskv.cli.launch import free_port
from oasiskv.core.errors import InvalidRequestError, PeerUnavailableError

METRICS = """# HELP oasiskv_hit_blocks_total Predicted blocks that were resident.
# TYPE oasiskv_hit_blocks_total counter
oasiskv_hit_blocks_total{engine="0",model_name="a b{c"} 40.0
oasiskv_hit_blocks_total{engine="1",model_name="a b{c"} 2.0
oasiskv_hit_blocks_created{engine="0"} 1.79e+09
oasiskv_host_blocks 7
vllm:prompt_tokens_total{engine="0"} 5.0
"""


class FakeServer(HTTPServer):
    events: list[Any] = []  # noqa: RUF012
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer(200, METRICS.encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if request["model"] == "wrong":
            self.answer(400, b"no such model")
        else:
            self.answer(200, b"".join(f"data: {event}\n\n".encode() for event in self.server.events))

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(("127.0.0.1", 0), Handler) as fake:
        fake.requests = []
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_an_answer_is_handed_on_piece_by_piece_and_counted(server: FakeServer) -> None:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    server.events = ['{"choices": [{"delta": {"role": "assistant"}}]}', piece("4"), piece("82"), usage, "[DONE]"]
    shown: list[str] = []
    answer = ask(server.server_port, {"model": "m"}, shown.append)
    assert shown == ["4", "82"]
    assert (answer.text, answer.num_prompt_tokens, answer.num_tokens) == ("482", 9, 3)
    assert len(answer.token_times) == 2
    assert server.requests == [{"model": "m", "stream": True, "stream_options": {"include_usage": True}}]


def test_an_error_within_the_stream_is_raised(server: FakeServer) -> None:
    server.events = [piece("4"), '{"error": {"message": "the engine died"}}']
    with pytest.raises(PeerUnavailableError, match="the engine died"):
        ask(server.server_port, {"model": "m"}, lambda text: None)


def test_a_refused_request_is_raised_with_the_servers_words(server: FakeServer) -> None:
    with pytest.raises(InvalidRequestError, match="no such model"):
        ask(server.server_port, {"model": "wrong"}, lambda text: None)


def test_an_absent_server_is_a_peer_that_does_not_answer() -> None:
    with pytest.raises(PeerUnavailableError, match="expected an answer on port"):
        read_metrics(free_port())


def test_metrics_are_summed_over_labels_without_creation_times(server: FakeServer) -> None:
    assert read_metrics(server.server_port) == {"oasiskv_hit_blocks_total": 42.0, "oasiskv_host_blocks": 7.0}
    assert parse_metrics(METRICS, "vllm:") == {"vllm:prompt_tokens_total": 5.0}


def test_decode_speed_leaves_out_the_first_token() -> None:
    assert Answer(num_tokens=5, token_times=[10.0, 11.0, 12.0]).tokens_per_s == 2.0
    assert Answer(num_tokens=1, token_times=[10.0]).tokens_per_s == 0.0
    assert Answer().tokens_per_s == 0.0
