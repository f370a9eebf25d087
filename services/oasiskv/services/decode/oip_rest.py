"""The Open Inference Protocol over HTTP: routes beside those of vLLM; decides nothing."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oasiskv.core import errors
from oasiskv.core.errors import InvalidRequestError, OasisError
from oasiskv.services.decode import oip
from oasiskv.services.decode.oip import ModelNotServedError, Oip, Tensor

LENGTH_HEADER = "Inference-Header-Content-Length"
"""Bytes of the JSON before the binary tensors."""

CODES: dict[type[OasisError], int] = {
    errors.InvalidRequestError: 400,
    errors.UnsupportedError: 400,
    errors.PoolExhaustedError: 429,
    errors.RequestAbortedError: 499,
    errors.PeerUnavailableError: 503,
    errors.TransferTimeoutError: 504,
}
"""HTTP status of an error; 500 for the others."""

Endpoint = Callable[[Request], Awaitable[Response]]


def router(front: Oip) -> APIRouter:
    """Return the routes below `/v2`."""
    routes = APIRouter()
    rest = _Rest(front)
    for path, endpoint in (
        ("/v2", rest.server),
        ("/v2/health/live", rest.live),
        ("/v2/health/ready", rest.ready),
        ("/v2/models/{model:path}/versions/{version}/ready", rest.model_ready),
        ("/v2/models/{model:path}/ready", rest.model_ready),
        ("/v2/models/{model:path}/versions/{version}", rest.model),
        ("/v2/models/{model:path}", rest.model),
    ):
        routes.add_route(path, _told(endpoint), methods=["GET"])
    for path in ("/v2/models/{model:path}/versions/{version}/infer", "/v2/models/{model:path}/infer"):
        routes.add_route(path, _told(rest.infer), methods=["POST"])
    return routes


class _Rest:
    def __init__(self, front: Oip) -> None:
        self._front = front

    async def server(self, request: Request) -> Response:
        return JSONResponse(
            {"name": oip.SERVER_NAME, "version": oip.server_version(), "extensions": list(oip.EXTENSIONS)}
        )

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": self._front.is_live}, 200 if self._front.is_live else 503)

    async def ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self._front.is_ready}, 200 if self._front.is_ready else 503)

    async def model_ready(self, request: Request) -> Response:
        name = self._check_model(request)
        return JSONResponse({"name": name, "ready": self._front.is_ready}, 200 if self._front.is_ready else 503)

    async def model(self, request: Request) -> Response:
        return JSONResponse(
            {
                "name": self._check_model(request),
                "versions": [oip.VERSION],
                "platform": oip.PLATFORM,
                "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in oip.INPUTS],
                "outputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in oip.OUTPUTS.items()],
            }
        )

    async def infer(self, request: Request) -> Response:
        name = self._check_model(request)
        body, binary = _body(await request.body(), request.headers.get(LENGTH_HEADER))
        parameters = _object("parameters", body.get("parameters", {}))
        is_binary = parameters.pop("binary_data_output", False)
        inputs = _tensors(_list("inputs", body.get("inputs", [])), binary)
        wanted = {str(one.get("name")): one for one in _list("outputs", body.get("outputs", []))}
        completions = await _unless_gone(request, self._front.infer(inputs, parameters, list(wanted)))
        outputs, tail = [], b""
        for column, elements in oip.columns(completions, list(wanted)).items():
            output: dict[str, Any] = {"name": column, "datatype": oip.OUTPUTS[column], "shape": [len(elements)]}
            asked = _object("outputs.parameters", wanted.get(column, {}).get("parameters", {}))
            if asked.get("binary_data", is_binary):
                packed = oip.pack(elements)
                output["parameters"] = {"binary_data_size": len(packed)}
                tail += packed
            else:
                output["data"] = [one.decode() if isinstance(one, bytes) else one for one in elements]
            outputs.append(output)
        answer: dict[str, Any] = {"model_name": name, "model_version": oip.VERSION, "outputs": outputs}
        if "id" in body:
            answer["id"] = body["id"]
        if not tail:
            return JSONResponse(answer)
        head = json.dumps(answer).encode()
        return Response(head + tail, media_type="application/octet-stream", headers={LENGTH_HEADER: str(len(head))})

    def _check_model(self, request: Request) -> str:
        name: str = request.path_params["model"]
        self._front.check_model(name, request.path_params.get("version", ""))
        return name


def _told(endpoint: Endpoint) -> Endpoint:
    """Tell errors as the protocol does, with their class beside."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TimeoutError:
            message = "request: expected an end within the limit of the service, got none"
            return JSONResponse({"error": message, "type": errors.TransferTimeoutError.__name__}, 504)
        except OasisError as error:
            return JSONResponse({"error": str(error), "type": type(error).__name__}, CODES.get(type(error), 500))
        except ModelNotServedError as error:
            return JSONResponse({"error": str(error), "type": InvalidRequestError.__name__}, 404)

    return answer


async def _unless_gone(request: Request, work: Any) -> Any:
    """Carry work out, and cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise errors.RequestAbortedError("request: its client went away")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes, length: str | None) -> tuple[dict[str, Any], bytes]:
    """Return the JSON and what comes after it."""
    if length is not None and not (length.isdecimal() and int(length) <= len(data)):
        raise InvalidRequestError(f"{LENGTH_HEADER}: expected at most {len(data)}, got {length!r}")
    end = len(data) if length is None else int(length)
    try:
        return _object("body", json.loads(data[:end])), data[end:]
    except ValueError as cause:
        raise InvalidRequestError(f"body: expected JSON, got {cause}") from cause


def _tensors(inputs: list[dict[str, Any]], binary: bytes) -> list[Tensor]:
    tensors, start = [], 0
    for one in inputs:
        name, where = str(one.get("name")), f"inputs.{one.get('name')}"
        size = _object(f"{where}.parameters", one.get("parameters", {})).get("binary_data_size")
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(binary) - start:
                raise InvalidRequestError(
                    f"{where}.parameters.binary_data_size: expected at most {len(binary) - start}, got {size!r}"
                )
            elements = oip.unpack(f"{where}.data", binary[start : start + size])
            start += size
        else:
            elements = _elements(where, one.get("data", []))
        shape = one.get("shape")
        if not isinstance(shape, list):
            raise InvalidRequestError(f"{where}.shape: expected a list, got {shape!r}")
        tensors.append(Tensor(name=name, datatype=str(one.get("datatype")), shape=shape, elements=elements))
    if start != len(binary):
        raise InvalidRequestError(f"inputs: expected {start} bytes after the JSON, got {len(binary)}")
    return tensors


def _elements(where: str, data: object) -> list[bytes]:
    """Return texts, given as a list or as a list of rows."""
    if not isinstance(data, list):
        raise InvalidRequestError(f"{where}.data: expected a list, got {data!r}")
    flat = [one for row in data for one in (row if isinstance(row, list) else [row])]
    for one in flat:
        if not isinstance(one, str):
            raise InvalidRequestError(f"{where}.data: expected texts, got {one!r}")
    return [one.encode("utf-8", "surrogatepass") for one in flat]


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where}: expected an object, got {value!r}")
    return dict(value)


def _list(where: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{where}: expected a list, got {value!r}")
    return [_object(where, one) for one in value]
