"""When the process that carries one-sided transfers is started, and started again."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.core.errors import UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.services.staging import data_plane as data_plane_module
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.fabric import Transport
from oasiskv.services.staging.memory import StagingMemory

SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
CHOSEN = Transport(name="tcp", reason="a test says so")
ANSWER = 'echo \'{"metadata": "00", "blocks_address": 1, "generations_address": 2}\'; exec sleep 60'


@pytest.fixture
def memory() -> Iterator[StagingMemory]:
    made = StagingMemory(SHAPE, 2)
    yield made
    made.close()


def agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a script stand for the agent; returns where its lines go."""
    script = folder / "agent"
    script.write_text(f"#!/bin/sh\n. {folder}/lines\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    return folder / "lines"


def test_an_agent_that_was_too_slow_or_died_is_tried_again_after_a_while(
    memory: StagingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = agent(tmp_path, monkeypatch)

    async def scenario() -> None:
        made = DataPlane(CHOSEN, memory)
        for says, start_s, reason in (
            ("exec sleep 60", 0.3, "did not start within"),
            ("exit 3", 30.0, "ended without a word"),
        ):
            lines.write_text(says)
            monkeypatch.setattr(data_plane_module, "RETRY_S", 3600.0)
            monkeypatch.setattr(data_plane_module, "START_TIMEOUT_S", start_s)
            with pytest.raises(UnsupportedError, match=reason):
                await made.offer()
            assert made.transport.name == "none"
            assert reason in made.transport.reason
            lines.write_text(ANSWER)
            with pytest.raises(UnsupportedError, match=reason):  # not before its time
                await made.offer()
            made._retry_at_s = 0.0
        offer = await made.offer()
        assert (offer.metadata, made.transport) == (b"\0", CHOSEN)
        assert await made.offer() is offer
        await made.stop()

    asyncio.run(scenario())


def test_what_an_agent_says_of_this_host_is_final(
    memory: StagingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = agent(tmp_path, monkeypatch)
    lines.write_text('echo \'{"error": "no NIXL here"}\'')
    monkeypatch.setattr(data_plane_module, "RETRY_S", 0.0)

    async def scenario() -> None:
        made = DataPlane(CHOSEN, memory)
        await made.start()
        assert made.transport == Transport(name="none", reason="tcp cannot be used: no NIXL here")
        lines.write_text(ANSWER)
        with pytest.raises(UnsupportedError, match="no NIXL here"):
            await made.offer()

    asyncio.run(scenario())
