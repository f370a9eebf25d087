"""The Open Inference Protocol over REST and gRPC, spoken by hand and by KServe's own client, without an engine."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from oasiskv.core.generation import Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.protos.inference.v2 import inference_pb2 as pb
from oasiskv.protos.inference.v2 import inference_pb2_grpc
from oasiskv.services.decode.oip import Oip
from oasiskv.services.decode.oip_grpc import SERVICE_NAME, OipServicer
from oasiskv.services.decode.oip_rest import LENGTH_HEADER, router
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.testing_handover import ENGINE, FINGERPRINT, FakeEngine

KSERVE = Path(os.environ.get("KSERVE_PYTHON", Path(__file__).parents[2] / "build/kserve/bin/python"))
needs_kserve = pytest.mark.skipif(not KSERVE.exists(), reason="KServe's client is not here: make kserve")

REST_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs: expected one of text, messages, got []"),
    ({"inputs": 7}, "inputs: expected a list"),
    ({"inputs": [7]}, "inputs: expected an object"),
    ({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}, "inputs: expected one of"),
    ({"inputs": [{"name": "text", "shape": [1], "datatype": "FP32", "data": ["a"]}]}, "inputs.text.datatype: expected"),
    ({"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a"]}]}, "inputs.text.shape: expected"),
    ({"inputs": [{"name": "text", "shape": 1, "datatype": "BYTES", "data": ["a"]}]}, "inputs.text.shape: expected"),
    ({"inputs": [{"name": "text", "shape": [0], "datatype": "BYTES", "data": []}]}, "inputs.text.data: expected"),
    (
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [7]}]},
        "inputs.text.data: expected texts",
    ),
    (
        {"inputs": [{"name": "messages", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]},
        "inputs.messages.data: expected JSON",
    ),
    (
        {"inputs": [{"name": "messages", "shape": [1], "datatype": "BYTES", "data": ['[{"role": "user"}]']}]},
        "inputs.messages.data: expected messages with role and content",
    ),
    ({"parameters": {"max_token": 3}}, "parameters.max_token: expected one of temperature, "),
    ({"parameters": {"max_tokens": "many"}}, "parameters.max_tokens: expected an integer, got 'many'"),
    ({"parameters": {"max_tokens": 1.5}}, "parameters.max_tokens: expected an integer, got 1.5"),
    ({"parameters": {"max_tokens": True}}, "parameters.max_tokens: expected an integer, got True"),
    ({"parameters": {"max_tokens": 0}}, "parameters.max_tokens: expected at least 1, got 0"),
    ({"parameters": {"temperature": "hot"}}, "parameters.temperature: expected a number, got 'hot'"),
    ({"parameters": {"ignore_eos": 3}}, "parameters.ignore_eos: expected true or false"),
    ({"parameters": {"stop_token_ids": "[1, true]"}}, "parameters.stop_token_ids: expected int or a JSON list"),
    ({"parameters": {"logprobs": 1}}, "parameters.logprobs: expected one of"),
    ({"outputs": [{"name": "words"}]}, "outputs: expected some of text, "),
]


@dataclass(kw_only=True)
class Fronts:
    service: DecodeService
    engine: FakeEngine
    stub: Any
    http: httpx.AsyncClient
    grpc_address: str
    url: str


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        running = asyncio.create_task(server._serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def run(test: Callable[[Fronts], Awaitable[None]], **changes: Any) -> None:
    async def within() -> None:
        values: dict[str, Any] = {"address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "max_call_s": 30.0} | changes
        config = DecodeConfig(fingerprint=FINGERPRINT, engine=ENGINE, model_name="tiny/one", **values)
        engine = FakeEngine()
        service = DecodeService(config, engine, Router(config))
        front = Oip(service, config.model_name, config.max_call_s)
        app = FastAPI()
        app.include_router(router(front))

        def add(server: grpc.aio.Server) -> None:
            inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(OipServicer(front), server)

        async with contextlib.AsyncExitStack() as resources:
            server = await RpcServer.start(ServerConfig(address="127.0.0.1:0"), add, (SERVICE_NAME,))
            resources.push_async_callback(server.stop, 0.0)
            url = await resources.enter_async_context(listening(app))
            address = f"127.0.0.1:{server.port}"
            channel = await resources.enter_async_context(grpc.aio.insecure_channel(address))
            client = await resources.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            await test(Fronts(service=service, engine=engine, stub=stub, http=client, grpc_address=address, url=url))

    asyncio.run(within())


def text_input(*texts: str) -> dict[str, Any]:
    return {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}


def grpc_request(*texts: str, **parameters: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny/one", id="7")
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    fields = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], fields[type(value)], value)
    return request


def test_text_goes_in_and_comes_out_in_both_fronts() -> None:
    async def check(fronts: Fronts) -> None:
        body = {
            "id": "7",
            "inputs": [text_input("abc", "defgh")],
            "parameters": {"max_tokens": 3, "temperature": 0.5, "stop": "x", "stop_token_ids": "[4, 5]"},
        }
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "model_name": "tiny/one",
            "model_version": "1",
            "id": "7",
            "outputs": [
                {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["0 1 2 ", "0 1 2 "]},
                {"name": "finish_reason", "datatype": "BYTES", "shape": [2], "data": ["length", "length"]},
                {"name": "prompt_tokens", "datatype": "INT32", "shape": [2], "data": [3, 5]},
                {"name": "completion_tokens", "datatype": "INT32", "shape": [2], "data": [3, 3]},
            ],
        }
        wanted = Sampling(max_tokens=3, temperature=0.5, stop=("x",), stop_token_ids=(4, 5))
        assert fronts.engine.samplings == [wanted, wanted]
        # KServe's messages have no floating point parameters, so numbers may be text.
        request = grpc_request("abc", "defgh", max_tokens=3, temperature="0.5", stop='["x"]', stop_token_ids="[4, 5]")
        response = await fronts.stub.ModelInfer(request)
        assert (response.model_name, response.model_version, response.id) == ("tiny/one", "1", "7")
        found = {
            output.name: list(output.contents.bytes_contents or output.contents.int_contents)
            for output in response.outputs
        }
        assert found == {
            "text": [b"0 1 2 ", b"0 1 2 "],
            "finish_reason": [b"length", b"length"],
            "prompt_tokens": [3, 5],
            "completion_tokens": [3, 3],
        }
        assert fronts.engine.samplings[2:] == [wanted, wanted]

    run(check)


def test_messages_are_given_as_json_and_outputs_are_chosen() -> None:
    async def check(fronts: Fronts) -> None:
        chat = json.dumps([{"role": "user", "content": "hello"}])
        body = {
            "inputs": [{"name": "messages", "shape": [1, 1], "datatype": "BYTES", "data": [[chat]]}],
            "outputs": [{"name": "text"}],
            "parameters": {"max_tokens": "2", "ignore_eos": True},
        }
        answer = await fronts.http.post("/v2/models/tiny/one/versions/1/infer", json=body)
        assert [output["name"] for output in answer.json()["outputs"]] == ["text"]
        assert answer.json()["outputs"][0]["data"] == ["0 1 "]
        assert "id" not in answer.json()

    run(check)


def test_tensors_may_come_and_go_in_binary() -> None:
    async def check(fronts: Fronts) -> None:
        raw = b"".join(struct.pack("<I", len(text)) + text for text in (b"abc", "d\u00fc".encode()))
        request = pb.ModelInferRequest(model_name="tiny/one", raw_input_contents=[raw])
        request.inputs.add(name="text", datatype="BYTES", shape=[2])
        request.parameters["max_tokens"].int64_param = 1
        response = await fronts.stub.ModelInfer(request)
        assert list(response.raw_output_contents) == [
            struct.pack("<I", 2) + b"0 " + struct.pack("<I", 2) + b"0 ",
            struct.pack("<I", 6) + b"length" + struct.pack("<I", 6) + b"length",
            struct.pack("<2i", 3, 2),
            struct.pack("<2i", 1, 1),
        ]
        tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
        wanted = [{"name": "text", "parameters": {"binary_data": True}}, {"name": "prompt_tokens"}]
        head = json.dumps({"inputs": [tensor], "outputs": wanted, "parameters": {"max_tokens": 1}}).encode()
        headers = {LENGTH_HEADER: str(len(head))}
        answer = await fronts.http.post("/v2/models/tiny/one/infer", content=head + raw, headers=headers)
        end = int(answer.headers[LENGTH_HEADER])
        outputs = json.loads(answer.content[:end])["outputs"]
        assert outputs == [
            {"name": "text", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 12}},
            {"name": "prompt_tokens", "datatype": "INT32", "shape": [2], "data": [3, 2]},
        ]
        assert answer.content[end:] == struct.pack("<I", 2) + b"0 " + struct.pack("<I", 2) + b"0 "
        for broken in (raw[:-1], raw + b"x"):
            answer = await fronts.http.post("/v2/models/tiny/one/infer", content=head + broken, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"].startswith("inputs")
            request.raw_input_contents[0] = broken
            with pytest.raises(grpc.aio.AioRpcError, match="raw_input_contents: expected") as failure:
                await fronts.stub.ModelInfer(request)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(check)


@pytest.mark.parametrize(("change", "message"), REST_ERRORS)
def test_what_is_wrong_is_told_by_its_name(change: dict[str, Any], message: str) -> None:
    async def check(fronts: Fronts) -> None:
        body = ({} if change == {} else {"inputs": [text_input("abc")]}) | change
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(message)
        assert answer.json()["type"] == "InvalidRequestError"
        assert fronts.service.num_requests == 0

    run(check)


def test_errors_over_grpc_name_the_field_and_the_class() -> None:
    async def check(fronts: Fronts) -> None:
        for request, message in (
            (grpc_request("a", max_tokens=0), "parameters.max_tokens: expected at least 1"),
            (grpc_request("a", nothing=1), "parameters.nothing: expected one of"),
            (grpc_request(), "inputs.text.data: expected at least one element"),
            (grpc_request(""), "prompt: expected tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await fronts.stub.ModelInfer(request)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (failure.value.details() or "").startswith(message)
            assert ("oasiskv-error", "InvalidRequestError") in list(failure.value.trailing_metadata() or ())

    run(check)


def test_another_model_is_not_found() -> None:
    async def check(fronts: Fronts) -> None:
        for path in ("two", "two/ready", "tiny/one/versions/2", "tiny/one/versions/2/ready"):
            answer = await fronts.http.get(f"/v2/models/{path}")
            assert answer.status_code == 404, path
            assert answer.json()["error"].startswith("model_")
        answer = await fronts.http.post("/v2/models/two/infer", json={"inputs": [text_input("abc")]})
        assert answer.status_code == 404
        request = grpc_request("a")
        request.model_version = "2"
        for call in (
            fronts.stub.ModelInfer(request),
            fronts.stub.ModelReady(pb.ModelReadyRequest(name="two")),
            fronts.stub.ModelMetadata(pb.ModelMetadataRequest(name="two")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call
            assert failure.value.code() is grpc.StatusCode.NOT_FOUND

    run(check)


def test_health_and_metadata_say_the_same_in_both_fronts() -> None:
    async def check(fronts: Fronts) -> None:
        stub, http = fronts.stub, fronts.http
        for is_ready in (True, False):
            code = 200 if is_ready else 503
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await stub.ServerReady(pb.ServerReadyRequest())).ready is is_ready
            assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny/one"))).ready is is_ready
            assert (await http.get("/v2/health/live")).json() == {"live": True}
            for path in ("/v2/health/ready", "/v2/models/tiny/one/ready", "/v2/models/tiny/one/versions/1/ready"):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["ready"]) == (code, is_ready), path
            fronts.service.drain()
        server = (await http.get("/v2")).json()
        assert (server["name"], server["extensions"]) == ("oasiskv", ["binary_tensor_data"])
        metadata = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert (metadata.name, metadata.version) == (server["name"], server["version"])
        model = (await http.get("/v2/models/tiny/one")).json()
        assert [tensor["name"] for tensor in model["inputs"]] == ["text", "messages"]
        described = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny/one"))
        for ours, theirs in ((model["inputs"], described.inputs), (model["outputs"], described.outputs)):
            assert [(one.name, one.datatype, list(one.shape)) for one in theirs] == [
                (one["name"], one["datatype"], one["shape"]) for one in ours
            ]

    run(check)


def test_a_service_that_drains_or_is_full_refuses() -> None:
    async def check(fronts: Fronts) -> None:
        fronts.engine.may_go_on.clear()
        first = asyncio.create_task(fronts.http.post("/v2/models/tiny/one/infer", json={"inputs": [text_input("a")]}))
        async with asyncio.timeout(10):
            while not fronts.engine.num_requests:
                await asyncio.sleep(0.01)
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json={"inputs": [text_input("a")]})
        assert (answer.status_code, answer.json()["type"]) == (429, "PoolExhaustedError")
        fronts.service.drain()
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json={"inputs": [text_input("a")]})
        assert (answer.status_code, answer.json()["type"]) == (503, "PeerUnavailableError")
        fronts.engine.may_go_on.set()
        assert (await first).status_code == 200

    run(check, max_requests=1)


def test_a_client_that_goes_away_ends_its_requests() -> None:
    async def check(fronts: Fronts) -> None:
        fronts.engine.may_go_on.clear()

        async def until(number: int) -> None:
            async with asyncio.timeout(10):
                while fronts.engine.num_requests != number:
                    await asyncio.sleep(0.01)

        call = fronts.stub.ModelInfer(grpc_request("a", "b"))
        await until(2)
        call.cancel()
        await until(0)
        async with httpx.AsyncClient(base_url=fronts.url, timeout=20) as client:
            post = client.post("/v2/models/tiny/one/infer", json={"inputs": [text_input("a", "b", "c")]})
            task = asyncio.create_task(post)
            await until(3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(0)
        assert fronts.service.num_requests == 0
        assert fronts.engine.closed == 5

    run(check)


def test_one_element_that_fails_ends_the_others_and_an_overlong_request_times_out() -> None:
    async def check(fronts: Fronts) -> None:
        fronts.engine.may_go_on.clear()
        body = {"inputs": [text_input("a", "")]}
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json=body)
        assert (answer.status_code, fronts.service.num_requests) == (400, 0)
        answer = await fronts.http.post("/v2/models/tiny/one/infer", json={"inputs": [text_input("a")]})
        assert (answer.status_code, answer.json()["type"]) == (504, "TransferTimeoutError")
        assert fronts.service.num_requests == 0

    run(check, max_call_s=0.3)


KSERVE_CALLS = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

def asking(inputs, num_tokens):
    parameters = {"max_tokens": num_tokens}
    return InferRequest(model_name="tiny/one", infer_inputs=inputs, request_id="7", parameters=parameters)

async def main(url, address):
    found = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    rpc = InferenceGRPCClient(address)
    found["rest health"] = [await rest.is_server_live(url), await rest.is_server_ready(url),
                            await rest.is_model_ready(url, "tiny/one")]
    found["grpc health"] = [await rpc.is_server_live(), await rpc.is_server_ready(),
                            await rpc.is_model_ready("tiny/one")]
    plain = InferInput(name="text", shape=[2], datatype="BYTES", data=["abc", "de"])
    binary = InferInput(name="text", shape=[2], datatype="BYTES")
    binary.set_data_from_numpy(np.array(["abc", "de"], dtype=object), binary_data=True)
    for kind, tensor in (("plain", plain), ("binary", binary)):
        request = asking([tensor], 2)
        answer = await rest.infer(url, request, model_name="tiny/one")
        found[f"rest {kind}"] = [output.as_numpy().tolist() for output in answer.outputs]
    encoded = InferInput(name="text", shape=[2], datatype="BYTES", data=[b"abc", b"de"])
    for kind, tensor in (("plain", encoded), ("binary", binary)):
        request = asking([tensor], 2)
        answer = await rpc.infer(request)
        found[f"grpc {kind}"] = [output.as_numpy().tolist() for output in answer.outputs]
        found["id"] = answer.id
    try:
        await rest.infer(url, asking([plain], 0), model_name="tiny/one")
    except Exception as error:
        found["refused"] = str(error)
    await rest.close()
    await rpc.close()
    print(json.dumps(found, default=lambda value: value.decode()))

asyncio.run(main(*sys.argv[1:]))
"""


