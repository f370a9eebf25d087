"""The Open Inference Protocol over decode: tensors of text in and out; `oip_rest` and `oip_grpc` speak it."""

import asyncio
import importlib.metadata
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from oasiskv.core.errors import InvalidRequestError, PeerUnavailableError
from oasiskv.core.generation import Sampling
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.generation import Prompt

SERVER_NAME = "oasiskv"
VERSION = "1"
"""Of the model; there is no other."""
PLATFORM = "oasiskv_vllm"
EXTENSIONS = ("binary_tensor_data",)

INPUTS = {"text": "a prompt", "messages": "a JSON list of messages, each with role and content"}
"""BYTES, one element for each request; exactly one of them is given."""

OUTPUTS = {"text": "BYTES", "finish_reason": "BYTES", "prompt_tokens": "INT32", "completion_tokens": "INT32"}
"""In the order in which they are answered; one element for each request."""

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One input as it came."""

    name: str
    datatype: str
    shape: Sequence[int]
    elements: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came of one prompt; the fields are those of `OUTPUTS`."""

    text: bytes
    finish_reason: bytes
    prompt_tokens: int
    completion_tokens: int


class ModelNotServedError(LookupError):
    """Another model than the one here was asked for; both fronts tell it as an `InvalidRequestError` and NOT_FOUND."""


