"""Sessions, the staging service and its agent, killed or stopped in the middle of what they do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from oasiskv.core.errors import (
    OasisError,
    PeerUnavailableError,
)
from oasiskv.services.clients.one_sided import MIN_CHUNK_BYTES
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession
from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import (
    NUM_BLOCKS,
    SHAPE,
    fetch,
    keys,
    random_blocks,
    session,
    stage,
    stats,
    until,
)

# Puts, or fetches, all blocks again and again until it is killed.
BUSY_PEER = """
import json, sys, numpy as np
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.services.clients.session import SessionConfig, StagingSession

job, address, shape, num_blocks = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
shape = Fingerprint(**shape)
config = SessionConfig(
    address=address, fingerprint=shape, name=job, may_write=job == "put", locality="remote", ttl_s=3.0
)
session = StagingSession(config)
assert session.path == "one-sided", session.path_reason
buffer = np.full((num_blocks, shape.num_parts, shape.part_bytes), 7, np.uint8)
session.register(buffer)
if job == "put":
    lease = session.allocate(num_blocks).result()
else:
    lease = session.lease([b"k%d" % i for i in range(num_blocks)]).result()
for number in range(10**6):
    work = getattr(session, job)(lease, range(num_blocks), 0, buffer)
    if number == 1:
        print("busy", flush=True)
    work.result()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagingProcess]:
    folder = tmp_path_factory.mktemp("staging")
    with StagingProcess(folder, SHAPE, NUM_BLOCKS, staging={"transport": "tcp"}) as server:
        yield server
        assert stats(server).num_leases == 0, "every exit of every test gave its leases back"
        assert server.stop() == 0


