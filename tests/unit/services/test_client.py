import asyncio
from typing import Any

import grpc
import pytest

from oasiskv.core.errors import PeerUnavailableError, TransferTimeoutError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services.clients.staging import StagingClient


class Flaky(staging_pb2_grpc.StagingServicer):
    """Away for the first calls, and then slow."""

    def __init__(self, num_failures: int, delay_s: float = 0.0) -> None:
        self.num_calls = 0
        self.num_failures = num_failures
        self.delay_s = delay_s

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
        await asyncio.sleep(self.delay_s)
        return pb.StatsResponse(num_blocks=3)


def ask(flaky: Flaky, *, may_repeat: bool, timeout_s: float = 10.0) -> pb.StatsResponse:
    async def scenario() -> pb.StatsResponse:
        server = grpc.aio.server()
        staging_pb2_grpc.add_StagingServicer_to_server(flaky, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with StagingClient(f"127.0.0.1:{port}", timeout_s=timeout_s) as client:
                stats: pb.StatsResponse = await client.call(client.stub.Stats, pb.StatsRequest(), may_repeat=may_repeat)
                return stats
        finally:
            await server.stop(0)

    return asyncio.run(scenario())


def test_a_call_that_may_be_repeated_is_tried_once_more() -> None:
    flaky = Flaky(1)
    assert ask(flaky, may_repeat=True).num_blocks == 3
    assert flaky.num_calls == 2


def test_there_is_no_endless_retry() -> None:
    flaky = Flaky(9)
    with pytest.raises(PeerUnavailableError, match="it may have acted"):
        ask(flaky, may_repeat=True)
    assert flaky.num_calls == 2


def test_a_call_that_might_act_twice_is_made_once() -> None:
    flaky = Flaky(1)
    with pytest.raises(PeerUnavailableError):
        ask(flaky, may_repeat=False)
    assert flaky.num_calls == 1


def test_a_call_ends_at_its_deadline() -> None:
    with pytest.raises(TransferTimeoutError, match="it may have acted"):
        ask(Flaky(0, delay_s=30.0), may_repeat=True, timeout_s=0.2)
