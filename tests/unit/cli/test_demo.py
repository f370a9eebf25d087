"""What `oasiskv run` prints, from numbers that are known."""

import itertools
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from oasiskv.cli import demo, main
from oasiskv.cli.demo import Question, Reply, find_text, table
from oasiskv.cli.launch import Request, prepare
from oasiskv.core.errors import EngineFailedError
from oasiskv.core.needle import Needle

COUNTS = {
    "predicted_blocks": 100.0,
    "hit_blocks": 70.0,
    "fetched_blocks": 20.0,
    "deferred_blocks": 10.0,
    "late_blocks": 3.0,
    "wasted_blocks": 2.0,
    "sparse_steps": 12.0,
    "load_bytes": 3 * 2**20,
    "store_bytes": 2 * 2**30,
    "finished_engine_blocks": 75.0,
    "finished_dense_blocks": 390.0,
}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}


def lines(tmp_path: Path, ours: str, **more: float) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "model.safetensors").touch()
    launch = prepare(Request(model=str(tmp_path)), "cpu", print)
    question = Question(needle=Needle(), content="", token_ids=list(range(6200)))
    sparse = Reply(text=ours, first_token_s=10.0, tokens_per_s=3.0)
    dense = Reply(text="It is 48213.", first_token_s=0.04, tokens_per_s=4.0)
    counts = {f"oasiskv_{name}_total": value for name, value in (COUNTS | more).items()}
    return list(table(launch, question, sparse, dense, counts))


def test_the_table_has_every_number_of_both_engines(tmp_path: Path) -> None:
    found = lines(tmp_path, "It is 48213.")
    words = [line.split() for line in found]
    assert ["the", "fact", "(48213)", "found", "found"] in words
    assert ["engine", "blocks", "held", "75", "390"] in words
    assert ["first", "token,", "s", "10.00", "0.04"] in words
    assert ["then", "tokens/s", "3.0", "4.0"] in words
    text = "\n".join(found)
    assert "blocks predicted 100 = hit 70 + fetched 20 + deferred 10, over 12 sparse steps" in text
    assert "late 3, wasted 2" in text
    assert "moved: 3.0 MiB from host memory to the engine, 2.0 GiB to host memory" in text


def test_the_table_says_what_came_from_staging_where_services_share_the_work(tmp_path: Path) -> None:
    moved = {"handover_bytes": 8 * 2**20, "admitted_bytes": 2**20, "missed_bytes": 2**21}
    found = lines(tmp_path, "It is 48213.", **moved)
    assert ["KV", "at", "admission", "1.0", "MiB", "8.0", "MiB,", "all", "of", "it"] in [line.split() for line in found]
    assert (
        "from prefill to decode: 1.0 MiB at admission (first set, summaries, map), 2.0 MiB later, of 8.0 MiB" in found
    )
    assert "admission" not in "".join(lines(tmp_path, "It is 48213."))


def test_a_missed_fact_is_said(tmp_path: Path) -> None:
    assert ["the", "fact", "(48213)", "missed", "found"] in [line.split() for line in lines(tmp_path, "It is 482.")]


def test_the_counters_are_read_once_the_request_is_over_and_they_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTLE_POLL_S", 0)
    steps = [(0, 5.0), (0, 5.0), (1, 5.0), (1, 9.0), (1, 9.0), (1, 10.0)]
    reads = iter([{demo.FINISHED: 2.0 + finished, "oasiskv_hit_blocks_total": hits} for finished, hits in steps])
    found = demo.read_settled(lambda: next(reads), {demo.FINISHED: 2.0, "oasiskv_hit_blocks_total": 1.0})
    assert found == {demo.FINISHED: 3.0, "oasiskv_hit_blocks_total": 9.0}
    assert len(list(reads)) == 1


def test_counters_that_never_stand_still_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTLE_POLL_S", 0)
    monkeypatch.setattr(demo, "SETTLE_TIMEOUT_S", 0.01)
    reads = itertools.count()
    found = demo.read_settled(lambda: {demo.FINISHED: float(next(reads))}, {demo.FINISHED: 0.0})
    assert found == {demo.FINISHED: float(next(reads) - 1)}


