"""A staging service that was killed and started again, and the sessions of processes that go on meanwhile."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.core.errors import BlockNotFoundError, LeaseExpiredError, OasisError, PeerUnavailableError
from oasiskv.services.clients.session import FetchStatus, Lease, SessionConfig, StagingSession
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.staging.disk_file import ALIGNMENT
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import (
    NUM_BLOCKS,
    SHAPE,
    WAYS,
    fetch,
    keys,
    random_blocks,
    stage,
    stats,
    until,
)


class Restarted:
    """A service that can be killed and put back at its address."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"staging": {"transport": "tcp"}} | settings
        self.server = StagingProcess(folder, SHAPE, NUM_BLOCKS, **self.settings)

    def kill(self) -> None:
        self.server.stop(signal.SIGKILL)

    def start(self) -> None:
        self.server = StagingProcess(self.folder, SHAPE, NUM_BLOCKS, address=self.server.address, **self.settings)


@contextlib.contextmanager
def restarted(folder: Path, **settings: Any) -> Iterator[Restarted]:
    made = Restarted(folder, **settings)
    try:
        yield made
    finally:
        made.kill()


def open_session(address: str, way: str, **settings: Any) -> StagingSession:
    config = SessionConfig(
        address=address, fingerprint=SHAPE, name="test", may_write=True, timeout_s=5.0, **WAYS[way], **settings
    )
    return StagingSession(config)


def allocated(peer: StagingSession, num_blocks: int) -> Lease:
    """Take blocks as soon as the service answers again."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return peer.allocate(num_blocks).result()
        except PeerUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.mark.parametrize("way", WAYS)
def test_a_session_goes_on_after_its_service_was_killed_and_started_again(tmp_path: Path, way: str) -> None:
    data, out = random_blocks(31, 8), np.zeros((8, SHAPE.num_parts, SHAPE.part_bytes), np.uint8)
    with restarted(tmp_path) as service, open_session(service.server.address, way) as peer:
        peer.register(out)
        lease = stage(peer, "old", data)
        unsealed = peer.allocate(2).result()
        assert not peer.fetch(lease, range(8), 0, out).result().any()
        service.kill()
        for place in range(2):
            statuses = peer.fetch(lease, range(8), 0, out).result()
            right = statuses == FetchStatus.OK  # who maps the memory still has it
            assert set(statuses[~right].tolist()) <= {FetchStatus.UNAVAILABLE}, place
            np.testing.assert_array_equal(out[right], data[right])
        with pytest.raises(PeerUnavailableError):
            peer.allocate(1).result()

        service.start()
        fresh = allocated(peer, 8)
        assert peer.num_reconnects == 1
        assert peer.path == way, peer.path_reason
        assert peer.fetch(lease, range(8), 0, out).result().tolist() == [FetchStatus.LOST] * 8
        for refused in (
            lambda: peer.put(unsealed, [0, 1], 0, data[:2]),
            lambda: peer.seal(unsealed, [0, 1], keys("never", 2)),
            lambda: peer.hand_off(lease),
        ):
            with pytest.raises(LeaseExpiredError):
                refused().result()
        with pytest.raises(BlockNotFoundError):
            peer.lease(keys("old", 8)).result()
        peer.release(lease, unsealed).result()

        peer.put(fresh, range(8), 0, data).result()  # from the buffers of before
        peer.seal(fresh, range(8), keys("new", 8)).result()
        out[:] = 0
        assert not peer.fetch(fresh, range(8), 0, out).result().any()
        np.testing.assert_array_equal(out, data)
        assert peer.num_retried_blocks <= 16
        peer.release(fresh).result()
        found = stats(service.server)
        assert (found.num_leases, found.num_peers) == (0, 1)
        assert found.num_links == (0 if way == "stream" else 1)


def test_a_session_without_work_finds_the_new_service_by_itself(tmp_path: Path) -> None:
    with restarted(tmp_path) as service, open_session(service.server.address, "mapped", ttl_s=1.0) as peer:
        service.kill()
        service.start()
        until(lambda: peer.num_reconnects == 1)
        assert fetch(peer, stage(peer, "n", random_blocks(30, 2)), 2)[0] == [0, 0]


def test_what_reached_the_disk_is_read_by_the_same_session_after_the_restart(tmp_path: Path) -> None:
    data = random_blocks(32, 4)
    (tmp_path / "disk").mkdir()
    disk = {
        "folder": str(tmp_path / "disk"),
        "max_bytes": ALIGNMENT + 16 * (SHAPE.block_bytes + ALIGNMENT),
        "use_direct_io": False,
    }
    with restarted(tmp_path, disk=disk) as service, open_session(service.server.address, "mapped", ttl_s=1.0) as peer:
        peer.release(stage(peer, "d", data))
        until(lambda: stats(service.server).num_held_disk_blocks == 4)
        service.kill()
        service.start()
        until(lambda: peer.num_reconnects == 1)
        first = peer.lease(keys("d", 4), wait_blocks=1).result()
        assert first.num_blocks == 1
        lease = peer.lease(keys("d", 4), min_blocks=4).result()
        statuses, out = fetch(peer, lease, 4)
        assert not any(statuses)
        np.testing.assert_array_equal(out, data)


def test_certificates_that_are_replaced_are_used_by_the_service_and_by_sessions_that_go_on(tmp_path: Path) -> None:
    def issue() -> None:
        authority = make_certificate(tmp_path, "authority")
        for name in ("server", "peer"):
            make_certificate(tmp_path, name, authority)

    issue()
    tls = {name: str(path) for name, path in asdict(tls_files(tmp_path, "server")).items()}
    with restarted(tmp_path, tls=tls, staging={"is_strict": True, "memory_socket": ""}) as service:
        address = service.server.address
        with open_session(address, "stream", ttl_s=1.0, tls=tls_files(tmp_path, "peer")) as peer:
            lease = stage(peer, "t", random_blocks(33, 2))
            issue()  # the old authority is worth nothing from here on
            with open_session(address, "stream", tls=tls_files(tmp_path, "peer")) as another:
                assert fetch(another, another.lease(keys("t", 2)).result(), 2)[0] == [0, 0]
            assert fetch(peer, lease, 2)[0] == [0, 0], "a connection that is open goes on"
            service.kill()
            service.start()
            until(lambda: peer.num_reconnects == 1)
            assert fetch(peer, stage(peer, "u", random_blocks(34, 2)), 2)[0] == [0, 0]


def test_a_peer_that_others_share_is_not_replaced_behind_their_backs(tmp_path: Path) -> None:
    with restarted(tmp_path) as service:
        address = service.server.address
        with (
            open_session(address, "stream", reconnects=False) as first,
            StagingSession(
                SessionConfig(address=address, fingerprint=SHAPE, name="second", may_write=True, is_strict=True),
                token=first.token,
            ) as second,
        ):
            token = first.token
            service.kill()
            service.start()
            for peer in (first, second):
                with pytest.raises(LeaseExpiredError):
                    allocated(peer, 1)
            assert first.token == token
            assert first.num_reconnects == second.num_reconnects == 0


def test_a_session_that_is_closed_while_its_service_is_away_ends(tmp_path: Path) -> None:
    with restarted(tmp_path) as service:
        peer = open_session(service.server.address, "mapped", ttl_s=1.0)
        service.kill()
        with pytest.raises(OasisError):
            peer.allocate(1).result()
        peer.close()
        with pytest.raises(RuntimeError):
            peer.put(None, [0], 0, np.zeros(1, np.uint8))  # type: ignore[arg-type]
