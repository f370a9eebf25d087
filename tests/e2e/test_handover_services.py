"""Router, servicers and clients of prefill and decode over real gRPC and a real staging service, without engines."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from oasiskv.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    PeerUnavailableError,
    PoolExhaustedError,
    RequestAbortedError,
)
from oasiskv.core.generation import Logprob, Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2 as pb
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.decode.servicer import DecodeServicer
from oasiskv.services.generation import sampling_message, sampling_of
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.rpc.status import error_of
from oasiskv.services.testing_handover import ENGINE, FINGERPRINT, FakeEngine, World, run_world

PROMPT = list(range(100))
GREEDY = Sampling(temperature=0)


def test_a_prompt_begins_at_a_prefill_service_and_its_lease_is_held_until_the_end(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        sampling = Sampling(temperature=0.5, seed=3, logprobs=0, max_tokens=9, stop_token_ids=(4, 5))
        begun = await world.router.begin(PROMPT, sampling)
        assert begun is not None
        assert world.prefills[0].asked == [(PROMPT, sampling)]
        assert (begun.first.first_token_id, begun.first.finish_reason) == (7, None)
        assert begun.first.first_logprobs == [Logprob(token_id=7, logprob=-0.5, rank=1)]
        assert (world.router.num_leases, world.router.num_handovers) == (1, 1)
        assert await world.num_held() == 1
        world.router.end(begun.lease)
        world.router.end(begun.lease)
        assert world.router.num_leases == 0
        await world.until_nothing_is_held()

    run_world(tmp_path, check)


def test_a_first_token_that_ends_the_request_leaves_no_lease(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        world.prefills[0].changes = {"finish_reason": "stop"}
        begun = await world.router.begin(PROMPT, GREEDY)
        assert begun is not None
        assert (begun.first.finish_reason, begun.lease) == ("stop", "")
        assert world.router.num_handovers == 0

    run_world(tmp_path, check)


@pytest.mark.parametrize(
    "change",
    [{"budget_blocks": 5}, {"summary": "mid"}, {"summary_dtype": "fp8"}, {"num_tokens": 99}, {"num_blocks": 3}],
)
def test_a_handover_that_does_not_fit_is_given_back_and_computed_here(tmp_path: Path, change: dict[str, Any]) -> None:
    async def check(world: World) -> None:
        world.prefills[0].changes = change
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert (world.router.num_recomputed, world.router.num_leases) == (1, 0)
        await world.until_nothing_is_held()

    run_world(tmp_path, check)


def test_the_least_loaded_service_is_asked_and_others_when_it_refuses(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        first, second = world.prefills
        first.num_waiting_tokens = 1000
        async with asyncio.timeout(10):
            while world.peer().load != 1000:
                await asyncio.sleep(0.05)
        begun = await world.router.begin(PROMPT, GREEDY)
        assert begun is not None
        assert (len(first.asked), len(second.asked)) == (0, 1)
        second.error = PoolExhaustedError("max_requests: x")
        assert await world.router.begin(PROMPT, GREEDY) is not None
        assert (len(first.asked), len(second.asked)) == (1, 2)
        first.error = PeerUnavailableError("service: drains")
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert world.router.num_recomputed == 1
        first.error = second.error = RuntimeError("a bug")
        assert await world.router.begin(PROMPT, GREEDY) is None

    run_world(tmp_path, check, num_prefills=2)


def test_own_requests_under_way_count_before_the_service_says_so(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        for prefill in world.prefills:
            prefill.may_answer.clear()
        waiting = [asyncio.create_task(world.router.begin(PROMPT, GREEDY)) for _ in range(4)]
        async with asyncio.timeout(10):
            while sum(len(prefill.asked) for prefill in world.prefills) < 4:
                await asyncio.sleep(0.02)
        assert [len(prefill.asked) for prefill in world.prefills] == [2, 2]
        for prefill in world.prefills:
            prefill.may_answer.set()
        assert all(await asyncio.gather(*waiting))

    run_world(tmp_path, check, num_prefills=2)


def test_a_cancelled_request_is_cancelled_at_the_prefill_service(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        (prefill,) = world.prefills
        prefill.may_answer.clear()
        task = asyncio.create_task(world.router.begin(PROMPT, GREEDY))
        async with asyncio.timeout(10):
            while not prefill.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not prefill.was_cancelled:
                await asyncio.sleep(0.01)
        assert world.peer().num_sent_tokens == 0
        await world.until_nothing_is_held()

    run_world(tmp_path, check)


def test_a_service_that_is_gone_or_not_ready_is_not_asked(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        world.prefills[0].is_ready = False
        await world.until_ready(False)
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert world.prefills[0].asked == []
        world.prefills[0].is_ready = True
        await world.until_ready(True)
        await world.servers[0].stop(0.0)
        assert await world.router.begin(PROMPT, GREEDY) is None
        await world.until_ready(False)

    run_world(tmp_path, check)


def test_sampling_survives_the_wire() -> None:
    for sampling in (
        Sampling(),
        GREEDY,
        Sampling(temperature=0.5, top_p=0.25, top_k=3, min_p=0.5, seed=0, max_tokens=1, min_tokens=2, logprobs=0),
        Sampling(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5, stop=("a", "b"), ignore_eos=True),
    ):
        message = pb.Sampling.FromString(sampling_message(sampling).SerializeToString())
        assert sampling_of(message) == sampling
    assert sampling_of(pb.Sampling()) == Sampling()
    with pytest.raises(InvalidRequestError, match=r"^top_p"):
        sampling_of(pb.Sampling(top_p=0.0))


DecodeTest = Callable[[DecodeService, FakeEngine, Any], Awaitable[None]]


def run_decode(test: DecodeTest, **changes: Any) -> None:
    """Run a test against decode.v1 without prefill services."""

    async def within() -> None:
        values: dict[str, Any] = {"address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "max_call_s": 30.0} | changes
        config = DecodeConfig(fingerprint=FINGERPRINT, engine=ENGINE, **values)
        engine, router = FakeEngine(), Router(config)
        service = DecodeService(config, engine, router)
        servicer = DecodeServicer(service, router)

        def add(server: grpc.aio.Server) -> None:
            decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)

        server = await RpcServer.start(ServerConfig(address="127.0.0.1:0"), add, ())
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                await test(service, engine, decode_pb2_grpc.DecodeStub(channel))
        finally:
            await server.stop(0.0)

    asyncio.run(within())


def request(request_id: str = "", num_tokens: int = 3, prompt: Sequence[int] = (1, 2)) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=request_id,
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)),
        sampling=pb.Sampling(max_tokens=num_tokens, logprobs=0),
    )


def test_a_stream_brings_tokens_text_log_probabilities_and_at_last_reason_and_usage() -> None:
    async def check(service: DecodeService, engine: FakeEngine, stub: Any) -> None:
        responses = [response async for response in stub.Generate(request())]
        assert [list(response.token_ids) for response in responses] == [[0], [1], [2]]
        assert "".join(response.text for response in responses) == "0 1 2 "
        assert all(len(response.logprobs) == 1 for response in responses)
        assert [response.finish_reason for response in responses] == [0, 0, pb.FINISH_REASON_LENGTH]
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 3)
        stats = await stub.Stats(decode_pb2.StatsRequest())
        assert stats.is_ready
        assert (stats.num_requests, stats.num_requests_total, stats.num_failed_total) == (0, 1, 0)
        assert (stats.num_prompt_tokens_total, stats.num_completion_tokens_total) == (2, 3)
        assert (stats.admitted_bytes_total, stats.missed_bytes_total, stats.full_bytes_total) == (1, 2, 3)

    run_decode(check)


async def failure_of(stub: Any, message: decode_pb2.GenerateRequest) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in stub.Generate(message):
            pass
    return error_of(failure.value)


def test_what_cannot_be_taken_is_refused_by_its_class() -> None:
    async def check(service: DecodeService, engine: FakeEngine, stub: Any) -> None:
        assert isinstance(await failure_of(stub, decode_pb2.GenerateRequest()), InvalidRequestError)
        assert isinstance(await failure_of(stub, request(prompt=())), InvalidRequestError)
        assert isinstance(await failure_of(stub, request("x" * 129)), InvalidRequestError)
        engine.may_go_on.clear()
        under_way = stub.Generate(request("one"))
        async with asyncio.timeout(10):
            while not engine.num_requests:
                await asyncio.sleep(0.01)
        assert isinstance(await failure_of(stub, request("one")), InvalidRequestError)
        second = stub.Generate(request("two"))
        async with asyncio.timeout(10):
            while engine.num_requests < 2:
                await asyncio.sleep(0.01)
        assert isinstance(await failure_of(stub, request("three")), PoolExhaustedError)
        assert (await stub.Drain(decode_pb2.DrainRequest())).num_requests == 2
        assert isinstance(await failure_of(stub, request("four")), PeerUnavailableError)
        assert not (await stub.Stats(decode_pb2.StatsRequest())).is_ready
        engine.may_go_on.set()
        assert len([response async for response in under_way]) == 3
        assert len([response async for response in second]) == 3
        assert (await stub.Drain(decode_pb2.DrainRequest())).num_requests == 0

    run_decode(check, max_requests=2)


def test_an_aborted_stream_ends_with_its_error_and_a_cancelled_one_is_closed() -> None:
    async def check(service: DecodeService, engine: FakeEngine, stub: Any) -> None:
        engine.may_go_on.clear()
        call = stub.Generate(request("one"))
        async with asyncio.timeout(10):
            while not engine.num_requests:
                await asyncio.sleep(0.01)
        aborted = await stub.Abort(decode_pb2.AbortRequest(request_ids=["one", "two"]))
        assert aborted.num_aborted == 1
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call:
                pass
        assert isinstance(error_of(failure.value), RequestAbortedError)
        engine.may_go_on.clear()
        call = stub.Generate(request("three"))
        async with asyncio.timeout(10):
            while not engine.num_requests:
                await asyncio.sleep(0.01)
            call.cancel()
            while engine.num_requests:
                await asyncio.sleep(0.01)
        assert engine.closed == 2
        assert service.num_requests == 0
        assert service.counts.num_failed == 2

    run_decode(check)


def test_an_engine_that_ends_a_request_with_an_error_is_an_error() -> None:
    async def check(service: DecodeService, engine: FakeEngine, stub: Any) -> None:
        engine.reason = "error"
        assert isinstance(await failure_of(stub, request()), EngineFailedError)
        assert service.counts.num_failed == 1

    run_decode(check)


def test_the_prefill_contract_is_spoken_in_both_directions(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        (prefill,) = world.prefills
        async with grpc.aio.insecure_channel(f"127.0.0.1:{world.servers[0].port}") as channel:
            stub: Any = prefill_pb2_grpc.PrefillStub(channel)
            message = prefill_pb2.PrefillRequest(request_id="a", prompt=pb.Prompt(text="hello"))
            prefill.changes = {"finish_reason": "length", "num_tokens": 5}
            response = await stub.Prefill(message)
            assert response.finish_reason == pb.FINISH_REASON_LENGTH
            assert not response.HasField("handover")
            assert prefill.asked[0] == ("hello", Sampling())
            assert list(response.prompt_token_ids) == [1, 2]
            stats = await stub.Stats(prefill_pb2.StatsRequest())
            assert (stats.is_ready, stats.is_draining) == (True, False)
            assert (await stub.Abort(prefill_pb2.AbortRequest(request_ids=["a"]))).num_aborted == 1
            assert (await stub.Drain(prefill_pb2.DrainRequest())).num_requests == 3
            prefill.error = PoolExhaustedError("x: y")
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Prefill(message)
            assert isinstance(error_of(failure.value), PoolExhaustedError)

    run_world(tmp_path, check)
