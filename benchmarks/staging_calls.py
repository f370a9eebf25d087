"""Measure the control plane of a staging service: the time of calls while many leases are held and peers call at once.

python benchmarks/staging_calls.py --leases 1000 --rate 100 --out calls.json

Calls are made at the given rate whatever the service does, so that one slow call makes others wait, as it would in use.
Service and callers are processes of their own. A host with other work shows its own delays in the 99th percentile; so
beside that of all calls the percentiles of each second are taken, of which the best is shown, and the service's time on
a core.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.checksums import checksums
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.staging.process import StagingProcess

NUM_PEERS = 8
BLOCKS_PER_LEASE = 16
# Small parts: the time of hashing and wiping is that of the bytes, which `oasiskv bench staging` measures.
SHAPE = Fingerprint(model_hash="bench", dtype="float16", block_size=2, num_layers=36, num_kv_heads=1, head_dim=64)
TTL_MS = 60_000


Times = dict[tuple[str, int], list[float]]
"""Seconds of each call, by name and by the second in which it began; those of the preparation are of second 0."""


class Peer:
    """A registered caller with leases on one prompt."""

    def __init__(self, client: StagingClient, number: int, times: Times) -> None:
        self.client = client
        self.times = times
        self.second = 0
        self.keys = [b"peer %d block %d" % (number, block) for block in range(BLOCKS_PER_LEASE)]
        self.taken: list[str] = []
        zeros = np.zeros((SHAPE.num_parts, SHAPE.part_bytes), np.uint8)
        self.sums = checksums(zeros).tolist()
        self.num_staged = 0

    async def call(self, name: str, request: object) -> Any:
        second, begin_s = self.second, time.perf_counter()
        answer: Any = await self.client.call(getattr(self.client.stub, name), request)
        self.times[name, second].append(time.perf_counter() - begin_s)
        return answer

    async def begin(self, num_leases: int) -> None:
        register = pb.RegisterPeerRequest(
            fingerprint=pb.Fingerprint(**asdict(SHAPE)), name="bench", access=pb.ACCESS_STREAM
        )
        self.peer_id: str = (await self.call("RegisterPeer", register)).peer_id
        await self.stage(self.keys)
        for _ in range(num_leases):
            await self.lease()

    async def stage(self, keys: list[bytes]) -> str:
        request = pb.AllocateRequest(peer_id=self.peer_id, num_blocks=len(keys), ttl_ms=TTL_MS)
        lease_id: str = (await self.call("Allocate", request)).lease_id
        blocks = [pb.SealedBlock(block_index=i, block_key=key, checksums=self.sums) for i, key in enumerate(keys)]
        seal = pb.SealRequest(peer_id=self.peer_id, lease_id=lease_id, blocks=blocks)
        await self.call("Seal", seal)
        return lease_id

    async def lease(self) -> None:
        keys = pb.BlockKeys(block_keys=self.keys)
        request = pb.LeaseRequest(peer_id=self.peer_id, keys=keys, ttl_ms=TTL_MS)
        self.taken.append((await self.call("Lease", request)).lease_id)

    async def release(self) -> None:
        lease_ids = [self.taken.pop(0)] if self.taken else []
        await self.call("Release", pb.ReleaseRequest(peer_id=self.peer_id, lease_ids=lease_ids))

    async def renew(self) -> None:
        await self.call("Renew", pb.RenewRequest(peer_id=self.peer_id, ttl_ms=TTL_MS))

    async def locate(self) -> None:
        request = pb.LocateRequest(peer_id=self.peer_id, block_keys=self.keys * 4)
        await self.call("Locate", request)

    async def describe(self) -> None:
        request = pb.FetchDescriptorsRequest(peer_id=self.peer_id, lease_id=self.taken[-1], in_columns=True)
        await self.call("FetchDescriptors", request)

    async def find(self) -> None:
        await self.call("Find", pb.FindRequest(block_keys=self.keys))

    async def allocate_and_seal(self) -> None:
        self.num_staged += 1
        lease_id = await self.stage([b"%s new %d" % (self.keys[0], self.num_staged)])
        await self.call("Release", pb.ReleaseRequest(peer_id=self.peer_id, lease_ids=[lease_id]))


async def measure(address: str, num_leases: int, rate: float, seconds: float) -> Times:
    rng = random.Random(0)
    times: Times = defaultdict(list)
    async with StagingClient(address) as client:
        peers = [Peer(client, number, times) for number in range(NUM_PEERS)]
        for peer in peers:
            await peer.begin(num_leases // NUM_PEERS)
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, start_s + number / rate - time.perf_counter()))
                peer = rng.choice(peers)
                peer.second = 1 + int(number / rate)
                # As many leases are taken as given back, so that their number stays.
                name = ("lease", "release", "locate", "describe", "renew", "find", "allocate_and_seal")[number % 7]
                calls.create_task(getattr(peer, name)())
        num_held = (await client.call(client.stub.Stats, pb.StatsRequest())).num_leases
    print(f"{num_held} leases at the end", file=sys.stderr)
    return {key: found for key, found in times.items() if key[1]}


def row(name: str, seconds: list[list[float]]) -> dict[str, object]:
    """Return the percentiles of one kind of call, given the times by second."""
    cut = statistics.quantiles([one for found in seconds for one in found], n=100)
    best_s = min(statistics.quantiles(found, n=100)[98] for found in seconds if len(found) > 1)
    return {
        "call": name,
        "calls": sum(map(len, seconds)),
        "p50_ms": round(cut[49] * 1000, 2),
        "p99_ms": round(cut[98] * 1000, 2),
        "best_second_p99_ms": round(best_s * 1000, 2),
    }


def waited_s(pid: int) -> float:
    """Return the seconds that the threads of a process were ready and waited for a core, so far."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=1000, help="leases of 16 blocks, held all the time (1000)")
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second (100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long (20)")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    with TemporaryDirectory() as folder, StagingProcess(Path(folder), SHAPE, 8192, staging={"transport": "none"}) as s:
        process = psutil.Process(s.process.pid)
        before_s = process.cpu_times().user + process.cpu_times().system
        before_waited_s = waited_s(s.process.pid)
        times = asyncio.run(measure(s.address, args.leases, args.rate, args.seconds))
        cpu_s = process.cpu_times().user + process.cpu_times().system - before_s
        wait_s = waited_s(s.process.pid) - before_waited_s
    names = {name for name, _ in times}
    rows = [row(name, [found for (one, _), found in times.items() if one == name]) for name in sorted(names)]
    by_second: dict[int, list[float]] = defaultdict(list)
    for (_, second), found in times.items():
        by_second[second] += found
    rows.append(row("all", list(by_second.values())))
    # Of seven kinds one makes three calls; and the leases were taken by one each.
    num_calls = args.leases + args.rate * args.seconds * 9 / 7
    # What the service took of a core, and how long it was ready and waited for one that others had.
    per_call = {"core_ms": round(1000 * cpu_s / num_calls, 3), "core_wait_ms": round(1000 * wait_s / num_calls, 3)}
    rows.append({"per_call": per_call})
    rows.append({"load_average": os.getloadavg()[0]})
    about = {"host": platform.machine(), "num_cpus": os.cpu_count(), "kernel": platform.release()}
    text = json.dumps({"command": " ".join(["python", *sys.argv]), **about, "results": rows}, indent=1)
    print(text) if args.out is None else args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