@needs_kserve
@pytest.mark.timeout(180)
def test_kserves_own_client_is_answered() -> None:
    async def check(fronts: Fronts) -> None:
        process = await asyncio.create_subprocess_exec(
            KSERVE, "-c", KSERVE_CALLS, fronts.url, fronts.grpc_address, stdout=subprocess.PIPE, env=clean_environment()
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        found = json.loads(output.splitlines()[-1])
        assert found["rest health"] == found["grpc health"] == [True, True, True]
        expected = [["0 1 ", "0 1 "], ["length", "length"], [3, 2], [2, 2]]
        for name in ("rest plain", "rest binary", "grpc plain", "grpc binary"):
            assert found[name] == expected, name
        assert found["id"] == "7"
        assert "parameters.max_tokens: expected at least 1" in found["refused"]

    run(check)


NUMBERS = """
import json
from kserve.protocol.grpc import grpc_predict_v2_pb2
from google.protobuf import descriptor_pb2
file = descriptor_pb2.FileDescriptorProto()
grpc_predict_v2_pb2.DESCRIPTOR.CopyToProto(file)
print(json.dumps(file.SerializeToString().hex()))
"""


@needs_kserve
@pytest.mark.timeout(180)
def test_names_numbers_and_types_are_those_of_the_protocol() -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    done = subprocess.run(
        [KSERVE, "-c", NUMBERS], stdout=subprocess.PIPE, text=True, check=True, env=clean_environment()
    )
    theirs = FileDescriptorProto.FromString(bytes.fromhex(json.loads(done.stdout.splitlines()[-1])))
    ours = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert ours.package == theirs.package
    mine, other = facts_of(ours), facts_of(theirs)
    # Loading and unloading models is an extension of the protocol.
    assert {fact for fact in other - mine if "Repository" not in fact[0] + fact[1]} == set()
    added = {fact[:3] for fact in mine - other}
    assert added == {("InferParameter", "double_param", 4), ("InferParameter", "uint64_param", 5)}


def facts_of(file: Any) -> set[tuple[Any, ...]]:
    """Return what peers must agree on: fields by message, and calls."""
    found: set[tuple[Any, ...]] = set()

    def walk(prefix: str, message: Any) -> None:
        name = f"{prefix}{message.name}"
        for field in message.field:
            found.add((name, field.name, field.number, field.type, field.label, field.type_name))
        for nested in message.nested_type:
            walk(f"{name}.", nested)

    for message in file.message_type:
        walk("", message)
    for service in file.service:
        found |= {(service.name, call.name, call.input_type, call.output_type) for call in service.method}
    return found


def clean_environment() -> dict[str, str]:
    """Return an environment in which another interpreter sees its own packages alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "PYTHONDONTWRITEBYTECODE": "1"
    }
