"""Prefill services without engines beside a real staging service, and a router that finds them, for tests."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import InvalidRequestError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.generation import Generated, Handover, Logprob, Sampling
from oasiskv.core.service_config import DecodeConfig, EngineConfig
from oasiskv.protos.prefill.v1 import prefill_pb2_grpc
from oasiskv.protos.staging.v1 import staging_pb2
from oasiskv.services.clients.link import StagingLink, StagingLinks
from oasiskv.services.clients.session import Lease, SessionConfig, StagingSession
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.decode.peers import Peer, Resolve, resolve
from oasiskv.services.decode.router import Router
from oasiskv.services.prefill.service import Counts
from oasiskv.services.prefill.servicer import PrefillServicer
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.staging.process import StagingProcess

FINGERPRINT = Fingerprint(model_hash="m", dtype="float16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
ENGINE = EngineConfig(model="m", lookahead=LookaheadConfig(budget_blocks=4))


class FakePrefill:
    """A prefill service that computes nothing but hands real leases over."""

    def __init__(self, session: StagingSession) -> None:
        self.session = session
        self.is_ready = True
        self.is_draining = False
        self.counts = Counts()
        self.num_requests = 0
        self.num_waiting_tokens = 0
        self.asked: list[tuple[Any, Sampling]] = []
        self.error: Exception | None = None
        """What a prompt fails with."""
        self.changes: dict[str, Any] = {}
        """What a handover says other than it should."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_cancelled = False
        self.num_probes = 0
        self.probe_changes: dict[str, Any] = {}
        """What a probe says other than it should."""
        self._data = np.zeros((2, 3, FINGERPRINT.part_bytes), np.uint8)
        session.register(self._data)

    async def prefill(self, request_id: str, prompt: Any, sampling: Sampling) -> tuple[Handover, list[int]]:
        """Answer with token 7."""
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
            first = replace(first, handle=await self._stage(request_id, 2))
        return replace(first, **self.changes), [1, 2] if isinstance(prompt, str) else prompt

    async def probe(self) -> tuple[Handover, bytes]:
        """Stage a block of its own."""
        self.num_probes += 1
        self._data[0] = self.num_probes
        digest = hashlib.blake2b(self._data[0].tobytes(), digest_size=32).digest()
        handle = await self._stage(f"probe-{id(self)}-{self.num_probes}", 1)
        probe = Handover(first_token_id=0, handle=handle, num_blocks=1, budget_blocks=4, summary="minmax")
        changes = dict(self.probe_changes)
        return replace(probe, **{k: v for k, v in changes.items() if k != "digest"}), changes.get("digest", digest)

    def abort(self, request_ids: Sequence[str]) -> int:
        """Say that all were known."""
        return len(request_ids)

    def drain(self) -> int:
        """Say that some are left."""
        self.is_draining = True
        return 3

    async def hold(self, block_keys: Sequence[bytes]) -> None:
        """Leave blocks in staging as a request does that has ended."""
        for block_key in block_keys:
            self.session.release(await self._seal([block_key]))

    async def _stage(self, mark: str, num_blocks: int) -> str:
        lease = await self._seal([mark.encode() + bytes([index]) for index in range(num_blocks)])
        return await asyncio.wrap_future(self.session.hand_off(lease))

    async def _seal(self, block_keys: Sequence[bytes]) -> Lease:
        indices = range(len(block_keys))
        lease = await asyncio.wrap_future(self.session.allocate(len(indices)))
        self.session.put(lease, indices, 0, self._data[: len(indices)])
        await asyncio.wrap_future(self.session.seal(lease, indices, block_keys))
        return lease


class FakeEngine:
    """Generates numbers as text until it is told to end."""

    def __init__(self) -> None:
        self.is_alive = True
        self.num_requests = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.aborted: set[str] = set()
        self.closed = 0
        self.reason = "length"
        self.samplings: list[Sampling] = []

    def tokenize(self, prompt: Any) -> list[int]:
        """Return the prompt's elements."""
        if not prompt:
            raise InvalidRequestError("prompt: expected tokens")
        return list(prompt)

    async def generate(self, request_id: str, ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Generated]:
        """Count up."""
        self.num_requests += 1
        self.samplings.append(sampling)
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
        """End a request at its next token."""
        self.aborted.add(request_id)
        self.may_go_on.set()

    async def traffic(self) -> dict[str, int]:
        """Return made-up bytes."""
        return {"admitted_bytes": 1, "missed_bytes": 2, "handover_bytes": 3, "loaded_bytes": 0}


