"""Decode finds prefill services by name, and sends prompts only where a probe block came through."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oasiskv.core.errors import EngineFailedError, PeerUnavailableError, PoolExhaustedError
from oasiskv.core.generation import Sampling
from oasiskv.core.service_config import DecodeConfig
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from oasiskv.protos.staging.v1 import staging_pb2
from oasiskv.services.clients.link import StagingLinks
from oasiskv.services.clients.prefill import PrefillClient
from oasiskv.services.decode import peers
from oasiskv.services.decode.choice import Reason
from oasiskv.services.decode.peers import Resolve, resolve
from oasiskv.services.decode.router import Router
from oasiskv.services.prompt_keys import block_keys
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.testing_handover import ENGINE, FINGERPRINT, FakePrefill, World, run_world

PROMPT = list(range(100))
GREEDY = Sampling(temperature=0)


class Names:
    """A name server with one name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked: list[tuple[str, int]] = []
        self.error: OSError | None = None

    def find(self, addresses: list[str]) -> Resolve:
        self.addresses = addresses[:2]

        async def answer(host: str, port: int) -> Sequence[str]:
            self.asked.append((host, port))
            if self.error is not None:
                raise self.error
            return list(self.addresses)

        return answer


def test_a_prefill_service_is_used_once_a_probe_block_came_through(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        (prefill,) = world.prefills
        assert (prefill.num_probes, world.router.peers.checks) == (1, {"ok": 1})
        assert (world.peer().is_verified, world.peer().revision, world.peer().reason) == (True, "r0", "")
        assert await world.router.begin(PROMPT, GREEDY) is not None
        assert prefill.num_probes == 1
        assert world.router.num_leases == 1

    run_world(tmp_path, check)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": b"\0" * 32}, "CorruptBlockError: digest"),
        ({"budget_blocks": 5}, "UnsupportedError: budget_blocks"),
        ({"summary": "mid"}, "UnsupportedError: summary"),
        ({"summary_dtype": "fp8"}, "UnsupportedError: summary_dtype"),
        ({"handle": "other"}, "LeaseExpiredError"),
    ],
)
def test_a_prefill_service_whose_probe_does_not_come_through_gets_no_prompt(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    def break_it(prefills: list[FakePrefill]) -> None:
        prefills[0].probe_changes = changes

    async def check(world: World) -> None:
        await world.until(lambda: world.router.peers.checks.total() >= 2)
        assert world.peer().is_ready
        assert world.peer().reason.startswith(reason)
        assert world.router.reasons == [
            f"kv_path: expected a probe block from {world.addresses[0]}, got {world.peer().reason}"
        ]
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert world.prefills[0].asked == []
        world.prefills[0].probe_changes = {}
        await world.until_ready(True)
        await world.until_nothing_is_held()  # the probes' leases, and the handles that nobody took

    run_world(tmp_path, check, prepare=break_it, is_ready=False)


def test_the_path_is_shown_again_after_a_failed_handover_and_not_after_a_refusal(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        (prefill,) = world.prefills
        prefill.error = PoolExhaustedError("max_requests: x")
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert world.peer().is_usable
        prefill.error = EngineFailedError("engine: x")
        assert await world.router.begin(PROMPT, GREEDY) is None
        assert world.router.errors == {"PoolExhaustedError": 1, "EngineFailedError": 1}
        assert world.router.outcomes == {"recomputed": 2}
        assert not world.peer().is_usable
        await world.until_ready(True)
        assert prefill.num_probes == 2

    run_world(tmp_path, check)


def test_the_path_is_shown_again_when_a_service_comes_back(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        (prefill,) = world.prefills
        prefill.is_ready = False
        await world.until_ready(False)
        assert world.router.reasons == ["prefills: expected one of 1 services to be ready, got none"]
        prefill.is_ready = True
        await world.until_ready(True)
        assert prefill.num_probes == 2

    run_world(tmp_path, check)


def test_a_prompt_goes_where_most_of_it_is_held_unless_more_waits_there(tmp_path: Path) -> None:
    async def check(world: World) -> None:
        assert world.router.choices == {}
        assert [world.peer(index).staging for index in range(3)] == [
            world.processes[index].address for index in (0, 1, 0)
        ]
        # Four of the prompt's six whole blocks, as another request would have left them.
        await world.prefills[1].hold(block_keys(PROMPT, 16)[:4])
        begun = await world.router.begin(PROMPT, GREEDY)
        assert begun is not None
        assert begun.lease.startswith(f"{world.processes[1].address}/")
        assert [len(prefill.asked) for prefill in world.prefills] == [0, 1, 0]
        assert world.router.choices == {"both": 1}
        # As many tokens wait there as are held: then what is held still wins; with one more it does not.
        cases: tuple[tuple[int, int, Reason], ...] = ((64, 1, "longest-prefix"), (65, 0, "least-load"))
        for num_waiting, where, why in cases:
            world.prefills[1].num_waiting_tokens = num_waiting
            await world.until(lambda num_waiting=num_waiting: world.peer(1).load == num_waiting)  # type: ignore[misc]
            num_asked = [len(prefill.asked) for prefill in world.prefills]
            num_chosen = world.router.choices[why]
            assert await world.router.begin(PROMPT, GREEDY) is not None
            num_asked[where] += 1
            assert [len(prefill.asked) for prefill in world.prefills] == num_asked
            assert world.router.choices[why] == num_chosen + 1
        # Nothing of another prompt is held anywhere.
        assert await world.router.begin(PROMPT[1:], GREEDY) is not None
        assert len(world.prefills[1].asked) == 2
        for lease in list(world.router._leases):
            world.router.end(lease)

    run_world(tmp_path, check, 3, num_stagings=2)


def test_one_answer_of_the_directory_is_enough(tmp_path: Path) -> None:
    class Link:
        def __init__(self, holders: list[staging_pb2.Holder], is_complete: bool) -> None:
            self.answer = staging_pb2.FindResponse(holders=holders, is_complete=is_complete)
            self.asked = list[Sequence[bytes]]()

        async def find(self, keys: Sequence[bytes]) -> staging_pb2.FindResponse:
            self.asked.append(keys)
            return self.answer

    def holder(address: str, num_blocks: int) -> staging_pb2.Holder:
        return staging_pb2.Holder(address=address, num_prefix_blocks=num_blocks)

    async def held(first: Link, second: Link) -> dict[str, int]:
        links: Any = {"a:1": first, "b:2": second}
        router = Router(DecodeConfig(address="x:1", http_address="x:2", fingerprint=FINGERPRINT, engine=ENGINE))
        router.links = StagingLinks(links.__getitem__)
        router.links._links = links
        return await router._held(PROMPT, ["a:1", "b:2"])

    complete = Link([holder("b:2", 5), holder("a:1", 2)], True)
    other = Link([holder("", 3)], True)
    assert asyncio.run(held(complete, other)) == {"a:1": 32, "b:2": 80}
    # The last token is always computed.
    assert (complete.asked, other.asked) == ([block_keys(PROMPT, 16)[:6]], [])
    # A directory that is away, or none: each tells of itself.
    assert asyncio.run(held(Link([holder("a:1", 2)], False), other)) == {"a:1": 32, "b:2": 48}
    assert asyncio.run(held(Link([holder("", 1)], True), other)) == {"a:1": 16, "b:2": 48}
    assert asyncio.run(held(Link([], True), Link([], True))) == {}


def test_a_name_with_several_addresses_is_several_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RESOLVE_S", 0.05)
    names = Names()

    async def check(world: World) -> None:
        await world.until(lambda: len(world.router.peers.usable()) == 2)
        port = world.servers[0].port
        assert set(names.asked) == {("prefill.llm.svc", port)}
        # A third one appears, and the first one goes while it computes.
        world.prefills[0].may_answer.clear()
        world.prefills[1].num_waiting_tokens = 1000
        await world.until(lambda: world.peer(1).load == 1000)
        under_way = asyncio.create_task(world.router.begin(PROMPT, GREEDY))
        await world.until(lambda: bool(world.prefills[0].asked))
        names.addresses = world.addresses[1:]
        await world.until(lambda: {peer.client.address for peer in world.router.peers.usable()} == set(names.addresses))
        assert await world.router.begin(PROMPT, GREEDY) is not None
        assert [len(prefill.asked) for prefill in world.prefills] == [1, 0, 1]
        world.prefills[0].may_answer.set()
        assert await under_way is not None
        await world.until(lambda: len(world.router.peers._peers) == 2)
        # It comes back: another process, to be shown again.
        names.addresses = world.addresses[:1]
        await world.until(lambda: [peer.client.address for peer in world.router.peers.usable()] == names.addresses)
        assert world.prefills[0].num_probes == 2

    run_world(tmp_path, check, 3, name="prefill.llm.svc", find=names.find, is_ready=False)


def test_a_name_server_that_is_away_takes_nobody_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "RESOLVE_S", 0.05)
    names = Names()

    async def check(world: World) -> None:
        names.error = OSError("no answer")
        num_asked = len(names.asked)
        await world.until(lambda: len(names.asked) >= num_asked + 3)
        assert await world.router.begin(PROMPT, GREEDY) is not None

    run_world(tmp_path, check, 2, name="prefill.llm.svc", find=names.find)


def test_an_address_stands_for_itself_and_a_name_for_one_family() -> None:
    assert asyncio.run(resolve("127.0.0.3", 7412)) == ["127.0.0.3:7412"]
    assert asyncio.run(resolve("::1", 7412)) == ["[::1]:7412"]
    assert len(asyncio.run(resolve("localhost", 7412))) == 1


def test_a_service_behind_a_name_shows_a_certificate_of_the_name(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "prefill.llm.svc", authority)
    make_certificate(tmp_path, "decode", authority)
    tls = tls_files(tmp_path, "decode")

    class Service(prefill_pb2_grpc.PrefillServicer):
        async def Stats(self, request: Any, context: Any) -> prefill_pb2.StatsResponse:
            return prefill_pb2.StatsResponse(is_ready=True)

    async def scenario() -> None:
        def add(server: Any) -> None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(Service(), server)

        listen = ServerConfig(address="127.0.0.2:0", tls=tls_files(tmp_path, "prefill.llm.svc"))
        server = await RpcServer.start(listen, add, ())
        try:
            async with PrefillClient(f"127.0.0.2:{server.port}", tls=tls, tls_name="prefill.llm.svc") as named:
                assert (await named.stats(10.0)).is_ready
            for name in ("", "prefill.other.svc"):
                async with PrefillClient(f"127.0.0.2:{server.port}", tls=tls, tls_name=name) as other:
                    with pytest.raises(PeerUnavailableError):
                        await other.stats(10.0)
        finally:
            await server.stop(0.0)

    asyncio.run(scenario())
