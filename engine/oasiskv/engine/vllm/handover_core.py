"""Stands between vLLM's front end and its engine's process: has long prompts computed elsewhere before requests begin.

The front end knows one request from beginning to end, so that text, stops and usage come out as always. The engine gets
the request later, with its first token and the lease of its KV; if that KV is lost, it gets all tokens anew.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from oasiskv.core.generation import Begun, Handover, Logprob, Sampling

logger = logging.getLogger(__name__)

FRONT_END_FIELDS = frozenset(
    {
        "detokenize",
        "output_kind",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "output_text_buffer_length",
        "flat_logprobs",
        "skip_clone",
        "stream_interval",
    }
)
"""What only vLLM's front end looks at, or its engine only in ways that do not depend on where a request began."""

SENT_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
    }
)
"""What a prefill service is told."""

MAX_LOGPROBS = 20
SEED_STEP = 0x9E3779B97F4A7C15


class Prefiller(Protocol):
    """Who has prompts computed."""

    async def begin(self, ids: Sequence[int], sampling: Sampling) -> Begun | None:
        """Have a prompt computed; None if nobody can, so that it is computed here."""

    def end(self, lease: str) -> None:
        """Give the KV of a request up."""

    def recompute(self) -> None:
        """Note that a request whose KV was lost is computed here."""


@dataclass(slots=True)
class _Request:
    """One that began with a handover."""

    request: EngineCoreRequest
    """As the front end sent it."""
    lease: str
    tokens: list[int] = field(default_factory=list)


