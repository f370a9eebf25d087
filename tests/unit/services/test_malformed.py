"""Whatever arrives at the port of the staging service: a typed answer, and nothing is left behind."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services.checksums import checksum
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.rpc.status import CLASSES, ERROR_KEY
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.fabric import choose
from oasiskv.services.staging.memory import StagingMemory
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.service import Access, StagingService
from oasiskv.services.staging.servicer import SERVICE_NAME, add_to_server

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
LIMITS = LeaseConfig(num_blocks=8, max_blocks_per_peer=6, max_leases_per_peer=4, max_peers=9)
SERVICE = pb.DESCRIPTOR.services_by_name["Staging"]
# Drain would refuse all that follows, and Watch has no end.
METHODS = [method for method in SERVICE.methods if method.name not in ("Drain", "Watch")]


async def send(channel: grpc.aio.Channel, method: Any, payloads: list[bytes]) -> None:
    """Send bytes as they are; fails unless the answer is a success or an error with a name."""
    name = f"/{SERVICE_NAME}/{method.name}"
    kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
    call: Any = getattr(channel, "_".join(kind))(name)
    answer = call(iter(payloads) if method.client_streaming else payloads[0], timeout=20)
    try:
        if method.server_streaming:
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as failure:
        names = {value for key, value in failure.trailing_metadata() or () if key == ERROR_KEY}
        if not names & CLASSES.keys():
            pytest.fail(f"{method.name}: {failure.code()} {failure.details()}")


# A field that nobody knows: what keeps a message is seen by its size.
PADDING = b"\xfa\x3e\x80\x80\x04" + bytes(2**16)
NUM_ROUNDS = 8


class Place:
    """A service in this process, a peer and a lease of it, and a channel."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = StagingMemory(SHAPE, LIMITS.num_blocks)
        self.service = StagingService(StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True), self.memory)
        self.peer_id = self.service.register_peer(SHAPE, "fuzz", Access.STREAM)
        self.lease_id, _ = self.service.leases.allocate(self.peer_id, 2, 60.0)
        self.channel = self.loop.run_until_complete(self.start())

    async def start(self) -> grpc.aio.Channel:
        config = ServerConfig(address="127.0.0.1:0")
        data_plane = DataPlane(choose("none"), self.memory)
        self.server = await RpcServer.start(config, partial(add_to_server, self.service, data_plane), (SERVICE_NAME,))
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}")

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def close(self) -> None:
        self.loop.run_until_complete(self.stop())
        self.loop.close()
        self.memory.close()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Messages of a type, each field absent, extreme, or plausible; ids are often those of the peer and its lease."""
    cls = message_factory.GetMessageClass(descriptor)
    fields = {field.name: values(field) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: cls(**last_of_oneofs(descriptor, chosen)))


def last_of_oneofs(descriptor: Descriptor, chosen: dict[str, Any]) -> dict[str, Any]:
    for oneof in descriptor.oneofs:
        for name in [field.name for field in oneof.fields if field.name in chosen][:-1]:
            del chosen[name]
    return chosen


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            one = st.sampled_from(["PEER", "LEASE"]) | st.text(max_size=9)
        case FieldDescriptor.TYPE_BYTES:
            one = st.binary(max_size=9) | st.sampled_from([b"k", bytes(257), bytes(SHAPE.part_bytes)])
        case FieldDescriptor.TYPE_UINT32:
            one = st.integers(0, 4) | st.sampled_from([2**31, 2**32 - 1])
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            one = st.sampled_from([0, 1, 1000, 2**63, 2**64 - 1])
        case FieldDescriptor.TYPE_BOOL:
            one = st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            one = st.integers(0, 9)
        case _:
            assert field.message_type is not None
            one = messages(field.message_type)
    return st.lists(one, max_size=4) if field.is_repeated else one


def fill_in(message: Message, peer_id: str, lease_id: str) -> Message:
    """Put the real ids where the strategy, which cannot know them, chose them."""
    for name, value in {"peer_id": peer_id, "lease_id": lease_id}.items():
        if getattr(message, name, None) in ("PEER", "LEASE"):
            setattr(message, name, value)
    return message


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(data=st.data())
def test_odd_messages_get_typed_answers_and_leave_nothing(place: Place, method: Any, data: st.DataObject) -> None:
    sent = data.draw(st.lists(messages(method.input_type), min_size=1, max_size=3))
    payloads = [fill_in(one, place.peer_id, place.lease_id).SerializeToString() for one in sent]
    place.loop.run_until_complete(send(place.channel, method, payloads))
    place.service.leases.check_invariants()


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(payload=st.binary(min_size=1, max_size=40).map(lambda tail: b"\xff" + tail))
def test_bytes_that_are_no_message_get_a_typed_answer(place: Place, method: Any, payload: bytes) -> None:
    place.loop.run_until_complete(send(place.channel, method, [payload]))
    place.service.leases.check_invariants()


def test_a_put_stream_does_not_change_its_lease(place: Place) -> None:
    service = place.service
    peer_id = service.register_peer(SHAPE, "puts", Access.STREAM)
    lease_ids = [service.leases.allocate(peer_id, 1, 60.0)[0] for _ in range(2)]
    data = bytes(range(256))
    sent = [
        pb.PutRequest(peer_id=peer_id, lease_id=lease_id, part=part, data=data, checksum=checksum(data))
        for part, lease_id in enumerate([lease_ids[0], "", lease_ids[1]])
    ]
    sent[1].peer_id = ""
    written = []

    async def send() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await staging_pb2_grpc.StagingStub(place.channel).Put(iter(sent), timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for lease_id in lease_ids:
            (block_id,) = service.leases.writable(peer_id, lease_id)
            written.append([service.memory.parts[block_id, part].any() for part in range(SHAPE.num_parts)])
        service.leases.release(peer_id, lease_ids)

    place.loop.run_until_complete(send())
    assert written == [[True, True, False], [False, False, False]]


def test_what_the_odd_messages_took_is_bounded(place: Place) -> None:
    counts = place.service.leases.counts()
    assert counts.num_peers <= LIMITS.max_peers
    assert counts.num_leases <= LIMITS.max_peers * LIMITS.max_leases_per_peer


def test_odd_messages_cost_a_process_no_memory_that_stays(tmp_path: Path) -> None:
    drawn: list[tuple[Any, list[Message]]] = []

    @settings(max_examples=12)
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        for method in METHODS:
            drawn.append((method, data.draw(st.lists(messages(method.input_type), min_size=1, max_size=3))))

    draw()

    async def scenario(server: StagingProcess) -> list[int]:
        process, resident = psutil.Process(server.process.pid), []
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = staging_pb2_grpc.StagingStub(channel)
            register = pb.RegisterPeerRequest(
                fingerprint=pb.Fingerprint(**asdict(SHAPE)), name="fuzz", access=pb.ACCESS_STREAM
            )
            peer_id = (await stub.RegisterPeer(register)).peer_id
            lease_id = (await stub.Allocate(pb.AllocateRequest(peer_id=peer_id, num_blocks=2, ttl_ms=60_000))).lease_id
            payloads = [
                (method, [fill_in(one, peer_id, lease_id).SerializeToString() + PADDING for one in sent])
                for method, sent in drawn
            ]
            for _ in range(2 * NUM_ROUNDS):
                for start in range(0, len(payloads), 8):
                    await asyncio.gather(*(send(channel, *one) for one in payloads[start : start + 8]))
                    await asyncio.gather(*(send(channel, method, [b"\xff" + PADDING]) for method, _ in payloads[:8]))
                resident.append(process.memory_info().rss)
        return resident

    limits = {field.name: getattr(LIMITS, field.name) for field in fields(LIMITS) if field.name != "num_blocks"}
    strict = {"is_strict": True, "memory_socket": ""}
    with StagingProcess(tmp_path, SHAPE, LIMITS.num_blocks, staging=strict, leases=limits) as server:
        resident = asyncio.run(scenario(server))
    num_bytes = 2 * len(drawn) * len(PADDING)  # of each round, at least
    assert num_bytes > 16 * 2**20
    # Buffers of gRPC and of the allocator have grown to their size in the first half.
    assert resident[-1] - resident[NUM_ROUNDS] < num_bytes / 2


def test_an_allocation_that_is_cancelled_while_it_wipes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        memory = StagingMemory(SHAPE, LIMITS.num_blocks)
        service = StagingService(StagingConfig(fingerprint=SHAPE, leases=LIMITS, is_strict=True), memory)
        peer_id = service.register_peer(SHAPE, "cancels", Access.STREAM)
        loop = asyncio.get_running_loop()
        is_wiping, may_end = asyncio.Event(), threading.Event()

        def wipe_slowly(block_ids: list[int]) -> None:
            loop.call_soon_threadsafe(is_wiping.set)
            may_end.wait(20)

        monkeypatch.setattr(memory, "wipe", wipe_slowly)
        allocating = asyncio.create_task(service.allocate(peer_id, 5, 30.0))
        await is_wiping.wait()
        allocating.cancel()
        for _ in range(3):
            await asyncio.sleep(0.01)
            allocating.cancel()
            assert service.leases.num_free == 3, "the thread still writes to the blocks"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await allocating
        assert service.leases.num_free == LIMITS.num_blocks
        assert service.leases.counts().num_leases == 0
        memory.close()

    asyncio.run(scenario())
