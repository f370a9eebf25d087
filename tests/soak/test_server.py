"""Random clients of a real server, some of which hang up in mid-answer; everything comes back in the end."""

import http.client
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli.client import read_metrics
from oasiskv.cli.launch import Request, environment, find_device, free_port, prepare
from oasiskv.cli.server import Server
from oasiskv.engine.testing import write_tiny_eagle3, write_tiny_model

NUM_REQUESTS = 200
VOCAB = 49152

if find_device() != "cpu":
    pytestmark = pytest.mark.skip(reason="vLLM is not the CPU build here")


@pytest.fixture
def model(smollm2: Path, tmp_path: Path) -> Path:
    """Return a tiny model with a tokenizer, which a server needs."""
    folder = write_tiny_model(tmp_path / "model", vocab_size=VOCAB)
    for path in smollm2.glob("*token*"):
        shutil.copy(path, folder)
    return folder


class Client(threading.Thread):
    """One streamed completion, hung up after a number of pieces if it shall be."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(name=f"client-{seed}")
        draw = random.Random(seed)
        self.port, self.start_s = port, draw.uniform(0, 60)
        self.num_tokens, self.n = draw.randrange(1, 90), draw.choice([1, 1, 1, 2])
        self.hang_up_after = draw.randrange(0, self.num_tokens) if draw.random() < 0.25 else None
        self.body = {
            "model": "tiny",
            "prompt": [draw.randrange(VOCAB) for _ in range(draw.choice([1, 16, draw.randrange(1, 400)]))],
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": 0.8 if self.n > 1 else draw.choice([0, 0.8]),
            "seed": seed,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.usage: dict[str, Any] | None = None
        self.error: object = None

    def run(self) -> None:
        time.sleep(self.start_s)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.error = response.read()
                return
            num_pieces = 0
            for line in response:
                text = line.decode().removeprefix("data: ").strip()
                if not text or text == "[DONE]":
                    continue
                event = json.loads(text)
                self.error = self.error or event.get("error")
                self.usage = event.get("usage") or self.usage
                num_pieces += 1
                if num_pieces == self.hang_up_after:
                    return
        except (OSError, http.client.HTTPException) as cause:
            self.error = cause
        finally:
            connection.close()


def wait_until_idle(port: int) -> dict[str, float]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        running = read_metrics(port, "vllm:num_requests_")
        if running["vllm:num_requests_running"] == running["vllm:num_requests_waiting"] == 0:
            break
        time.sleep(0.5)
    return read_metrics(port) | read_metrics(port, "vllm:num_")


def ask(port: int, length: int) -> Any:
    draw = random.Random(length)
    body = {
        "model": "tiny",
        "prompt": [draw.randrange(VOCAB) for _ in range(length)],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["logprobs"]["tokens"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_drafter", [False, True], ids=["no-drafter", "eagle3"])
def test_a_server_gets_everything_back_from_two_hundred_clients(model: Path, tmp_path: Path, has_drafter: bool) -> None:
    drafter = f"eagle3:{write_tiny_eagle3(tmp_path / 'eagle3', model)}" if has_drafter else "none"
    port = free_port()
    request = Request(
        model=str(model),
        budget_blocks=6,
        drafter=drafter,
        host="127.0.0.1",
        port=port,
        max_model_len=512,
        max_num_seqs=8,
        # Dense up to 8 blocks each, and a prompt takes up to 25: they outgrow this pool in mid-decode.
        rest=["--num-gpu-blocks-override", "33", "--served-model-name", "tiny", "--max-num-batched-tokens", "256"],
        settings=["debug_verify=true", "debug_poison=true"],
    )
    launch = prepare(request, "cpu", print)
    child = environment("cpu", 1, os.environ)
    with Server(launch.command(), child, print, address=("127.0.0.1", port)) as server:
        server.wait_ready()
        before = [ask(port, length) for length in (1, 200, 333)]
        clients = [Client(port, seed) for seed in range(NUM_REQUESTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        metrics = wait_until_idle(port)
        after = [ask(port, length) for length in (1, 200, 333)]
    assert after == before
    assert [(client.name, client.error) for client in clients if client.error] == []
    for client in clients:
        if client.hang_up_after is None:
            assert client.usage is not None, client.name
            assert client.usage["completion_tokens"] == client.num_tokens * client.n
    number = {name.removeprefix("oasiskv_").removeprefix("vllm:"): value for name, value in metrics.items()}
    print({name: value for name, value in number.items() if value})
    assert number["engine_blocks_held"] == number["host_blocks_held"] == 0
    assert number["finished_requests_total"] >= 0.9 * NUM_REQUESTS
    assert number["num_preemptions_total"] > 0
    assert number["switches_total"] > 30
    predicted = number["predicted_blocks_total"]
    assert predicted == sum(number[f"{kind}_blocks_total"] for kind in ("hit", "fetched", "deferred")) > 0
