"""`oasiskv up` with real engines: OpenAI's own client, the documented curl lines, streams that are left, ctrl-C."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli.client import parse_metrics
from oasiskv.engine.testing import write_tiny_model
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2
from oasiskv.protos.inference.v2 import inference_pb2, inference_pb2_grpc
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs/requests.md"]
LONG = "The Nile, the Rhine and the Rhone are rivers, and so are the Seine and the Thames; the Baikal is a lake. " * 4
"""More bytes, which are its tokens, than stay dense."""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts the tests may ignore it
from oasiskv.cli.main import main
sys.exit(main())
"""
FILE = """
[engine]
model = %s
[engine.lookahead]
budget_blocks = 6
switch = "early"
host_pool_bytes = "64MiB"
[engine.arguments]
max_model_len = 1024
max_num_seqs = 8
enforce_eager = true
kv_cache_memory_bytes = 134217728
[fingerprint]
model_hash = "tiny"
dtype = "float32"
block_size = 16
num_layers = 2
num_kv_heads = 2
head_dim = 32
[staging]
pool_bytes = 8388608
[prefill]
address = "127.0.0.1:0"
handle_ttl_s = 5
[decode]
address = "127.0.0.1:0"
http_address = "127.0.0.1:0"
oip_address = "127.0.0.1:0"
model_name = "smollm2-135m"
drain_s = 120.0
[decode.http_arguments]
enable_auto_tool_choice = true
tool_call_parser = "hermes"
"""


def write_model(folder: Path) -> Path:
    """Write a tiny model whose tokens are the bytes and an end, so that it can write any text."""
    write_tiny_model(folder, vocab_size=257)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 256}))
    tokenizer = Tokenizer(
        models.BPE({char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return folder


@dataclass
class Up:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def read(self, is_ready: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if (found := re.search(r"ready: \S+ answers OpenAI's requests at (\S+)/v1", line)) is not None:
                self.url = found[1]
                is_ready.set()
        is_ready.set()

    def port(self, name: str, what: str) -> int:
        """Return a port that a service told."""
        for line in self.lines:
            if f"{name} " in line and (found := re.search(rf"{what} (?:is|are)?\s?(?:on|at) port (\d+)", line)):
                return int(found[1])
        raise AssertionError("".join(self.lines))

    def metrics(self, name: str) -> dict[str, float]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port(name, "metrics"), timeout=30)) as one:
            one.request("GET", "/metrics")
            return parse_metrics(one.getresponse().read().decode())

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    file = folder / "services.toml"
    file.write_text(FILE % json.dumps(str(write_model(folder / "model"))))
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "up", str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    started, is_ready = Up(process), threading.Event()
    reader = threading.Thread(target=started.read, args=(is_ready,))
    reader.start()
    try:
        assert is_ready.wait(800), "".join(started.lines)
        assert started.url, "".join(started.lines)
        yield started
        end_while_a_stream_is_under_way(started)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=200)
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def end_while_a_stream_is_under_way(up: Up) -> None:
    """One ctrl-C: what was begun is finished, what is new is refused, everything ends in order, nothing is left."""
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) >= 5  # three services and two engines
    with up.client() as client:
        stream = client.completions.create(
            model="smollm2-135m", prompt=LONG, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        up.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.InternalServerError, match="service: expected one that takes requests"):
            ask_until_refused(client)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] == "length"
    assert up.process.wait(timeout=200) == 130
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


def ask_until_refused(client: openai.OpenAI) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        client.completions.create(model="smollm2-135m", prompt="a", max_tokens=1)


