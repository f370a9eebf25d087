"""What vLLM's front end is shown of requests that begin elsewhere; the engine only notes what it was sent."""

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from oasiskv.core.errors import InvalidRequestError
from oasiskv.core.generation import Begun, Handover, Logprob, Sampling

pytest.importorskip("vllm", reason="the front end that is stood in for is vLLM's")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

    from oasiskv.engine.vllm.connector import Handed, handover_of
    from oasiskv.engine.vllm.handover_core import HandoverCore, is_plain, sampling_of

LONG = 100


class FakeCore:
    """vLLM's client of the engine's process."""

    def __init__(self) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.engine_name = "core"

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.outputs.get()

    def make(self, request_id: str, tokens: Sequence[int], reason: FinishReason | None = None) -> None:
        output = EngineCoreOutput(request_id=request_id, new_token_ids=list(tokens), finish_reason=reason)
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[output]))


class FakePrefiller:
    """Answers with what the test wants, when it wants."""

    def __init__(self) -> None:
        self.answer: Begun | None = Begun(first=Handover(first_token_id=7, handle="h"), lease="lease")
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[tuple[list[int], Sampling]] = []
        self.ended: list[str] = []
        self.num_recomputed = 0
        self.was_cancelled = False
        self.error: Exception | None = None

    async def begin(self, ids: Sequence[int], sampling: Sampling) -> Begun | None:
        self.asked.append((list(ids), sampling))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return self.answer

    def end(self, lease: str) -> None:
        self.ended.append(lease)

    def recompute(self) -> None:
        self.num_recomputed += 1


def request(request_id: str = "a", num_tokens: int = LONG, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        mm_features=None,
        sampling_params=SamplingParams(**{"max_tokens": 10} | params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


Test = Callable[[HandoverCore, FakeCore, FakePrefiller], Coroutine[Any, Any, None]]


def run(test: Test) -> None:
    async def within() -> None:
        core, prefiller = FakeCore(), FakePrefiller()
        async with asyncio.timeout(10):
            await test(HandoverCore(core, prefiller, lambda num_tokens: num_tokens >= LONG), core, prefiller)

    asyncio.run(within())


async def next_outputs(client: HandoverCore) -> list[tuple[str, list[int], FinishReason | None]]:
    outputs = await client.get_output_async()
    return [(output.request_id, output.new_token_ids, output.finish_reason) for output in outputs.outputs]


def test_a_long_prompt_begins_elsewhere_and_goes_on_in_the_engine() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        sent = request()
        await client.add_request_async(sent)
        assert await next_outputs(client) == [("a", [7], None)]
        await asyncio.sleep(0)
        (going_on,) = core.added
        assert prefiller.asked[0][0] == list(range(LONG))
        assert going_on.prompt_token_ids == [*range(LONG), 7]
        assert going_on.sampling_params is not None
        assert going_on.sampling_params.max_tokens == 9
        assert going_on.sampling_params.extra_args == {"kv_transfer_params": {"oasiskv_lease": "lease"}}
        assert sent.sampling_params is not None
        assert (sent.sampling_params.max_tokens, sent.sampling_params.extra_args) == (10, None)
        core.make("a", [8])
        assert await next_outputs(client) == [("a", [8], None)]
        assert prefiller.ended == []
        core.make("a", [9], FinishReason.LENGTH)
        assert await next_outputs(client) == [("a", [9], FinishReason.LENGTH)]
        assert prefiller.ended == ["lease"]

    run(check)


def test_short_prompts_and_settings_that_look_back_go_to_the_engine_as_they_are() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        sent = [request("a", LONG - 1), request("b", min_tokens=2), request("c", prompt_logprobs=1)]
        for one in sent:
            await client.add_request_async(one)
        assert core.added == sent
        assert prefiller.asked == []
        core.make("a", [1], FinishReason.ERROR)
        assert await next_outputs(client) == [("a", [1], FinishReason.ERROR)]

    run(check)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "repetition_penalty": 1.2}, True),
        ({"logprobs": 5, "ignore_eos": True, "stop": ["x"], "stop_token_ids": [1]}, True),
        ({"watermarking": False, "stream_interval": 2}, True),
        ({"watermarking": True}, False),
        ({"logprobs": 21}, False),
        ({"logprobs": -1}, False),
        ({"n": 2}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"bad_words": ["x"]}, False),
        ({"extra_args": {"x": 1}}, False),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, False),
    ],
)
def test_only_settings_that_can_be_told_and_do_not_look_back_begin_elsewhere(
    params: dict[str, Any], expected: bool
) -> None:
    assert is_plain(request(**params)) == expected


def test_the_settings_arrive_as_they_were_given() -> None:
    params: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "logprobs": 2}
    params["repetition_penalty"] = 1.25
    sampling = sampling_of(SamplingParams(**params, stop_token_ids=[4], ignore_eos=True, max_tokens=3))
    assert sampling == Sampling(**params, stop_token_ids=(4,), ignore_eos=True, max_tokens=3)
    assert sampling_of(SamplingParams(top_k=-1)).top_k == 0


def test_a_prompt_that_nobody_computes_is_computed_here() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        prefiller.answer = None
        sent = request()
        await client.add_request_async(sent)
        while not core.added:
            await asyncio.sleep(0)
        assert core.added == [sent]
        core.make("a", [1], FinishReason.STOP)
        assert await next_outputs(client) == [("a", [1], FinishReason.STOP)]
        assert prefiller.ended == []

    run(check)


