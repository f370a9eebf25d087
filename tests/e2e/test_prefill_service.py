"""The prefill service over a real staging service, with an engine that computes nothing but stages real bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import (
    EngineFailedError,
    InvalidRequestError,
    LeaseExpiredError,
    OasisError,
    PeerUnavailableError,
    PoolExhaustedError,
    RequestAbortedError,
    UnsupportedError,
)
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.generation import Generated, Sampling
from oasiskv.core.handover import HandoverLayout
from oasiskv.core.layout import SparseLayout
from oasiskv.core.service_config import EngineConfig, PrefillConfig
from oasiskv.engine.state import CacheShape
from oasiskv.services.clients.blocks import SessionBlocks, arguments, attach
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession
from oasiskv.services.generation import Prompt
from oasiskv.services.prefill.service import PrefillService
from oasiskv.services.prompt_keys import block_keys
from oasiskv.services.staging.process import StagingProcess

SHAPE = CacheShape(
    num_layers=3,
    num_target_layers=3,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    block_size=16,
    dtype=torch.float16,
    scale=1.0,
)
FINGERPRINT = Fingerprint(model_hash="m", dtype="float16", block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
LAYOUT = SparseLayout(budget_blocks=4, rows_per_page=16)
NUM_BLOCKS = 64
GREEDY = Sampling(temperature=0)


class FakeEngine:
    """Stages random bytes for a prompt; a step ends when the test says so."""

    layout = LAYOUT
    is_alive = True
    max_tokens = 1000

    def __init__(self) -> None:
        self.blocks: SessionBlocks | None = None
        self.written: dict[str, torch.Tensor] = {}
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.finish_reason = "length"
        self.num_tokens = 2
        self.writes: dict[str, list[Any]] = {}
        self.prefixes: list[tuple[str, int] | None] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.loses_prefixes = False

    async def attach_staging(self, maker: str, given: dict[str, Any]) -> None:
        assert maker == "oasiskv.services.clients.blocks:attach"
        if self.blocks is not None:
            self.blocks.close()
        self.blocks = await asyncio.to_thread(attach, given, SHAPE)

    def tokenize(self, prompt: Prompt) -> list[int]:
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    async def generate(
        self,
        request_id: str,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        stage: str | None = None,
        prefix: tuple[str, int] | None = None,
    ) -> AsyncIterator[Generated]:
        self.prefixes.append(prefix)
        num_there = 0
        if prefix is not None:
            assert self.blocks is not None
            num_there = prefix[1]
            out = torch.empty(num_there, 3, 2, 16, 16).half()
            self.blocks.fetch(prefix[0], range(num_there), 0, out).result()
            self.loaded[request_id] = out
            if self.loses_prefixes:
                yield Generated(token_ids=[], finish_reason="error")
                return
        if stage is not None:
            assert sampling.max_tokens == 2
            assert self.blocks is not None
            places = HandoverLayout.of(len(ids), 16, LAYOUT)
            data = torch.randn(places.num_blocks, 3, 2, 16, 16, dtype=torch.float32).half()
            self.written[request_id] = data
            own = range(num_there, places.num_complete)
            self.writes[stage] = [self.blocks.put(stage, own, 0, data[own.start : own.stop])]
        await self.may_go_on.wait()
        if stage is not None and self.num_tokens == 2:
            assert self.blocks is not None
            rest = range(places.num_complete, places.num_blocks)
            for layer in range(3):
                part = data[rest.start :, layer : layer + 1].contiguous()
                self.writes[stage].append(self.blocks.put(stage, rest, layer, part))
        yield Generated(token_ids=[7], finish_reason=None if self.num_tokens == 2 else self.finish_reason)
        if self.num_tokens == 2:
            yield Generated(token_ids=[8], finish_reason="length")

    async def take_handover(self, lease: str) -> list[bytes]:
        for write in self.writes.pop(lease, []):
            await asyncio.wrap_future(write)
        assert self.blocks is not None
        receipt = await asyncio.to_thread(self.blocks.receipt, lease)
        self.blocks.forget(lease)
        return [receipt]

    async def write_probe(self, lease: str) -> tuple[bytes, list[bytes]]:
        if self.finish_reason == "error":
            raise PeerUnavailableError("staging: away")
        assert self.blocks is not None
        data = torch.randint(256, (1, 3, 2, 16 * 2 * 8 * 2), dtype=torch.uint8)
        await asyncio.wrap_future(self.blocks.put(lease, [0], 0, data))
        self.written["probe"] = data
        receipt = await asyncio.to_thread(self.blocks.receipt, lease)
        return b"digest", [receipt]


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[StagingProcess]:
    with StagingProcess(tmp_path, FINGERPRINT, NUM_BLOCKS, leases={"max_ttl_s": 5.0}) as process:
        yield process


Test = Callable[[PrefillService, FakeEngine, StagingSession], Coroutine[Any, Any, None]]


def run(staging: StagingProcess, test: Test, **changes: Any) -> None:
    """Run a test against a service that is ready, beside a reader with a session of its own."""

    async def with_service() -> None:
        engine = FakeEngine()
        values: dict[str, Any] = {
            "address": "127.0.0.1:0",
            "staging": staging.address,
            "fingerprint": FINGERPRINT,
        } | changes
        settings = EngineConfig(model="m", lookahead=LookaheadConfig(budget_blocks=4))
        config = PrefillConfig(engine=settings, **values)
        session = SessionConfig(address=staging.address, fingerprint=FINGERPRINT, name="prefill", may_write=True)
        link = StagingLink(session, engine.attach_staging)
        task = asyncio.create_task(link.run())
        service = PrefillService(config, engine, link)
        assert not link.is_up
        async with asyncio.timeout(20):
            while not service.is_ready:
                await asyncio.sleep(0.02)
        reads = SessionConfig(address=staging.address, fingerprint=FINGERPRINT, name="decode", may_write=False)
        reader = await asyncio.to_thread(StagingSession, reads)
        try:
            await test(service, engine, reader)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert engine.blocks is not None
            await asyncio.to_thread(engine.blocks.close)
            await asyncio.to_thread(reader.close)

    asyncio.run(with_service())


async def num_free(reader: StagingSession) -> int:
    """Return how many blocks a new lease could get, once nothing is being released."""
    for count in range(NUM_BLOCKS, 0, -1):
        try:
            lease = await asyncio.wrap_future(reader.allocate(count))
        except PoolExhaustedError:
            continue
        reader.release(lease)
        return count
    return 0


def test_the_handle_brings_every_byte_that_the_engine_staged(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        prompt = list(range(200, 200 + 9 * 16 + 5))
        first, ids = await service.prefill("one", prompt, GREEDY)
        assert ids == prompt
        assert (first.first_token_id, first.finish_reason, first.num_tokens) == (7, None, len(prompt))
        assert (first.budget_blocks, first.summary, first.summary_dtype) == (4, "minmax", "auto")
        lease = await asyncio.wrap_future(reader.accept(first.handle))
        config = SessionConfig(address=staging.address, fingerprint=FINGERPRINT, name="decode", may_write=False)
        blocks = await asyncio.to_thread(attach, arguments(reader, config), SHAPE)
        assert lease.num_blocks == first.num_blocks == 12
        out = torch.empty(12, 3, 2, 16, 16, dtype=torch.float16)
        await asyncio.wrap_future(blocks.fetch(lease.token, range(12), 0, out))
        assert torch.equal(out, engine.written["one"])
        some = torch.empty(3, 1, 2, 16, 16, dtype=torch.float16)
        await asyncio.wrap_future(blocks.fetch(lease.token, [8, 0, 11], 2, some))
        assert torch.equal(some[:, 0], engine.written["one"][[8, 0, 11], 2])
        assert service.counts.staged_bytes == 12 * FINGERPRINT.block_bytes
        reader.release(lease)
        blocks.forget(lease.token)
        with pytest.raises(LeaseExpiredError):
            await asyncio.wrap_future(blocks.fetch(lease.token, [0], 0, out[:1]))
        await asyncio.to_thread(blocks.close)

    run(staging, check)


def test_blocks_of_earlier_prompts_are_loaded_and_shared(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        prompt = [n % 7 for n in range(130)]
        first, _ = await service.prefill("first", prompt, GREEDY)
        longer = [*prompt[:100], *range(70)]
        second, _ = await service.prefill("second", longer, GREEDY)
        third, _ = await service.prefill("third", prompt[:128], GREEDY)
        # Six blocks are equal; of a prompt that is there whole the last token is computed all the same.
        assert engine.prefixes[0] is None
        assert [prefix and prefix[1] for prefix in engine.prefixes] == [None, 6, 7]
        assert torch.equal(engine.loaded["second"], engine.written["first"][:6])
        assert torch.equal(engine.loaded["third"], engine.written["first"][:7])
        assert service.counts.num_loaded_tokens == 13 * 16
        one = await asyncio.wrap_future(reader.accept(first.handle))
        two = await asyncio.wrap_future(reader.accept(second.handle))
        out = np.zeros((second.num_blocks, 3, FINGERPRINT.part_bytes), np.uint8)
        reader.register(out)
        statuses = await asyncio.wrap_future(reader.fetch(two, range(second.num_blocks), 0, out))
        assert (statuses == FetchStatus.OK).all()
        expected = torch.cat([engine.written["first"][:6], engine.written["second"][6:]])
        assert torch.equal(torch.from_numpy(out).view(torch.float16).reshape(expected.shape), expected)
        await asyncio.wrap_future(reader.release(one, two, await asyncio.wrap_future(reader.accept(third.handle))))

    run(staging, check)


def test_a_prompt_whose_blocks_are_lost_on_the_way_is_computed(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        prompt = [n % 7 for n in range(130)]
        await service.prefill("first", prompt, GREEDY)
        engine.loses_prefixes = True
        second, _ = await service.prefill("second", prompt, GREEDY)
        assert [prefix and prefix[1] for prefix in engine.prefixes] == [None, 8, None]
        assert service.counts.num_loaded_tokens == 0
        lease = await asyncio.wrap_future(reader.accept(second.handle))
        assert lease.num_blocks == second.num_blocks

    run(staging, check)


def test_a_first_token_that_ends_the_request_hands_nothing_over(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        engine.num_tokens, engine.finish_reason = 1, "stop"
        first, _ = await service.prefill("one", list(range(100)), GREEDY)
        assert (first.first_token_id, first.finish_reason, first.handle) == (7, "stop", "")
        single = Sampling(max_tokens=1)
        engine.finish_reason = "length"
        first, _ = await service.prefill("two", list(range(100)), single)
        assert (first.finish_reason, first.handle) == ("length", "")
        assert "two" not in engine.written
        async with asyncio.timeout(10):
            while await num_free(reader) < NUM_BLOCKS:
                await asyncio.sleep(0.05)

    run(staging, check)


def test_requests_that_cannot_be_served_are_refused_by_name(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        prompt = list(range(100))
        refused: list[tuple[type[OasisError], str, str, list[int], Sampling]] = [
            (InvalidRequestError, "request_id", "", prompt, GREEDY),
            (InvalidRequestError, "request_id", "x" * 129, prompt, GREEDY),
            (UnsupportedError, "min_tokens", "a", prompt, Sampling(min_tokens=1)),
            (UnsupportedError, "stop", "a", prompt, Sampling(stop=("x",))),
            (UnsupportedError, "prompt: expected at least 80 tokens", "a", prompt[:79], GREEDY),
            (InvalidRequestError, "prompt: expected at most 998 tokens", "a", [1] * 999, GREEDY),
        ]
        for cls, text, request_id, ids, sampling in refused:
            with pytest.raises(cls, match=rf"^{text}"):
                await service.prefill(request_id, ids, sampling)
        assert service.num_requests == 0
        assert service.counts.num_failed == 4  # two were never taken
        assert await num_free(reader) == NUM_BLOCKS

    run(staging, check)


def test_limits_hold_while_requests_are_under_way(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        engine.may_go_on.clear()
        under_way = asyncio.create_task(service.prefill("one", list(range(100)), GREEDY))
        while not service.num_waiting_tokens:
            await asyncio.sleep(0.01)
        assert (service.num_requests, service.num_waiting_tokens) == (1, 100)
        with pytest.raises(InvalidRequestError, match=r"^request_id"):
            await service.prefill("one", list(range(100)), GREEDY)
        second = asyncio.create_task(service.prefill("two", list(range(100)), GREEDY))
        await asyncio.sleep(0)
        with pytest.raises(PoolExhaustedError, match=r"^max_requests"):
            await service.prefill("three", list(range(100)), GREEDY)
        assert service.drain() == 2
        assert not service.is_ready
        with pytest.raises(PeerUnavailableError):
            await service.prefill("four", list(range(100)), GREEDY)
        engine.may_go_on.set()
        assert (await under_way)[0].handle
        assert (await second)[0].handle
        assert service.drain() == 0

    run(staging, check, max_requests=2)


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_that_is_ended_gives_its_blocks_back_when_its_writes_are_over(
    staging: StagingProcess, how: str
) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        engine.may_go_on.clear()
        under_way = asyncio.create_task(service.prefill("one", list(range(200)), GREEDY))
        while not engine.writes:
            await asyncio.sleep(0.01)
        if how == "abort":
            assert service.abort(["one", "other"]) == 1
            with pytest.raises(RequestAbortedError):
                await under_way
        else:
            under_way.cancel()
            with pytest.raises(asyncio.CancelledError):
                await under_way
        assert engine.writes == {}
        assert service.num_requests == 0
        async with asyncio.timeout(10):
            while await num_free(reader) < NUM_BLOCKS:
                await asyncio.sleep(0.05)

    run(staging, check)


def test_an_engine_without_an_answer_is_an_error_and_holds_nothing(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        engine.num_tokens, engine.finish_reason = 1, "error"
        with pytest.raises(EngineFailedError):
            await service.prefill("one", list(range(100)), GREEDY)
        async with asyncio.timeout(10):
            while await num_free(reader) < NUM_BLOCKS:
                await asyncio.sleep(0.05)

    run(staging, check)


def test_a_service_whose_staging_is_away_is_not_ready_and_refuses(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, FINGERPRINT, NUM_BLOCKS) as process:

        async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
            await asyncio.to_thread(process.stop)
            async with asyncio.timeout(20):
                while service.is_ready:
                    await asyncio.sleep(0.05)
            with pytest.raises(PeerUnavailableError):
                await service.prefill("one", list(range(100)), GREEDY)

        run(process, check)


def test_a_probe_block_is_handed_over_like_the_kv_of_a_request(staging: StagingProcess) -> None:
    async def check(service: PrefillService, engine: FakeEngine, reader: StagingSession) -> None:
        probe, digest = await service.probe()
        assert (digest, probe.num_blocks, probe.budget_blocks, probe.summary) == (b"digest", 1, 4, "minmax")
        lease = await asyncio.wrap_future(reader.accept(probe.handle))
        got = np.zeros((1, 3, FINGERPRINT.part_bytes), np.uint8)
        reader.register(got)
        assert (await asyncio.wrap_future(reader.fetch(lease, [0], 0, got))).tolist() == [0]
        np.testing.assert_array_equal(got.reshape(-1), engine.written["probe"].reshape(-1))
        await asyncio.wrap_future(reader.release(lease))
        engine.finish_reason = "error"
        with pytest.raises(PeerUnavailableError):
            await service.probe()
        async with asyncio.timeout(10):
            while await num_free(reader) < NUM_BLOCKS:
                await asyncio.sleep(0.05)
        service.drain()
        with pytest.raises(PeerUnavailableError, match="drains"):
            await service.probe()

    run(staging, check)


def test_equal_prompts_have_equal_keys_up_to_the_block_in_which_they_differ() -> None:
    prompt = list(range(100))
    keys = block_keys(prompt, 16)
    assert len(keys) == 6
    assert len(set(keys)) == 6
    assert block_keys(prompt[:70], 16) == keys[:4]
    other = [*prompt[:40], 0, *prompt[41:]]
    assert block_keys(other, 16)[:2] == keys[:2]
    assert not set(block_keys(other, 16)[2:]) & set(keys)


def test_a_key_names_the_token_behind_its_block_too() -> None:
    prompt = list(range(100))
    keys = block_keys(prompt, 16)
    assert block_keys(prompt[:97], 16) == keys
    assert block_keys(prompt[:96], 16) == keys[:5]
    other = [*prompt[:48], 0, *prompt[49:]]
    assert block_keys(other, 16)[:2] == keys[:2]
    assert block_keys(other, 16)[2] != keys[2]
