"""Engines of different tensor-parallel sizes find their own KV heads in what others staged."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oasiskv.core.errors import UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.engine.state import CacheShape
from oasiskv.services.clients.blocks import SessionBlocks
from oasiskv.services.clients.session import SessionConfig, StagingSession
from oasiskv.services.staging.process import StagingProcess

FINGERPRINT = Fingerprint(
    model_hash="m", dtype="float16", block_size=16, num_layers=2, num_kv_heads=6, head_dim=8, tp_size=6
)
WHOLE = CacheShape(
    num_layers=2,
    num_target_layers=2,
    num_query_heads=6,
    num_kv_heads=6,
    head_dim=8,
    block_size=16,
    dtype=torch.float16,
    scale=1.0,
)


def shape_of(rank: int, size: int) -> CacheShape:
    return replace(WHOLE, num_kv_heads=6 // size, num_query_heads=6 // size, tp_rank=rank, tp_size=size)


@contextlib.contextmanager
def joined(owner: StagingSession, config: SessionConfig, shape: CacheShape) -> Iterator[SessionBlocks]:
    """Give one worker its way to staging."""
    blocks = SessionBlocks(StagingSession(config, token=owner.token), shape)
    try:
        yield blocks
    finally:
        blocks.close()


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 1), (2, 3), (6, 2), (2, 2)])
def test_every_rank_reads_its_own_heads_whoever_wrote_them(tmp_path: Path, writers: int, readers: int) -> None:
    data = torch.randn(5, 2, 6, 16, 16).half()  # blocks, layers, heads, tokens, K|V
    config = SessionConfig(address="", fingerprint=FINGERPRINT, name="test", may_write=True)
    with StagingProcess(tmp_path, FINGERPRINT, 16) as staging:
        config = replace(config, address=staging.address)
        with StagingSession(config) as owner:
            lease = owner.allocate(5).result()
            sums = torch.zeros(5, FINGERPRINT.num_parts, dtype=torch.uint64).numpy()
            for rank in range(writers):
                with joined(owner, config, shape_of(rank, writers)) as blocks:
                    mine = data.chunk(writers, 2)[rank].contiguous()
                    blocks.put(lease.token, range(5), 0, mine).result()
                    receipt = torch.frombuffer(bytearray(blocks.receipt(lease.token)), dtype=torch.uint64).numpy()
                    sums |= receipt.reshape(sums.shape)
            owner.seal(lease, range(5), [bytes([index]) for index in range(5)], sums).result()
            for rank in range(readers):
                with joined(owner, config, shape_of(rank, readers)) as blocks:
                    expected = data.chunk(readers, 2)[rank]
                    out = torch.empty(5, 2, 6 // readers, 16, 16, dtype=torch.float16)
                    blocks.fetch(lease.token, range(5), 0, out).result()
                    assert torch.equal(out, expected)
                    part = torch.empty(2, 1, 6 // readers, 16, 16, dtype=torch.float16)
                    blocks.fetch(lease.token, [3, 1], 1, part).result()
                    assert torch.equal(part, expected[[3, 1], 1:])


def test_a_drafter_s_layers_that_are_not_staged_read_as_zeros(tmp_path: Path) -> None:
    data = torch.randn(3, 3, 6, 16, 16).half()
    shape = replace(WHOLE, num_layers=3)
    with StagingProcess(tmp_path, FINGERPRINT, 8) as staging:
        config = SessionConfig(address=staging.address, fingerprint=FINGERPRINT, name="test", may_write=True)
        with StagingSession(config) as owner:
            lease = owner.allocate(3).result()
            with joined(owner, config, shape) as blocks:
                blocks.put(lease.token, range(3), 0, data).result()
                blocks.put(lease.token, range(3), 2, data[:, 2:].contiguous()).result()
                receipt = torch.frombuffer(bytearray(blocks.receipt(lease.token)), dtype=torch.uint64).numpy()
                sums = receipt.reshape(3, FINGERPRINT.num_parts)
                owner.seal(lease, range(3), [bytes([index]) for index in range(3)], sums).result()
                out = torch.full_like(data, 5)
                blocks.fetch(lease.token, range(3), 0, out).result()
                assert torch.equal(out[:, :2], data[:, :2])
                assert not out[:, 2].any()
                part = torch.full_like(data[:, 1:], 5)
                blocks.fetch(lease.token, range(3), 1, part).result()
                assert torch.equal(part[:, 0], data[:, 1])
                assert not part[:, 1].any()
                blocks.fetch(lease.token, [2], 2, part[:1, 1:].contiguous()).result()


def test_ranks_that_cannot_be_given_out_evenly_are_refused(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, FINGERPRINT, 4) as staging:
        config = SessionConfig(address=staging.address, fingerprint=FINGERPRINT, name="test", may_write=True)
        with StagingSession(config) as session, pytest.raises(UnsupportedError, match=r"^fingerprint.tp_size: "):
            SessionBlocks(session, replace(WHOLE, tp_size=4))
