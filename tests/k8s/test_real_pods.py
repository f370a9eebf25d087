"""Real services as the pods of a rendered OasisKVService: requests go from KServe's Service to tokens."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_model
from oasiskv.operator.settings import METRICS_PORT, OIP_PORT, PREFILL_PORT, STAGING_PORT
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_helm import Helm
from oasiskv.operator.testing_kubelet import FakeKubelet
from oasiskv.operator.testing_operator import Start, chart_role, condition, forbidden, wait_for
from oasiskv.operator.testing_pods import SECRET, infer, small_service, volume
from oasiskv.protos.inference.v2 import inference_pb2, inference_pb2_grpc
from oasiskv.services.rpc.testing import tls_files
from oasiskv.services.rpc.tls import channel_credentials

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 24
REQUESTS = random_requests([201, 347], NUM_TOKENS)
LOOKAHEAD = {"budgetBlocks": 6, "switch": "early", "hostPoolBytes": "64Mi", "summary": "minmax"}
SETTINGS = {"budget_blocks": 6, "switch": "early", "summary": "minmax"}
ARGUMENTS = {"max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True, "kv_cache_memory_bytes": 2**27}


def write_model(folder: Path) -> Path:
    """Write a tiny model whose tokenizer knows the words w0 to w255."""
    write_tiny_model(folder, num_layers=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def tiny_service(namespace: str) -> dict[str, Any]:
    """Return a service of the tiny model whose pods show one another certificates."""
    kv = {"hash": "tiny", "dtype": "float32", "numLayers": 3, "numKvHeads": 2, "headDim": 32}
    model = {"uri": "pvc://models/tiny", "name": "tiny", **kv}
    return small_service(namespace, model, {"lookahead": LOOKAHEAD, "arguments": ARGUMENTS}, tls={"secret": SECRET})


@pytest.fixture
def kubelet(plane: ControlPlane, tmp_path: Path) -> Iterator[FakeKubelet]:
    made = FakeKubelet(plane, "cpu-0", tmp_path)
    try:
        made.start()
        yield made
    finally:
        print(made.printed())  # shown where a test failed
        made.stop()


@pytest.fixture
def namespace(plane: ControlPlane, kubelet: FakeKubelet) -> Iterator[str]:
    """Return a namespace in which only pods of the restricted level may run."""
    plane.check("create", "namespace", "real")
    plane.check("label", "namespace", "real", "pod-security.kubernetes.io/enforce=restricted")
    yield "real"
    plane.check("delete", "oks", "--all", "-n", "real", "--wait=false")


def events(plane: ControlPlane, namespace: str) -> set[str]:
    """Return the reasons of what the operator told of the service."""
    found = plane.get("events.events.k8s.io", "-n", namespace)["items"]
    return {each["reason"] for each in found if each["regarding"].get("kind") == "OasisKVService"}


def kv_generation(plane: ControlPlane, namespace: str) -> str:
    return str(plane.get("oks", "chat", "-n", namespace).get("status", {}).get("kvGeneration", ""))


def is_reached(channel: grpc.Channel) -> bool:
    """Return whether somebody answers at all, whatever the answer."""
    with channel:
        try:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)  # which these services do not have
            stub.ServerLive(inference_pb2.ServerLiveRequest(), timeout=10)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNIMPLEMENTED)
        return True


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{index}" for index in ids)


def ids_of(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"w(\d+)", text)]


def rest(url: str, prompt: list[int]) -> list[int]:
    return ids_of(infer(url, "tiny", text_of(prompt), NUM_TOKENS)["text"])


def rpc(address: str, prompt: list[int]) -> list[int]:
    """Ask by the protocol's gRPC, and return the tokens."""
    request = inference_pb2.ModelInferRequest(model_name="tiny")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text_of(prompt).encode())
    request.parameters["max_tokens"].int64_param = NUM_TOKENS
    request.parameters["temperature"].string_param = "0"
    with grpc.insecure_channel(address) as channel:
        answer = inference_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=120)
    (text,) = next(one.contents.bytes_contents for one in answer.outputs if one.name == "text")
    return ids_of(text.decode())