class Oip:
    """What both fronts ask.

    Args:
        service: Generates.
        model_name: What requests call the model.
        max_call_s: Longest time of a request.
    """

    def __init__(self, service: DecodeService, model_name: str, max_call_s: float) -> None:
        self._service = service
        self._max_call_s = max_call_s
        self.model_name = model_name
        """What requests call the model."""

    @property
    def is_live(self) -> bool:
        """Whether the engine runs."""
        return self._service.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and can be served."""
        return self._service.is_ready

    def check_model(self, name: str, version: str) -> None:
        """Refuse another model than that which is served.

        Raises:
            ModelNotServedError: It is another one.
        """
        if name != self.model_name:
            raise ModelNotServedError(f"model_name: expected {self.model_name!r}, got {name!r}")
        if version not in ("", VERSION):
            raise ModelNotServedError(f"model_version: expected {VERSION!r}, got {version!r}")

    async def infer(
        self, inputs: Sequence[Tensor], parameters: Mapping[str, Scalar], wanted: Sequence[str]
    ) -> list[Completion]:
        """Generate for every element of the input; leaving early ends all of it.

        Raises:
            OasisError: As decode.v1; where one element fails, the others are ended.
        """
        for name in wanted:
            if name not in OUTPUTS:
                raise InvalidRequestError(f"outputs: expected some of {', '.join(OUTPUTS)}, got {name!r}")
        prompts, sampling = prompts_of(inputs), sampling_of(parameters)
        tasks = [asyncio.create_task(self._complete(prompt, sampling)) for prompt in prompts]
        try:
            async with asyncio.timeout(self._max_call_s):
                return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        answer = await self._service.begin("", prompt, sampling)
        text, num_tokens, reason = [], 0, ""
        generated = answer.generated
        try:
            async for piece in generated:
                text.append(piece.text)
                num_tokens += len(piece.token_ids)
                reason = piece.finish_reason or ""
        finally:
            await generated.aclose()  # type: ignore[attr-defined]
        if not reason:
            raise PeerUnavailableError("engine: expected a last token, got none")
        return Completion(
            text="".join(text).encode(),
            finish_reason=reason.encode(),
            prompt_tokens=len(answer.ids),
            completion_tokens=num_tokens,
        )


def server_version() -> str:
    """Return the version of this package."""
    try:
        return importlib.metadata.version("oasiskv")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def prompts_of(inputs: Sequence[Tensor]) -> list[Prompt]:
    """Return the prompts in the inputs of a request.

    Raises:
        InvalidRequestError: There are none, or they are not as `INPUTS` says.
    """
    if len(inputs) != 1 or inputs[0].name not in INPUTS:
        names = [tensor.name for tensor in inputs]
        raise InvalidRequestError(f"inputs: expected one of {', '.join(INPUTS)}, got {names}")
    tensor = inputs[0]
    where = f"inputs.{tensor.name}"
    if tensor.datatype != "BYTES":
        raise InvalidRequestError(f"{where}.datatype: expected BYTES, got {tensor.datatype!r}")
    num_elements = len(tensor.elements)
    if list(tensor.shape) not in ([num_elements], [num_elements, 1]):
        raise InvalidRequestError(
            f"{where}.shape: expected [{num_elements}] or [{num_elements}, 1] for {num_elements} elements, "
            f"got {list(tensor.shape)}"
        )
    if not num_elements:
        raise InvalidRequestError(f"{where}.data: expected at least one element, got none")
    try:
        texts = [element.decode() for element in tensor.elements]
    except UnicodeDecodeError as cause:
        raise InvalidRequestError(f"{where}.data: expected UTF-8, got {cause}") from cause
    return [text if tensor.name == "text" else _messages(where, text) for text in texts]


def _messages(where: str, text: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(text)
    except ValueError as cause:
        raise InvalidRequestError(f"{where}.data: expected JSON, got {cause}") from cause
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(f"{where}.data: expected a JSON list of messages, got {text[:80]!r}")
    for message in messages:
        is_right = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_right:
            raise InvalidRequestError(f"{where}.data: expected messages with role and content, got {message!r}")
    return messages


def sampling_of(parameters: Mapping[str, Scalar]) -> Sampling:
    """Return how to sample; numbers may be given as text.

    Raises:
        InvalidRequestError: A parameter is unknown, or a value is wrong.
    """
    defaults = {field.name: field.default for field in fields(Sampling) if field.name != "logprobs"}
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in defaults:
            raise InvalidRequestError(f"parameters.{name}: expected one of {', '.join(defaults)}")
        values[name] = _value(name, defaults[name], value)
    try:
        return Sampling(**values)
    except InvalidRequestError as cause:
        raise InvalidRequestError(f"parameters.{cause}") from cause


def _value(name: str, default: object, value: Scalar) -> Any:
    """Return a parameter as its field has it, whose default says its type."""
    where = f"parameters.{name}"
    if isinstance(default, bool):
        found = {"true": True, "false": False}.get(str(value).lower())
        if found is None:
            raise InvalidRequestError(f"{where}: expected true or false, got {value!r}")
        return found
    if isinstance(default, tuple):
        return _list(where, value, int if name.endswith("_ids") else str)
    number = float if isinstance(default, float) else int
    try:
        if isinstance(value, bool) or (number is int and float(value) != int(float(value))):
            raise ValueError
        return number(value)
    except (ValueError, OverflowError) as cause:
        expected = "a number" if number is float else "an integer"
        raise InvalidRequestError(f"{where}: expected {expected}, got {value!r}") from cause


def _list(where: str, value: Scalar, kind: type) -> tuple[Any, ...]:
    """Return a list that came as one text, or as JSON."""
    found: Any = value
    if isinstance(value, str) and value.startswith("["):
        try:
            found = json.loads(value)
        except ValueError as cause:
            raise InvalidRequestError(f"{where}: expected a JSON list, got {cause}") from cause
    items = found if isinstance(found, list) else [found]
    if not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise InvalidRequestError(f"{where}: expected {kind.__name__} or a JSON list of them, got {value!r}")
    return tuple(items)


def unpack(where: str, data: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor in the binary form: each after its length.

    Raises:
        InvalidRequestError: The lengths do not add up.
    """
    elements, start = [], 0
    while start < len(data):
        if start + 4 > len(data):
            raise InvalidRequestError(f"{where}: expected a length of 4 bytes, got {len(data) - start}")
        (length,) = struct.unpack_from("<I", data, start)
        start += 4
        if start + length > len(data):
            raise InvalidRequestError(f"{where}: expected {length} bytes more, got {len(data) - start}")
        elements.append(data[start : start + length])
        start += length
    return elements


def pack(elements: Sequence[Any]) -> bytes:
    """Return the binary form of the elements of an output: text after its length, or integers of 32 bits."""
    if elements and isinstance(elements[0], bytes):
        return b"".join(struct.pack("<I", len(one)) + one for one in elements)
    return struct.pack(f"<{len(elements)}i", *elements)


def columns(completions: Sequence[Completion], wanted: Sequence[str]) -> dict[str, list[Any]]:
    """Return the elements of each output that is wanted, or of all."""
    return {name: [getattr(one, name) for one in completions] for name in wanted or OUTPUTS}
