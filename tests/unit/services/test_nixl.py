import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.errors import InvalidRequestError, PeerUnavailableError, UnsupportedError
from oasiskv.services import nixl
from oasiskv.services.nixl import NixlAgent, _joined, net_devices


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.integers(1, 3))
def test_joined_pieces_copy_the_same_bytes_in_the_same_order(pairs: list[tuple[int, int]], size: int) -> None:
    local, remote = (np.array([pair[i] * size for pair in pairs], np.uint64) for i in (0, 1))
    here, there, sizes = _joined(local, remote, size)

    def bytes_of(starts: np.ndarray, lengths: np.ndarray) -> list[int]:
        return [int(start) + i for start, length in zip(starts, lengths, strict=True) for i in range(int(length))]

    same = np.full(len(pairs), size, np.uint64)
    assert bytes_of(here, sizes) == bytes_of(local, same)
    assert bytes_of(there, sizes) == bytes_of(remote, same)


def test_what_lies_side_by_side_on_both_ends_is_one_piece() -> None:
    here, there, sizes = _joined(np.array([0, 8, 16, 40], np.uint64), np.array([80, 88, 0, 8], np.uint64), 8)
    assert (here.tolist(), there.tolist(), sizes.tolist()) == ([0, 16, 40], [80, 0, 8], [16, 8, 8])


def test_a_copy_between_two_agents_and_the_end_of_one() -> None:
    ends = [NixlAgent(f"test-{i}") for i in range(2)]
    data = [np.arange(4096, dtype=np.uint16).view(np.uint8), np.zeros(8192, np.uint8)]
    for end, memory in zip(ends, data, strict=True):
        end.register(memory)
    remote = ends[1].connect(ends[0].metadata())
    places = np.array([4096, 0, 1024], np.uint64)

    def copy(local: np.ndarray) -> None:
        ends[1].start(
            remote,
            is_read=True,
            local=np.uint64(local.ctypes.data) + places,
            remote_addresses=np.uint64(data[0].ctypes.data) + places,
            num_bytes=512,
        ).wait(10.0)

    copy(data[1])
    for start in range(0, 8192, 512):
        expected = data[0][start : start + 512] if start in places.tolist() else np.zeros(512, np.uint8)
        np.testing.assert_array_equal(data[1][start : start + 512], expected)
    with pytest.raises(InvalidRequestError, match=r"^buffer"):
        copy(np.zeros(8192, np.uint8))
    ends[1].disconnect(remote)
    ends[1].disconnect(remote)
    with pytest.raises(PeerUnavailableError, match="nothing is copied"):
        copy(data[1])


def test_metadata_that_is_none_is_refused() -> None:
    with pytest.raises(PeerUnavailableError):
        NixlAgent("test").connect(b"no metadata")


def test_without_the_package_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("absent_module",))
    nixl.load.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"nixl-cu13 to load, got absent_module"):
            NixlAgent("test")
    finally:
        nixl.load.cache_clear()


def test_only_a_service_of_this_host_alone_keeps_to_the_loopback() -> None:
    for address in ("127.0.0.1:7411", "127.3.0.1:0", "[::1]:7411", "localhost:7411"):
        assert net_devices(address) == "lo"
    for address in ("0.0.0.0:7411", "[::]:7411", "192.0.2.7:7411", "staging.example:7411"):
        assert net_devices(address) == ""