def chat(url: str, prompt: list[int]) -> list[int]:
    """Ask as OpenAI's clients do, and return the tokens."""
    body = {"model": "tiny", "prompt": text_of(prompt), "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = httpx.post(f"http://{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return ids_of(answer.json()["choices"][0]["text"])


def test_requests_go_through_kserve_decode_prefill_and_staging_as_the_operator_rendered_them(
    plane: ControlPlane,
    chart: Helm,
    start: Start,
    kubelet: FakeKubelet,
    namespace: str,
    certify: Callable[..., None],
    backend: EngineProcess,
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "models/tiny").parent
    one = {"model": str(model / "tiny"), "skip_tokenizer_init": True, "block_size": 16, **ARGUMENTS}
    expected = backend.run(one, REQUESTS, settings=SETTINGS).tokens

    num_forbidden = len(forbidden(plane))
    start(chart_role(plane, chart, "system"), "--read-nodes")
    plane.put([*volume(namespace, model), tiny_service(namespace)])
    wait_for(lambda: kv_generation(plane, namespace), "a KV generation")
    services = [f"chat-{role}-{kv_generation(plane, namespace)}" for role in ("prefill", "staging")]
    addresses = [kubelet.address(namespace, service) for service in services]
    certify(namespace, tmp_path / "tls", "peer", addresses)

    def is_ready() -> bool:
        assert kubelet.errors == []
        return condition(plane, namespace, "chat", "Ready").get("status") == "True"

    wait_for(is_ready, "a block to cross and the service to be ready", 500)
    assert condition(plane, namespace, "chat", "KVPathVerified")["reason"] == "BlockCrossed"

    def count(role: str, sample: str) -> float:
        (address,) = kubelet.pods(namespace, role)
        text = httpx.get(f"http://{address}:{METRICS_PORT}/metrics", timeout=30).text
        (line,) = (line for line in text.splitlines() if line.startswith(f"{sample} "))
        return float(line.split()[-1])

    # Nobody without a certificate is answered, by prefill no more than by staging.
    ports = {services[0]: PREFILL_PORT, services[1]: STAGING_PORT}
    peer = channel_credentials(tls_files(tmp_path / "tls", "peer"))
    for service, port in ports.items():
        address = f"{kubelet.address(namespace, service)}:{port}"
        assert is_reached(grpc.secure_channel(address, peer))
        assert not is_reached(grpc.insecure_channel(address))

    http, oip = (kubelet.where(namespace, "chat-predictor", port) for port in (80, OIP_PORT))
    prompts = [request["prompt"] for request in REQUESTS]
    assert [rest(http, prompt) for prompt in prompts] == expected
    assert [rpc(oip, prompt) for prompt in prompts] == expected
    assert chat(http, prompts[0]) == expected[0]
    assert count("decode", 'oasiskv_decode_handovers_total{outcome="handed_over"}') == 5
    assert count("prefill", 'oasiskv_prefill_handovers_total{outcome="handed_over"}') == 5
    assert {"RolloutStarted", "KVPathVerified", "RolloutDone"} <= events(plane, namespace)

    # A request that is under way when its pod is told to end comes to its own end.
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(infer, http, "tiny", text_of(prompts[0]), 500)
        wait_for(lambda: count("decode", "oasiskv_decode_inflight") > 0, "a request to be under way")
        plane.check("delete", "oks", "chat", "-n", namespace)
        answer = last.result()
    assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 500)
    assert ids_of(answer["text"])[:NUM_TOKENS] == expected[0]
    wait_for(lambda: plane.get("pods", "-n", namespace)["items"] == [], "the pods to end")
    assert list(kubelet.codes.values()) == [0, 0, 0], kubelet.codes
    assert kubelet.errors == []
    assert forbidden(plane)[num_forbidden:] == []
