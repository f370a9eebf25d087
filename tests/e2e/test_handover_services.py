"""Router, servicers and clients of prefill and decode over real gRPC and a real staging service, without engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    PeerUnavailableError,
    PoolExhaustedError,
    RequestAbortedError,
)
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.generation import Generated, Handover, Logprob, Sampling
from oasiskv.core.service_config import DecodeConfig, EngineConfig
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2 as pb
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from oasiskv.protos.staging.v1 import staging_pb2
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.session import SessionConfig, StagingSession
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.decode.servicer import DecodeServicer
from oasiskv.services.generation import sampling_message, sampling_of
from oasiskv.services.prefill.service import Counts
from oasiskv.services.prefill.servicer import PrefillServicer
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.rpc.status import error_of
from oasiskv.services.staging.process import StagingProcess

FINGERPRINT = Fingerprint(model_hash="m", dtype="float16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
ENGINE = EngineConfig(model="m", lookahead=LookaheadConfig(budget_blocks=4))
PROMPT = list(range(100))
GREEDY = Sampling(temperature=0)


class FakePrefill:
    """A prefill service that stages nothing but hands real leases over."""

    def __init__(self, session: StagingSession) -> None:
        self.session = session
        self.is_ready = True
        self.is_draining = False
        self.counts = Counts()
        self.num_requests = 0
        self.num_waiting_tokens = 0
        self.asked: list[tuple[Any, Sampling]] = []
        self.error: Exception | None = None
        self.changes: dict[str, Any] = {}
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_cancelled = False

    async def prefill(self, request_id: str, prompt: Any, sampling: Sampling) -> tuple[Handover, list[int]]:
        self.asked.append((prompt, sampling))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        entries = [Logprob(token_id=7, logprob=-0.5, rank=1)]
        first = Handover(first_token_id=7, first_logprobs=entries, num_tokens=len(prompt), num_blocks=2)
        first = replace(first, budget_blocks=4, summary="minmax")
        if "finish_reason" not in self.changes:
            lease = await asyncio.wrap_future(self.session.allocate(2))
            data = self.blank[: 2 * 3].reshape(2, 3, -1)
            self.session.put(lease, range(2), 0, data)
            keys = [request_id.encode() + bytes([index]) for index in range(2)]
            await asyncio.wrap_future(self.session.seal(lease, range(2), keys))
            first = replace(first, handle=await asyncio.wrap_future(self.session.hand_off(lease)))
        return replace(first, **self.changes), [1, 2] if isinstance(prompt, str) else prompt

    @property
    def blank(self) -> Any:
        import numpy as np

        if not hasattr(self, "_blank"):
            self._blank = np.zeros((6, FINGERPRINT.part_bytes), np.uint8)
            self.session.register(self._blank)
        return self._blank

    def abort(self, request_ids: Sequence[str]) -> int:
        return len(request_ids)

    def drain(self) -> int:
        self.is_draining = True
        return 3


@dataclass
class World:
    router: Router
    prefills: list[FakePrefill]
    servers: list[RpcServer]
    staging: StagingClient

    async def num_held(self) -> int:
        stats = await self.staging.call(self.staging.stub.Stats, staging_pb2.StatsRequest())
        return int(stats.num_leases)

    async def until_ready(self, expected: bool) -> None:
        async with asyncio.timeout(15):
            while self.router.is_ready != expected:
                await asyncio.sleep(0.05)

    async def until_nothing_is_held(self) -> None:
        async with asyncio.timeout(15):
            while await self.num_held():
                await asyncio.sleep(0.05)


def run(tmp_path: Path, test: Callable[[World], Awaitable[None]], num_prefills: int = 1) -> None:
    """Run a test with prefill services on loopback and a router that found all of them ready."""

    async def attach(maker: str, arguments: dict[str, Any]) -> None:
        pass

    async def within(process: StagingProcess) -> None:
        async with contextlib.AsyncExitStack() as resources:
            prefills, servers = [], []
            for index in range(num_prefills):
                writes = SessionConfig(
                    address=process.address, fingerprint=FINGERPRINT, name=f"p{index}", may_write=True, ttl_s=2.0
                )
                session = await asyncio.to_thread(StagingSession, writes)
                resources.push_async_callback(asyncio.to_thread, session.close)
                prefills.append(FakePrefill(session))
                servicer: Any = PrefillServicer(prefills[-1], process.address, 2000)  # type: ignore[arg-type]

                def add(server: grpc.aio.Server, servicer: Any = servicer) -> None:
                    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)

                servers.append(await RpcServer.start(ServerConfig(address="127.0.0.1:0"), add, ()))
                resources.push_async_callback(servers[-1].stop, 0.0)
            config = DecodeConfig(
                address="127.0.0.1:0",
                http_address="127.0.0.1:0",
                fingerprint=FINGERPRINT,
                engine=ENGINE,
                prefills=tuple(f"127.0.0.1:{server.port}" for server in servers),
                staging=process.address,
                max_call_s=5.0,
            )
            router = Router(config)
            reads = SessionConfig(address=process.address, fingerprint=FINGERPRINT, name="d", may_write=False)
            assert router.link is None
            router.link = StagingLink(reads, attach)
            tasks = [asyncio.create_task(router.run()), asyncio.create_task(router.link.run())]
            staging = await resources.enter_async_context(StagingClient(process.address))
            try:
                async with asyncio.timeout(20):
                    while not all([router.is_ready, *(peer.is_ready for peer in router._peers)]):
                        await asyncio.sleep(0.02)
                await test(World(router, prefills, servers, staging))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with StagingProcess(tmp_path, FINGERPRINT, 16, leases={"max_ttl_s": 5.0}) as process:
        asyncio.run(within(process))


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

    run(tmp_path, check)


def test_a_first_token_that_ends_the_request_leaves_no_lease(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        world.prefills[0].changes = {"finish_reason": "stop"}
        begun = await world.router.begin(PROMPT, GREEDY)
        assert begun is not None
        assert (begun.first.finish_reason, begun.lease) == ("stop", "")
        assert world.router.num_handovers == 0

    run(tmp_path, check)


@pytest.mark.parametrize("change", [{"budget_blocks": 5}, {"summary": "mid"}, {"num_tokens": 99}, {"num_blocks": 3}])
def test_a_handover_that_does_not_fit_is_given_back_and_computed_here(tmp_path: Path, change: dict[str, Any]) -> None:
    async def check(world: World) -> None:
        world.prefills[0].changes = change
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert (world.router.num_recomputed, world.router.num_leases) == (1, 0)
        await world.until_nothing_is_held()

    run(tmp_path, check)


def test_the_least_loaded_service_is_asked_and_others_when_it_refuses(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        first, second = world.prefills
        first.num_waiting_tokens = 1000
        async with asyncio.timeout(10):
            while world.router._peers[0].load != 1000:
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

    run(tmp_path, check, num_prefills=2)


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

    run(tmp_path, check, num_prefills=2)


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
        assert world.router._peers[0].num_sent_tokens == 0
        await world.until_nothing_is_held()

    run(tmp_path, check)


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

    run(tmp_path, check)


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


class FakeEngine:
    """Generates numbers until it is told to end."""

    def __init__(self) -> None:
        self.is_alive = True
        self.num_requests = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.aborted: set[str] = set()
        self.closed = 0
        self.reason = "length"

    def tokenize(self, prompt: Any) -> list[int]:
        if not prompt:
            raise InvalidRequestError("prompt: expected tokens")
        return list(prompt)

    async def generate(self, request_id: str, ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Generated]:
        self.num_requests += 1
        try:
            for index in range(sampling.max_tokens):
                await self.may_go_on.wait()
                if request_id in self.aborted:
                    yield Generated(token_ids=[], finish_reason="abort")
                    return
                is_last = index == sampling.max_tokens - 1
                entries = [[Logprob(token_id=index, logprob=-1.0, rank=1)]] if sampling.logprobs is not None else []
                reason = self.reason if is_last else None
                yield Generated(token_ids=[index], text=f"{index} ", logprobs=entries, finish_reason=reason)
        finally:
            self.num_requests -= 1
            self.closed += 1

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.may_go_on.set()

    async def traffic(self) -> dict[str, int]:
        return {"admitted_bytes": 1, "missed_bytes": 2, "handover_bytes": 3}


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

    run(tmp_path, check)