def test_a_first_token_that_is_the_last_never_reaches_the_engine() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        prefiller.answer = Begun(first=Handover(first_token_id=7, finish_reason="stop"))
        await client.add_request_async(request())
        assert await next_outputs(client) == [("a", [7], FinishReason.STOP)]
        assert core.added == []

    run(check)


def test_log_probabilities_of_the_first_token_come_with_it_where_asked_for() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        entries = [Logprob(token_id=7, logprob=-1.5, rank=2), Logprob(token_id=3, logprob=-0.5, rank=1)]
        prefiller.answer = Begun(first=Handover(first_token_id=7, first_logprobs=entries, handle="h"), lease="l")
        await client.add_request_async(request(logprobs=1))
        (output,) = (await client.get_output_async()).outputs
        assert output.new_logprobs is not None
        assert output.new_logprobs.logprob_token_ids.tolist() == [[7, 3]]
        assert output.new_logprobs.logprobs.tolist() == [[-1.5, -0.5]]
        assert output.new_logprobs.sampled_token_ranks.tolist() == [2]

    run(check)


def test_a_request_that_lost_its_kv_is_computed_here_and_its_answer_goes_on() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        await client.add_request_async(request(seed=5))
        assert await next_outputs(client) == [("a", [7], None)]
        core.make("a", [8])
        assert await next_outputs(client) == [("a", [8], None)]
        core.make("a", [], FinishReason.ERROR)
        assert await next_outputs(client) == []
        assert prefiller.ended == ["lease"]
        assert prefiller.num_recomputed == 1
        await asyncio.sleep(0)
        again = core.added[1]
        assert again.prompt_token_ids == [*range(LONG), 7, 8]
        assert again.sampling_params is not None
        assert again.sampling_params.max_tokens == 8
        assert again.sampling_params.extra_args is None
        assert core.added[0].sampling_params is not None
        seeds = {5, core.added[0].sampling_params.seed, again.sampling_params.seed}
        assert len(seeds) == 3
        core.make("a", [9], FinishReason.LENGTH)
        assert await next_outputs(client) == [("a", [9], FinishReason.LENGTH)]
        core.make("a", [], FinishReason.ERROR)
        assert await next_outputs(client) == [("a", [], FinishReason.ERROR)]

    run(check)


def test_a_request_that_is_aborted_while_its_prompt_is_computed_ends_there() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        prefiller.may_answer.clear()
        await client.add_request_async(request())
        await asyncio.sleep(0)
        await client.abort_requests_async(["a"])
        await asyncio.sleep(0)
        assert prefiller.was_cancelled
        assert core.added == []
        assert core.aborted == ["a"]

    run(check)


def test_a_request_that_is_aborted_later_gives_its_kv_up_once() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        await client.add_request_async(request())
        await next_outputs(client)
        await asyncio.sleep(0)
        await client.abort_requests_async(["a"])
        core.make("a", [], FinishReason.ABORT)
        await next_outputs(client)
        assert prefiller.ended == ["lease"]

    run(check)


def test_a_prefiller_that_breaks_ends_its_request_alone() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        prefiller.error = InvalidRequestError("x: y")
        await client.add_request_async(request())
        assert await next_outputs(client) == [("a", [], FinishReason.ERROR)]
        core.make("b", [1])
        assert await next_outputs(client) == [("b", [1], None)]

    run(check)


def test_first_tokens_come_before_what_the_engine_makes_of_their_requests() -> None:
    async def check(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        core.make("other", [1])
        await client.add_request_async(request())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        core.make("a", [8])
        seen: list[tuple[str, list[int], Any]] = []
        while len(seen) < 3:
            seen += await next_outputs(client)
        assert [tokens for name, tokens, _ in seen if name == "a"] == [[7], [8]]
        assert client.engine_name == "core"

    run(check)


@pytest.mark.parametrize("given", [{"oasiskv_lease": "of somebody else"}, {"oasiskv_stage": "a", "other": 1}])
def test_what_a_client_says_of_handovers_is_left_out(given: dict[str, Any]) -> None:
    async def short(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        extra = {"kv_transfer_params": given, "mine": 3}
        await client.add_request_async(request(num_tokens=5, extra_args=extra))
        [added] = core.added
        assert added.sampling_params is not None
        assert added.sampling_params.extra_args == {"mine": 3}

    async def long(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        await client.add_request_async(request(extra_args={"kv_transfer_params": given}))
        assert await next_outputs(client) == [("a", [7], None)]
        await asyncio.sleep(0)
        [added] = core.added
        assert added.sampling_params is not None
        assert added.sampling_params.extra_args == {"kv_transfer_params": {"oasiskv_lease": "lease"}}

    run(short)
    run(long)


def test_what_is_meant_for_others_stays() -> None:
    async def test(client: HandoverCore, core: FakeCore, prefiller: FakePrefiller) -> None:
        for extra in ({"kv_transfer_params": {"do_remote_prefill": False}}, {"kv_transfer_params": "text"}):
            await client.add_request_async(request(num_tokens=5, extra_args=extra))
            assert core.added[-1].sampling_params is not None
            assert core.added[-1].sampling_params.extra_args == extra

    run(test)


@pytest.mark.parametrize(
    "given", [{"oasiskv_lease": 3}, {"oasiskv_stage": ["x"]}, {"oasiskv_prefix": 1}, {"other": "x"}, {}]
)
def test_what_is_not_usable_of_a_handover_is_not_used(given: Any) -> None:
    assert handover_of(given, 100, 16) == Handed()
