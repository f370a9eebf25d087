"""Peers that write and read by every path are killed at random moments, while others go on."""

import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from oasiskv.services.staging.process import StagingProcess
from oasiskv.services.staging.testing import NUM_BLOCKS, SHAPE, WAYS, session, stats, until

# Stages and reads prompts that its seed names, until it is killed; the bytes of a block follow from its key.
PEER = """
import json, random, sys, numpy as np
from oasiskv.core.errors import BlockNotFoundError, LeaseExpiredError, PoolExhaustedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.services.clients.session import FetchStatus, SessionConfig, StagingSession

shape, address = Fingerprint(**json.loads(sys.argv[1])), sys.argv[2]
settings, seed = json.loads(sys.argv[3]), sys.argv[4]
chance = random.Random(seed)
config = SessionConfig(address=address, fingerprint=shape, name=seed, may_write=True, ttl_s=3.0, **settings)
session = StagingSession(config)
buffer = np.zeros((12, shape.num_parts, shape.part_bytes), np.uint8)
session.register(buffer)

def content(prompt, block):
    return np.random.default_rng([prompt, block]).integers(0, 256, buffer.shape[1:], np.uint8)

print("ready", flush=True)
while True:
    prompt, num_blocks = chance.randrange(40), chance.randrange(1, 12)
    blocks = range(num_blocks)
    keys = [b"%d %d" % (prompt, block) for block in blocks]
    try:
        if chance.random() < 0.5:
            lease = session.allocate(num_blocks).result()
            for block in blocks:
                buffer[block] = content(prompt, block)
            session.put(lease, blocks, 0, buffer[:num_blocks]).result()
            session.seal(lease, blocks, keys).result()
        else:
            lease = session.lease(keys).result()
            found = session.fetch(lease, range(lease.num_blocks), 0, buffer[: lease.num_blocks]).result()
            for block in range(lease.num_blocks):
                if found[block] == FetchStatus.OK:
                    assert np.array_equal(buffer[block], content(prompt, block)), "wrong bytes"
                elif found[block] != FetchStatus.LOST:
                    sys.exit(f"status {found[block]}")
        session.release(lease).result()
    except (BlockNotFoundError, LeaseExpiredError, PoolExhaustedError):
        pass
"""


@pytest.mark.timeout(1800)
def test_whoever_is_killed_nobody_reads_a_wrong_byte_and_nothing_stays_held(tmp_path: Path) -> None:
    chance = random.Random(20261130)
    with StagingProcess(tmp_path, SHAPE, NUM_BLOCKS, staging={"transport": "tcp"}) as server:
        for number in range(40):
            peers = []
            for place in range(3):
                settings = json.dumps(WAYS[chance.choice(sorted(WAYS))])
                arguments = [json.dumps(asdict(SHAPE)), server.address, settings, f"{number}.{place}"]
                peers.append(subprocess.Popen([sys.executable, "-c", PEER, *arguments], stdout=subprocess.PIPE))
            for peer in peers:
                with peer:
                    assert peer.stdout is not None
                    assert peer.stdout.readline() == b"ready\n"
                    try:
                        pytest.fail(f"a peer ended by itself with {peer.wait(timeout=chance.uniform(0.1, 2.0))}")
                    except subprocess.TimeoutExpired:
                        peer.kill()
        until(lambda: stats(server).num_leases == 0 and stats(server).num_links == 0)
        found = stats(server)
        assert (found.num_fenced_blocks, found.num_free_blocks) == (0, NUM_BLOCKS)
        with session(server, "mapped", may_write=True) as last:
            last.release(last.allocate(NUM_BLOCKS).result()).result()