class HandoverCore:
    """Takes the place of vLLM's client of its engine's process, and passes on all that is not said here.

    Args:
        core: vLLM's client.
        prefiller: Has prompts computed.
        is_long: Whether a prompt of so many tokens is worth it.
    """

    def __init__(self, core: Any, prefiller: Prefiller, is_long: Callable[[int], bool]) -> None:
        self._core = core
        self._prefiller = prefiller
        self._is_long = is_long
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, _Request] = {}
        self._made: list[EngineCoreOutput] = []
        self._has_made = asyncio.Event()
        self._pending: asyncio.Future[EngineCoreOutputs] | None = None

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self._core, name)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Begin a request: elsewhere if it can, else in the engine at once."""
        request = without_handover(request)
        if not is_plain(request) or not self._is_long(len(request.prompt_token_ids or ())):
            await self._core.add_request_async(request)
            return
        task = asyncio.create_task(self._begin(request))
        self._beginning[request.request_id] = task
        task.add_done_callback(lambda _: self._beginning.pop(request.request_id, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests, wherever they are."""
        for request_id in request_ids:
            if (task := self._beginning.get(request_id)) is not None:
                task.cancel()
            self._end(request_id)
        await self._core.abort_requests_async(request_ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return what the engine made since the last call, and first tokens that were made elsewhere."""
        while True:
            if self._pending is None:
                self._pending = asyncio.ensure_future(self._core.get_output_async())
            if not self._made and not self._pending.done():
                made = asyncio.ensure_future(self._has_made.wait())
                try:
                    await asyncio.wait({self._pending, made}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    made.cancel()
            first, self._made = self._made, []
            self._has_made.clear()
            if self._pending.done():
                outputs, self._pending = self._pending.result(), None
                # A first token was made before the engine was given its request.
                outputs.outputs = first + [output for output in outputs.outputs if self._keeps(output)]
                return outputs
            if first:
                return EngineCoreOutputs(outputs=first)

    async def _begin(self, request: EngineCoreRequest) -> None:
        try:
            params = request.sampling_params
            assert params is not None
            begun = await self._prefiller.begin(request.prompt_token_ids or (), sampling_of(params))
            if begun is None:
                await self._core.add_request_async(request)
                return
            first = begun.first
            self._make(first_output(request.request_id, first, has_logprobs=params.logprobs is not None))
            if first.finish_reason is None:
                self._begun[request.request_id] = _Request(request, begun.lease, [first.first_token_id])
                await self._core.add_request_async(going_on(request, [first.first_token_id], begun.lease))
        except Exception:
            # The front end must not wait for ever.
            logger.exception("a request could not begin")
            self._make(
                EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            )

    def _keeps(self, output: EngineCoreOutput) -> bool:
        """Take note of what the engine made of a request; False if the front end must not see it."""
        begun = self._begun.get(output.request_id)
        if begun is None:
            return True
        if output.finish_reason == FinishReason.ERROR:
            self._end(output.request_id)
            self._prefiller.recompute()
            logger.warning("a request lost its KV after %d tokens; its prompt is computed here", len(begun.tokens))
            again = asyncio.create_task(self._core.add_request_async(going_on(begun.request, begun.tokens, None)))
            self._beginning[output.request_id] = again
            again.add_done_callback(lambda _: self._beginning.pop(output.request_id, None))
            return False
        begun.tokens += output.new_token_ids
        if output.finish_reason is not None:
            self._end(output.request_id)
        return True

    def _end(self, request_id: str) -> None:
        if (begun := self._begun.pop(request_id, None)) is not None:
            self._prefiller.end(begun.lease)

    def _make(self, output: EngineCoreOutput) -> None:
        self._made.append(output)
        self._has_made.set()


def without_handover(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request without what a client says of handovers: whose KV it reads is not for a client to say."""
    params = request.sampling_params
    given = None if params is None else (params.extra_args or {}).get("kv_transfer_params")
    if params is None or not isinstance(given, Mapping) or not any(str(name).startswith("oasiskv_") for name in given):
        return request
    logger.warning("kv_transfer_params: expected none of OasisKV's own from a client, left out those of a request")
    params = params.clone()
    rest = {name: value for name, value in (params.extra_args or {}).items() if name != "kv_transfer_params"}
    params.extra_args = rest or None
    return msgspec.structs.replace(request, sampling_params=params)


def is_plain(request: EngineCoreRequest) -> bool:
    """Say whether a request's first token can be made elsewhere: it is text, and every setting can be told."""
    params = request.sampling_params
    if params is None or not request.prompt_token_ids or request.resumable:
        return False
    if request.mm_features or request.lora_request is not None or request.prompt_embeds is not None:
        return False
    # What vLLM's front end resolves: False, or None, where no watermark is configured.
    default = SamplingParams(watermarking=None if params.watermarking is None else False)
    odd = [
        name
        for name in type(params).__struct_fields__
        if not name.startswith("_")
        and name not in FRONT_END_FIELDS | SENT_FIELDS
        and getattr(params, name) != getattr(default, name)
    ]
    return not odd and (params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS)


def sampling_of(params: SamplingParams) -> Sampling:
    """Return how to sample the first token, for another engine of the same model."""
    values = {name: getattr(params, name) for name in SENT_FIELDS}
    values["top_k"] = max(0, values["top_k"])
    values["stop_token_ids"] = tuple(values["stop_token_ids"] or ())
    return Sampling(**values)


def going_on(request: EngineCoreRequest, tokens: Sequence[int], lease: str | None) -> EngineCoreRequest:
    """Return the request as the engine gets it after tokens that were made before.

    Args:
        request: As the front end sent it.
        tokens: Made so far; the last one's K and V are to be computed.
        lease: What the KV of all tokens before the last is read under; None to compute everything.
    """
    assert request.sampling_params is not None
    params = request.sampling_params.clone()
    params.max_tokens = None if params.max_tokens is None else params.max_tokens - len(tokens)
    if params.seed is not None:
        # The same seed would draw for these tokens what it drew for the first ones.
        params.seed = (params.seed + len(tokens) * SEED_STEP) % 2**63
    if lease is not None:
        params.extra_args = {"kv_transfer_params": {"oasiskv_lease": lease}}
    ids = [*(request.prompt_token_ids or ()), *tokens]
    return msgspec.structs.replace(request, prompt_token_ids=ids, sampling_params=params)


def first_output(request_id: str, first: Handover, *, has_logprobs: bool) -> EngineCoreOutput:
    """Return a first token as if the engine had made it."""
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=[first.first_token_id],
        new_logprobs=_logprobs(first.first_logprobs) if has_logprobs and first.first_logprobs else None,
        finish_reason=None if first.finish_reason is None else reasons[first.finish_reason],
    )


def _logprobs(entries: Sequence[Logprob]) -> LogprobsLists:
    return LogprobsLists(
        np.array([[entry.token_id for entry in entries]], np.int64),
        np.array([[entry.logprob for entry in entries]], np.float32),
        np.array([entries[0].rank], np.int64),
    )