@dataclass(kw_only=True)
class World:
    """What a test sees."""

    router: Router
    prefills: list[FakePrefill]
    servers: list[RpcServer]
    addresses: list[str]
    """Of the prefill services."""
    stagings: list[StagingClient]
    processes: list[StagingProcess]
    """Of the staging services, which the prefill services use in turn."""

    def peer(self, index: int = 0) -> Peer:
        """Return what the router knows of a prefill service."""
        (found,) = [peer for peer in self.router.peers.all if peer.client.address == self.addresses[index]]
        return found

    async def num_held(self) -> int:
        """Return how many leases and handles staging knows."""
        stats = [await one.call(one.stub.Stats, staging_pb2.StatsRequest()) for one in self.stagings]
        return sum(int(one.num_leases) for one in stats)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition holds; fails after a quarter of a minute."""
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.02)

    async def until_ready(self, expected: bool) -> None:
        """Return when the router is ready, or is not."""
        await self.until(lambda: self.router.is_ready == expected)

    async def until_nothing_is_held(self) -> None:
        """Return when staging knows no leases."""
        async with asyncio.timeout(15):
            while await self.num_held():
                await asyncio.sleep(0.05)


def run_world(
    folder: Path,
    test: Callable[[World], Awaitable[None]],
    num_prefills: int = 1,
    *,
    name: str = "",
    find: Callable[[list[str]], Resolve] = lambda addresses: resolve,
    prepare: Callable[[list[FakePrefill]], None] = lambda prefills: None,
    is_ready: bool = True,
    num_stagings: int = 1,
) -> None:
    """Run a test with prefill services on loopback, each at an address of its own and all at one port.

    Args:
        folder: For staging.
        test: The test.
        num_prefills: How many there are.
        name: Host that the settings name; empty for all addresses.
        find: Makes what looks the name up, from the addresses.
        prepare: Called before the router looks at anything.
        is_ready: Whether the test begins when all services are usable.
        num_stagings: How many staging services the prefill services use in turn; with several, their name is not set.
    """

    async def attach(maker: str, arguments: dict[str, Any]) -> None:
        pass

    async def within(processes: list[StagingProcess]) -> None:
        async with contextlib.AsyncExitStack() as resources:
            prefills, servers, port = [], [], 0
            for index in range(num_prefills):
                process = processes[index % num_stagings]
                writes = SessionConfig(
                    address=process.address, fingerprint=FINGERPRINT, name=f"p{index}", may_write=True, ttl_s=2.0
                )
                session = await asyncio.to_thread(StagingSession, writes)
                resources.push_async_callback(asyncio.to_thread, session.close)
                prefills.append(FakePrefill(session))
                servicer: Any = PrefillServicer(prefills[-1], process.address, 2000, f"r{index}")  # type: ignore[arg-type]

                def add(server: grpc.aio.Server, servicer: Any = servicer) -> None:
                    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)

                servers.append(await RpcServer.start(ServerConfig(address=f"127.0.0.{index + 1}:{port}"), add, ()))
                port = servers[-1].port
                resources.push_async_callback(servers[-1].stop, 0.0)
            prepare(prefills)
            addresses = [f"127.0.0.{index + 1}:{port}" for index in range(num_prefills)]
            config = DecodeConfig(
                address="127.0.0.1:0",
                http_address="127.0.0.1:0",
                fingerprint=FINGERPRINT,
                engine=ENGINE,
                prefills=(f"{name}:{port}",) if name else tuple(addresses),
                staging=processes[0].address if num_stagings == 1 else "",
                max_call_s=5.0,
            )
            router = Router(config, find(addresses))

            def link_to(address: str) -> StagingLink:
                reads = SessionConfig(address=address, fingerprint=FINGERPRINT, name="d", may_write=False)
                return StagingLink(reads, attach)

            links = StagingLinks(link_to)

            async def read_probe(lease: str) -> bytes:
                address, _, token = lease.rpartition("/")
                session = links.at(address).session
                out = np.zeros((1, 3, FINGERPRINT.part_bytes), np.uint8)
                await asyncio.to_thread(session.register, out)
                read = session.fetch(session.join(token), [0], 0, out)
                assert (await asyncio.wrap_future(read)).tolist() == [0]
                return hashlib.blake2b(out.tobytes(), digest_size=32).digest()

            router.links, router.read_probe = links, read_probe
            tasks = [asyncio.create_task(router.run())]
            stagings = [await resources.enter_async_context(StagingClient(one.address)) for one in processes]
            world = World(
                router=router,
                prefills=prefills,
                servers=servers,
                addresses=addresses,
                stagings=stagings,
                processes=processes,
            )
            try:
                if is_ready:
                    await world.until(lambda: len(router.peers.usable()) == num_prefills)
                await test(world)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(num_stagings):
            place = folder / f"staging-{index}"
            place.mkdir()
            started = StagingProcess(place, FINGERPRINT, 16, leases={"max_ttl_s": 5.0})
            processes.append(stack.enter_context(started))
        asyncio.run(within(processes))