@pytest.mark.parametrize(("device", "is_eager"), [("cpu", True), ("cuda", False)])
def test_both_engines_capture_graphs_on_a_gpu_and_neither_on_a_cpu(device: str, is_eager: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "model.safetensors").touch()
    launch = prepare(Request(model=str(tmp_path)), device, print)
    assert ("--enforce-eager" in launch.arguments) == is_eager
    assert demo._dense_engine(launch)["enforce_eager"] == is_eager


def test_the_committed_text_is_found() -> None:
    assert len(find_text().read_text()) > 100_000


class FakeServer(BaseHTTPRequestHandler):
    """Streams an answer, and counts it."""

    num_answers = 0
    text = "It is 48213."
    breaks = False

    def do_GET(self) -> None:
        counts = dict.fromkeys(COUNTS, 0.0) | {"finished_requests": 0.0, "late_layers": 0.0}
        if type(self).num_answers:
            counts |= COUNTS | {"finished_requests": 1.0}
        self.answer("".join(f"oasiskv_{name}_total {value}\n" for name, value in counts.items()))

    def do_POST(self) -> None:
        type(self).num_answers += 1
        if type(self).breaks:
            self.answer(f"data: {json.dumps({'error': 'the engine ended'})}\n\n")
            return
        piece = {"choices": [{"delta": {"content": type(self).text}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
        self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in (piece, usage)) + "data: [DONE]\n\n")

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class FakeCluster:
    """In the place of a server or of services."""

    def __init__(self, port: int) -> None:
        self.http = HTTPServer(("127.0.0.1", port), FakeServer)
        self.thread = threading.Thread(target=self.http.serve_forever)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def wait_ready(self) -> None:
        pass

    def check(self) -> None:
        if FakeServer.breaks:
            raise EngineFailedError("decode ended: it was killed")


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started, in a model's folder `tmp_path`, for whose real engines fakes stand in."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 8192}))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(FakeServer, "num_answers", 0)
    monkeypatch.setattr(demo, "find_device", lambda: "cpu")
    monkeypatch.setattr(demo, "missing_for_services", list)
    monkeypatch.setattr(demo, "SETTLE_POLL_S", 0.01)
    question = Question(needle=Needle(), content="where", token_ids=list(range(6325)))
    monkeypatch.setattr(demo, "make_question", lambda *_: question)
    reply = Reply(text="It is 48213.", first_token_s=1.0, tokens_per_s=2.0)
    monkeypatch.setattr(demo, "_reference", lambda dense: reply)
    monkeypatch.setattr(demo, "Offline", lambda *_: nullcontext())
    used = []

    def start(name: str) -> Callable[..., FakeCluster]:
        def started(launch: object, port: int, *_: object) -> FakeCluster:
            used.append(name)
            return FakeCluster(port)

        return started

    monkeypatch.setattr(demo, "_server", start("server"))
    monkeypatch.setattr(demo, "_services", start("services"))
    return used


@pytest.mark.parametrize(
    ("device", "flags", "what"),
    [
        ("cpu", [], "services"),
        ("cpu", ["--single"], "server"),
        ("cuda", [], "server"),
        ("cpu without xxhash", [], "server"),
    ],
)
def test_both_engines_are_asked_and_services_share_the_work_without_a_gpu_unless_one_server_is_wanted(
    device: str,
    flags: list[str],
    what: str,
    used: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    device, _, missing = device.partition(" without ")
    monkeypatch.setattr(demo, "missing_for_services", lambda: missing.split())
    monkeypatch.setattr(demo, "find_device", lambda: device)
    assert main.main(["run", str(tmp_path), *flags]) == 0
    assert used == [what]
    told = capsys.readouterr()
    assert "the fact (48213)" in told.out
    named = "staging, prefill and decode" if what == "services" else "one server"
    assert f"starting {named} with OasisKV" in told.err
    assert ("services lack xxhash" in told.err) == bool(missing)


@pytest.mark.parametrize("flags", [[], ["--single"]])
def test_an_answer_without_the_fact_is_a_failure_whatever_else_went_well(
    flags: list[str], used: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(FakeServer, "text", "It is 4821.")
    assert main.main(["run", str(tmp_path), *flags]) == 1
    assert len(used) == 1
    assert "error: answer: expected 48213 in it, got 'It is 4821.'\n" in capsys.readouterr().err


def test_a_service_that_ends_before_the_answer_is_named(
    used: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(FakeServer, "breaks", True)
    assert main.main(["run", str(tmp_path)]) == 2
    assert used == ["services"]
    assert "error: decode ended: it was killed" in capsys.readouterr().err