def settle(up: Up) -> None:
    """Return once nobody holds anything: no request, lease, host block or engine block, in any of the three."""
    end = time.monotonic() + 60
    while True:
        with up.client() as client:  # the engine tells what is held with its next steps
            client.completions.create(model="smollm2-135m", prompt="a", max_tokens=8, extra_body={"ignore_eos": True})
        decode, prefill, staging = (up.metrics(name) for name in ("decode", "prefill", "staging"))
        held = {
            "decode requests": decode["oasiskv_decode_inflight"],
            "decode leases": decode["oasiskv_decode_leases"],
            "decode host blocks": decode["oasiskv_host_blocks_held"],
            "decode engine and host bytes": decode["oasiskv_decode_kv_bytes"],
            "prefill requests": prefill["oasiskv_prefill_inflight"],
            "prefill tokens": prefill["oasiskv_prefill_queued_tokens"],
            "prefill engine and host bytes": prefill["oasiskv_prefill_kv_bytes"],
            "staging leases": staging["oasiskv_staging_leases"],
        }
        if not any(held.values()):
            return
        assert time.monotonic() < end, held


def test_the_openai_client_gets_completions_with_log_probabilities_streamed_and_whole(up: Up) -> None:
    with up.client() as client:
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
        before = up.metrics("decode")["oasiskv_decode_handovers_total"]
        asked: dict[str, Any] = {"model": "smollm2-135m", "prompt": LONG, "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**asked, logprobs=2, extra_body={"ignore_eos": True})
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(LONG), 12)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 12
        streamed = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
        assert up.metrics("decode")["oasiskv_decode_handovers_total"] == before + 2
        alone = client.completions.create(**asked, extra_body={"ignore_eos": True, "min_tokens": 1})
        assert alone.choices[0].text == whole.choices[0].text
    settle(up)


def test_the_openai_client_gets_chats_tools_and_structure(up: Up) -> None:
    with up.client() as client:
        asked: dict[str, Any] = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": LONG}],
            "temperature": 0,
            "max_tokens": 12,
        }
        whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        streamed = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
        text, usage = "", None
        for chunk in streamed:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        assert usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 12
        with_logprobs = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert with_logprobs.choices[0].logprobs is not None
        chosen = client.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        assert chosen.choices[0].message.content in ("yes", "no")
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        told = client.chat.completions.create(**asked, tools=[tool], tool_choice="none")
        assert told.usage is not None
        assert told.usage.prompt_tokens > whole.usage.prompt_tokens
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**asked | {"model": "other"})
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(**asked | {"max_tokens": 0})
    settle(up)


def test_the_openai_client_gets_a_call_of_a_tool(up: Up) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": parameters}}
    with up.client() as client:
        answer = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "How warm is Rome?"}],
            tools=[tool],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            temperature=0,
            # The grammar allows any amount of white space, from which this leads away.
            frequency_penalty=2.0,
            max_tokens=400,
        )
    calls: Any = answer.choices[0].message.tool_calls
    (call,) = calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    settle(up)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_is_left_releases_everything(up: Up, after: int) -> None:
    with up.client() as client:
        stream = client.completions.create(
            model="smollm2-135m", prompt=LONG, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(after):
            next(iter(stream))
        stream.close()
    settle(up)


@contextlib.contextmanager
def asked(up: Up, front: str) -> Iterator[None]:
    """Ask for a long answer by a front that is not OpenAI's, and leave the request when the `with` block ends."""
    body = {"max_tokens": 500, "ignore_eos": True}
    if front == "REST":
        request = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [LONG]}], "parameters": body}
        address = up.url.removeprefix("http://").split(":")
        with contextlib.closing(http.client.HTTPConnection(address[0], int(address[1]), timeout=60)) as connection:
            connection.request("POST", "/v2/models/smollm2-135m/infer", json.dumps(request))
            yield
        return
    with grpc.insecure_channel(f"127.0.0.1:{up.port('decode', 'OIP' if front == 'OIP' else 'listens')}") as channel:
        if front == "OIP":
            infer = inference_pb2.ModelInferRequest(model_name="smollm2-135m")
            infer.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(LONG.encode())
            for name, value in body.items():
                infer.parameters[name].string_param = str(value).lower()
            call = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(infer)
        else:
            prompt = generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=range(1, 250)))
            sampling = generation_pb2.Sampling(max_tokens=500, ignore_eos=True)
            generate = decode_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
            call = decode_pb2_grpc.DecodeStub(channel).Generate(generate)
        yield
        assert call.cancel() is not False


