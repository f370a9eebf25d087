"""A block of random bytes that one worker writes is what another reads, or an error says why not."""

from concurrent.futures import Future

import pytest
import torch

from oasiskv.core.errors import CorruptBlockError, PeerUnavailableError
from oasiskv.engine.handover import Unattached
from oasiskv.engine.probe import Probes, digest_of, join_digests
from oasiskv.engine.state import CacheShape

SHAPE = CacheShape(
    num_layers=3,
    num_target_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    block_size=16,
    dtype=torch.float16,
    scale=0.4,
)


class Shelf(Unattached):
    """One block, whose transfers end when the test says so."""

    def __init__(self) -> None:
        self.data = torch.zeros(1, 3, 2, SHAPE.unit_bytes, dtype=torch.uint8)
        self.transfers: list[Future[None]] = []
        self.forgotten: list[str] = []

    def put(self, lease: str, block_indices: object, first_layer: int, data: torch.Tensor) -> "Future[None]":
        assert (block_indices, first_layer, data.is_contiguous()) == ([0], 0, True)
        self.data = data.clone()
        return self._begin()

    def fetch(self, lease: str, block_indices: object, first_layer: int, out: torch.Tensor) -> "Future[None]":
        assert (block_indices, first_layer) == ([0], 0)
        out.copy_(self.data)
        return self._begin()

    def receipt(self, lease: str) -> bytes:
        assert lease not in self.forgotten
        return lease.encode()

    def forget(self, lease: str) -> None:
        self.forgotten.append(lease)

    def _begin(self) -> "Future[None]":
        self.transfers.append(Future())
        return self.transfers[-1]


def test_what_one_worker_wrote_is_what_the_other_reads() -> None:
    shelf, writer, reader = Shelf(), Probes(SHAPE), Probes(SHAPE)
    assert writer.poll(shelf, "w", writes=True) is None
    assert writer.poll(shelf, "w", writes=True) is None
    assert len(shelf.transfers) == 1
    shelf.transfers[0].set_result(None)
    written = writer.poll(shelf, "w", writes=True)
    assert shelf.data.shape == (1, 3, 2, SHAPE.unit_bytes)
    assert len(set(shelf.data.flatten().tolist())) > 200
    assert written == (digest_of(shelf.data[:, :2], 0), b"w")
    assert reader.poll(shelf, "r", writes=False) is None
    shelf.transfers[1].set_result(None)
    assert reader.poll(shelf, "r", writes=False) == (written[0], b"")
    # The rank that is done first is asked again while others are under way.
    assert writer.poll(shelf, "w", writes=True) == written


def test_a_digest_is_the_same_however_heads_are_split_and_another_for_other_bytes_or_places() -> None:
    data = torch.randint(256, (1, 2, 6, 32), dtype=torch.uint8)
    whole = digest_of(data, 0)
    for size in (1, 2, 3):
        assert join_digests(digest_of(part, 6 // size * rank) for rank, part in enumerate(data.chunk(size, 2))) == whole
    other = data.clone()
    other[0, 1, 3, 5] ^= 1
    assert digest_of(other, 0) != whole
    assert digest_of(data.flip(1), 0) != whole
    assert digest_of(data.flip(2), 0) != whole
    assert digest_of(data, 1) != whole


def test_every_probe_has_bytes_of_its_own_and_a_lost_one_is_forgotten() -> None:
    shelf, probes = Shelf(), Probes(SHAPE)
    probes.poll(shelf, "a", writes=True)
    first = shelf.data
    shelf.transfers[0].set_result(None)
    assert shelf.forgotten == []
    probes.poll(shelf, "b", writes=True)
    assert not torch.equal(shelf.data, first)
    assert shelf.forgotten == ["a"]


def test_a_transfer_that_failed_is_an_error_at_every_call() -> None:
    shelf, probes = Shelf(), Probes(SHAPE)
    probes.poll(shelf, "a", writes=False)
    shelf.transfers[0].set_exception(CorruptBlockError("block_index: x"))
    for _ in range(2):
        with pytest.raises(CorruptBlockError):
            probes.poll(shelf, "a", writes=False)
    probes.poll(Unattached(), "b", writes=True)
    with pytest.raises(PeerUnavailableError):
        probes.poll(Unattached(), "b", writes=True)
