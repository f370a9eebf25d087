"""What tests of sessions say often; each takes the process that `StagingProcess` started."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services.clients.session import Lease, SessionConfig, StagingSession
from oasiskv.services.staging.process import StagingProcess

# A pool of 32 MiB: a transfer of all of it takes long enough to be interrupted.
SHAPE = Fingerprint(model_hash="m", dtype="float16", block_size=16, num_layers=4, num_kv_heads=8, head_dim=128)
NUM_BLOCKS = 128
WAYS: dict[str, dict[str, Any]] = {"mapped": {}, "one-sided": {"locality": "remote"}, "stream": {"is_strict": True}}


def stats(server: StagingProcess) -> pb.StatsResponse:
    """Return the counts of a service."""
    # Not a session: that would count itself.
    with grpc.insecure_channel(server.address) as channel:
        answer: pb.StatsResponse = staging_pb2_grpc.StagingStub(channel).Stats(pb.StatsRequest(), timeout=10)
    return answer


def session(server: StagingProcess, way: str, *, may_write: bool = False, ttl_s: float = 30.0) -> StagingSession:
    """Open a session whose bytes move the given way."""
    config = SessionConfig(
        address=server.address, fingerprint=SHAPE, name="test", may_write=may_write, ttl_s=ttl_s, **WAYS[way]
    )
    made = StagingSession(config)
    assert made.path == way, made.path_reason
    return made


def random_blocks(seed: int, num_blocks: int) -> np.ndarray:
    """Return `[num_blocks, num_parts, part_bytes]`."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, SHAPE.num_parts, SHAPE.part_bytes), np.uint8)


def keys(name: str, num_blocks: int) -> list[bytes]:
    """Return block keys."""
    return [b"%s%d" % (name.encode(), i) for i in range(num_blocks)]


def stage(writer: StagingSession, name: str, data: np.ndarray) -> Lease:
    """Put and seal blocks, and return the lease that holds them."""
    writer.register(data)
    lease = writer.allocate(len(data)).result()
    writer.put(lease, range(len(data)), 0, data).result()
    writer.seal(lease, range(len(data)), keys(name, len(data))).result()
    return lease


def fetch(reader: StagingSession, lease: Lease, num_blocks: int) -> tuple[list[int], np.ndarray]:
    """Read the first blocks of a lease, and return their statuses and bytes."""
    out = np.zeros((num_blocks, SHAPE.num_parts, SHAPE.part_bytes), np.uint8)
    reader.register(out)
    return reader.fetch(lease, range(num_blocks), 0, out).result().tolist(), out


def until(condition: Callable[[], bool]) -> None:
    """Wait for what will be true in time."""
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