@pytest.mark.parametrize("front", ["decode.v1", "OIP", "REST"])
def test_a_request_that_is_left_by_another_front_releases_everything(up: Up, front: str) -> None:
    before = up.metrics("decode")
    with asked(up, front):
        end = time.monotonic() + 60
        while up.metrics("decode")["oasiskv_decode_handovers_total"] == before["oasiskv_decode_handovers_total"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert up.metrics("decode")["oasiskv_decode_inflight"] == 1
    settle(up)


def test_the_documented_curl_lines_are_answered(up: Up) -> None:
    blocks = [
        block for path in DOCUMENTS for block in re.findall(r"```console\n(.*?)```", path.read_text(), flags=re.DOTALL)
    ]
    lines = [
        line for block in blocks for line in re.split(r"^\$ ", block, flags=re.MULTILINE) if line.startswith("curl")
    ]
    assert len(lines) >= 12
    for line in lines:
        command = line.replace("curl", "curl --fail-with-body", 1).replace("http://localhost:8000", up.url)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if '"stream": true' in line:
            assert done.stdout.rstrip().endswith("data: [DONE]")
        elif "| grep" in line:
            assert "oasiskv_host_blocks_held" in done.stdout
        else:
            assert "error" not in json.loads(done.stdout), done.stdout
    settle(up)


def test_chats_are_taken_over_grpc_by_both_services(up: Up) -> None:
    content = LONG + "Name three."
    with up.client() as client:
        chat = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": content}],
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    messages = [generation_pb2.ChatMessage(role="user", content=content)]
    prompt = generation_pb2.Prompt(messages=generation_pb2.ChatMessages(messages=messages))
    sampling = generation_pb2.Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    with grpc.insecure_channel(f"127.0.0.1:{up.port('decode', 'listens')}") as channel:
        generate = decode_pb2.GenerateRequest(prompt=prompt, sampling=sampling)
        answers = list(decode_pb2_grpc.DecodeStub(channel).Generate(generate, timeout=120))
    assert "".join(answer.text for answer in answers) == chat.choices[0].message.content
    with grpc.insecure_channel(f"127.0.0.1:{up.port('prefill', 'listens')}") as channel:
        request = prefill_pb2.PrefillRequest(request_id="chat", prompt=prompt, sampling=sampling)
        begun = prefill_pb2_grpc.PrefillStub(channel).Prefill(request, timeout=120)
    assert begun.first_token_id == answers[0].token_ids[0]
    assert chat.usage is not None
    usage = answers[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (chat.usage.prompt_tokens, 12)
    assert len(begun.prompt_token_ids) == begun.usage.prompt_tokens == usage.prompt_tokens
    assert (begun.usage.completion_tokens, begun.handover.num_tokens) == (1, usage.prompt_tokens)
    settle(up)  # once the time of the handle is over, which nobody takes


def test_the_open_inference_protocol_is_spoken_by_the_whole(up: Up) -> None:
    before = up.metrics("decode")["oasiskv_decode_handovers_total"]
    request = inference_pb2.ModelInferRequest(model_name="smollm2-135m")
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(LONG.encode())
    for name, value in (("max_tokens", "12"), ("temperature", "0"), ("ignore_eos", "true")):
        request.parameters[name].string_param = value
    with grpc.insecure_channel(f"127.0.0.1:{up.port('decode', 'OIP')}") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(inference_pb2.ServerReadyRequest()).ready
        answer = stub.ModelInfer(request, timeout=120)
    outputs = {output.name: output.contents for output in answer.outputs}
    with up.client() as client:
        whole = client.completions.create(
            model="smollm2-135m", prompt=LONG, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
    assert outputs["text"].bytes_contents[0].decode() == whole.choices[0].text
    assert outputs["completion_tokens"].int_contents[0] == 12
    assert up.metrics("decode")["oasiskv_decode_handovers_total"] == before + 2
    settle(up)