@contextlib.contextmanager
def busy_peer(server: StagingProcess, job: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = [job, server.address, json.dumps(asdict(SHAPE)), str(NUM_BLOCKS)]
    with subprocess.Popen([sys.executable, "-c", BUSY_PEER, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        yield process
        process.kill()


def test_a_reader_that_is_killed_in_the_middle_leaves_nothing_held(server: StagingProcess) -> None:
    with session(server, "mapped", may_write=True) as writer:
        writer.release(stage(writer, "k", random_blocks(6, NUM_BLOCKS)))
        with busy_peer(server, "fetch") as reader:
            with pytest.raises(OasisError, match="num_blocks"):
                writer.allocate(1).result()
            reader.send_signal(signal.SIGKILL)
            reader.wait()
        until(lambda: stats(server).num_links == 1)  # the writer's own
        until(lambda: stats(server).num_leases == 0)
        writer.release(writer.allocate(NUM_BLOCKS).result())


def test_a_writer_that_is_killed_in_the_middle_leaves_no_block_and_no_byte(server: StagingProcess) -> None:
    with session(server, "mapped", may_write=True) as watcher:
        with busy_peer(server, "put") as writer:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        until(lambda: stats(server).num_leases == 0 and stats(server).num_fenced_blocks == 0)
        zeros = np.zeros((NUM_BLOCKS, SHAPE.num_parts, SHAPE.part_bytes), np.uint8)
        lease = watcher.allocate(NUM_BLOCKS).result()
        from oasiskv.services.checksums import checksums

        # Sealing verifies the bytes against those of an empty pool.
        watcher.seal(lease, range(NUM_BLOCKS), keys("z", NUM_BLOCKS), checksums(zeros)).result()


def test_a_remote_writer_that_lives_keeps_its_blocks_from_others_when_its_lease_ends(server: StagingProcess) -> None:
    with session(server, "mapped", may_write=True) as watcher:
        with busy_peer(server, "put") as writer:
            writer.send_signal(signal.SIGSTOP)  # it renews nothing, but its bytes may be under way
            until(lambda: stats(server).num_fenced_blocks == NUM_BLOCKS)
            with pytest.raises(OasisError, match="num_blocks"):
                watcher.allocate(1).result()
            writer.kill()
        until(lambda: stats(server).num_fenced_blocks == 0)
        watcher.release(watcher.allocate(NUM_BLOCKS).result())


def test_a_service_that_is_killed_in_the_middle_is_told_for_each_block(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote", "transport": "tcp"}) as server:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="t", may_write=True, timeout_s=5.0)
        with StagingSession(config) as peer:
            data = random_blocks(7, NUM_BLOCKS)
            lease = stage(peer, "s", data)
            out = np.zeros_like(data)
            peer.register(out)
            assert not peer.fetch(lease, range(NUM_BLOCKS), 0, out).result().any()
            reading = peer.fetch(lease, range(NUM_BLOCKS), 0, out)
            agent = Path(f"/proc/{server.agent_pid()}")
            server.stop(signal.SIGKILL)
            until(lambda: not agent.exists())
            statuses = reading.result()
            right = statuses == FetchStatus.OK
            assert set(statuses.tolist()) <= {FetchStatus.OK, FetchStatus.UNAVAILABLE}
            np.testing.assert_array_equal(out[right], data[right])
            again = peer.fetch(lease, range(NUM_BLOCKS), 0, out).result()
            assert again.tolist() == [FetchStatus.UNAVAILABLE] * NUM_BLOCKS
            with pytest.raises(PeerUnavailableError):
                peer.put(lease, [0], 0, out[:1]).result()
            assert peer.path == "stream"


def test_when_the_agent_is_killed_streams_take_over_until_there_is_a_new_one(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote", "transport": "tcp"}) as server:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="t", may_write=True, timeout_s=5.0)
        with StagingSession(config) as peer:
            data = random_blocks(8, NUM_BLOCKS)
            lease = stage(peer, "a", data)
            out = np.zeros_like(data)
            peer.register(out)
            reading = peer.fetch(lease, range(NUM_BLOCKS), 0, out)
            agent = server.agent_pid()
            os.kill(agent, signal.SIGKILL)
            assert not reading.result().any()
            np.testing.assert_array_equal(out, data)
            until(lambda: peer.path == "one-sided")
            assert server.agent_pid() != agent
            for _ in range(2):
                out[:] = 0
                assert not peer.fetch(lease, range(NUM_BLOCKS), 0, out).result().any()
                np.testing.assert_array_equal(out, data)
            assert peer.path == "one-sided", peer.path_reason
            # The link that broke ends in the server when its stream does.
            until(lambda: stats(server).num_links == 1)
            with StagingSession(config) as later:
                assert later.path == "one-sided"
                statuses, again = fetch(later, later.lease(keys("a", 4)).result(), 4)
                assert not any(statuses)
                np.testing.assert_array_equal(again, data[:4])


def test_an_agent_that_stands_still_is_left_and_what_it_sends_late_lands_nowhere(tmp_path: Path) -> None:
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"locality": "remote", "transport": "tcp"}) as server:
        config = SessionConfig(address=server.address, fingerprint=SHAPE, name="t", may_write=True, timeout_s=2.0)
        with StagingSession(config) as peer:
            data = random_blocks(9, NUM_BLOCKS)
            lease = stage(peer, "s", data)
            out = np.zeros_like(data)
            peer.register(out)
            assert peer.path == "one-sided", peer.path_reason
            os.kill(server.agent_pid(), signal.SIGSTOP)
            try:
                # More than one chunk, so that both lanes wait for it in vain.
                assert out.nbytes >= 2 * MIN_CHUNK_BYTES
                assert not peer.fetch(lease, range(NUM_BLOCKS), 0, out).result().any()
                np.testing.assert_array_equal(out, data)
                assert peer.path == "stream"
                out[:] = 7
            finally:
                os.kill(server.agent_pid(), signal.SIGCONT)
            # Answered by the agent after it had gone on, so whatever was on its way before has been sent.
            with StagingSession(config) as later:
                assert later.path == "one-sided", later.path_reason
                assert not any(fetch(later, later.lease(keys("s", NUM_BLOCKS)).result(), NUM_BLOCKS)[0])
            assert (out == 7).all()


@pytest.mark.parametrize("way", ["mapped", "one-sided"])
def test_blocks_that_change_under_the_reader_are_lost_and_never_wrong(server: StagingProcess, way: str) -> None:
    with session(server, "mapped", may_write=True) as writer, session(server, way) as reader:
        old = random_blocks(11, NUM_BLOCKS)
        writer.release(stage(writer, f"t-{way}", old))
        lease = reader.lease(keys(f"t-{way}", NUM_BLOCKS)).result()
        statuses, _ = fetch(reader, lease, NUM_BLOCKS)
        assert not any(statuses)
        # The reader goes on with descriptors of a lease that it has no more, while the blocks get new content.
        out = np.zeros_like(old)
        reader.register(out)
        reader.release(lease)
        until(lambda: stats(server).num_leases == 0)
        reading = [reader.fetch(lease, range(NUM_BLOCKS), 0, out[:])]
        new = stage(writer, f"u-{way}", random_blocks(12, NUM_BLOCKS))
        first = reading[0].result()
        right = first == FetchStatus.OK
        assert set(first.tolist()) <= {FetchStatus.OK, FetchStatus.LOST}
        np.testing.assert_array_equal(out[right], old[right])
        assert reader.fetch(lease, range(NUM_BLOCKS), 0, out).result().tolist() == [FetchStatus.LOST] * NUM_BLOCKS
        writer.release(new)
