"""Staging processes and their clients, for tests: a small pool, and a peer with what tests say often."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import PeerUnavailableError, TransferTimeoutError
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.checksums import checksums
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig

NUM_BLOCKS, NUM_PARTS, PART_BYTES = 16, 3, 256
FINGERPRINT = pb.Fingerprint(
    model_hash="m",
    dtype="float16",
    block_size=4,
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    tp_size=1,
    layout="RLHTKV",
    kv_revision=1,
)
CONFIG = f"""
[staging]
pool_bytes = {NUM_BLOCKS * NUM_PARTS * PART_BYTES}
drain_s = 20.0
%s
[fingerprint]
model_hash = "m"
dtype = "float16"
block_size = 4
num_layers = 3
num_kv_heads = 2
head_dim = 8
[server]
address = "127.0.0.1:0"
%s
"""
SLOT_BYTES = 2 * ALIGNMENT
"""Of the disk tier: a root record and a block."""
NUM_WRITERS = DiskConfig(folder=".", max_bytes=1).num_writers
Content = Mapping[bytes, NDArray[np.uint8]]
"""Blocks by key, each `[NUM_PARTS, PART_BYTES]`."""


class Server:
    """A staging process of `NUM_BLOCKS` blocks."""

    def __init__(self, folder: Path, setting: str, tables: str = "") -> None:
        """Start it and wait until it answers.

        Args:
            folder: Where its configuration file goes.
            setting: Lines of `[staging]`.
            tables: Further tables.
        """
        path = folder / "staging.toml"
        path.write_text(CONFIG % (setting, tables))
        command = [sys.executable, "-m", "oasiskv.services.staging", "--config", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.folder = folder
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "listens on port" not in line:
            self.end(signal.SIGKILL)
            raise AssertionError(f"the service ended at its start: {line!r}")
        self.address = f"127.0.0.1:{line.split()[-1]}"

    def end(self, number: int) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)  # does nothing to one that has ended
        code = self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def running(folder: Path, setting: str, tables: str = "") -> Iterator[Server]:
    """Run a `Server`; killed at the end if it still runs."""
    server = Server(folder, setting, tables)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)


class Peer:
    """A registered client; its calls raise what the contract names."""

    def __init__(self, client: StagingClient, registered: pb.RegisterPeerResponse) -> None:
        self.client = client
        self.registered = registered
        self.peer_id = registered.peer_id
        self.leases: list[str] = []
        """Ids of all leases that were taken, ended or not."""

    @classmethod
    async def register(cls, client: StagingClient, access: "pb.Access" = pb.ACCESS_STREAM) -> Self:
        """Register with the fingerprint of the tests."""
        request = pb.RegisterPeerRequest(fingerprint=FINGERPRINT, name="test", access=access)
        return cls(client, await client.call(client.stub.RegisterPeer, request))

    async def allocate(self, num_blocks: int, ttl_ms: int = 30_000) -> pb.AllocateResponse:
        """Take blocks to write to."""
        request = pb.AllocateRequest(peer_id=self.peer_id, num_blocks=num_blocks, ttl_ms=ttl_ms)
        lease: pb.AllocateResponse = await self.client.call(self.client.stub.Allocate, request)
        self.leases.append(lease.lease_id)
        return lease

    async def seal(self, lease_id: str, content: Content) -> pb.SealResponse:
        """Seal the blocks of a lease, from the first on."""
        blocks = [
            pb.SealedBlock(block_index=index, block_key=key, checksums=checksums(data).tolist())
            for index, (key, data) in enumerate(content.items())
        ]
        request = pb.SealRequest(peer_id=self.peer_id, lease_id=lease_id, blocks=blocks)
        sealed: pb.SealResponse = await self.client.call(self.client.stub.Seal, request)
        return sealed

    async def stage(self, content: Content) -> str:
        """Allocate, put and seal; return the write lease."""
        lease = await self.allocate(len(content))
        parts = [
            (index, part, data[part].tobytes())
            for index, data in enumerate(content.values())
            for part in range(NUM_PARTS)
        ]
        assert await self.client.put(self.peer_id, lease.lease_id, parts) == len(parts)
        await self.seal(lease.lease_id, content)
        return lease.lease_id

    async def lease(self, *keys: bytes, min_blocks: int = 0, ttl_ms: int = 30_000) -> pb.LeaseResponse:
        """Take a read lease by keys."""
        request = pb.LeaseRequest(
            peer_id=self.peer_id, keys=pb.BlockKeys(block_keys=keys), min_blocks=min_blocks, ttl_ms=ttl_ms
        )
        lease: pb.LeaseResponse = await self.client.call(self.client.stub.Lease, request)
        self.leases.append(lease.lease_id)
        return lease

    async def release(self, *lease_ids: str) -> int:
        """Give leases back, all of them if none is named."""
        request = pb.ReleaseRequest(peer_id=self.peer_id, lease_ids=lease_ids or self.leases)
        released: pb.ReleaseResponse = await self.client.call(self.client.stub.Release, request)
        return released.num_released

    async def locate(self, *keys: bytes) -> "list[pb.Tier]":
        """Return the tier of each key."""
        request = pb.LocateRequest(peer_id=self.peer_id, block_keys=keys)
        return list((await self.client.call(self.client.stub.Locate, request)).tiers)

    async def find(self, *keys: bytes) -> tuple[dict[str, int], bool]:
        """Return the prefix that each address holds, and whether the directory answered."""
        found: pb.FindResponse = await self.client.call(self.client.stub.Find, pb.FindRequest(block_keys=keys))
        return {holder.address: holder.num_prefix_blocks for holder in found.holders}, found.is_complete

    async def describe(self, lease_id: str) -> list[pb.BlockDescriptor]:
        """Return the descriptors of all blocks of a lease."""
        request = pb.FetchDescriptorsRequest(peer_id=self.peer_id, lease_id=lease_id)
        return list((await self.client.call(self.client.stub.FetchDescriptors, request)).blocks)

    async def read(self, lease_id: str, num_blocks: int) -> NDArray[np.uint8]:
        """Return the first blocks of a lease by stream, `[num_blocks, NUM_PARTS, PART_BYTES]`."""
        ranges = [pb.PartRange(block_index=index, num_parts=NUM_PARTS) for index in range(num_blocks)]
        parts = [part.data async for part in self.client.get(self.peer_id, lease_id, ranges)]
        return np.frombuffer(b"".join(parts), np.uint8).reshape(num_blocks, NUM_PARTS, PART_BYTES)

    async def check(self, keys: Sequence[bytes], content: Content) -> list[bytes]:
        """Return those of the keys that the service holds, each read and equal to its content."""
        found = [key for key, tier in zip(keys, await self.locate(*keys), strict=True) if tier]
        for key in found:
            lease = await self.lease(key)
            np.testing.assert_array_equal((await self.read(lease.lease_id, 1))[0], content[key])
            await self.release(lease.lease_id)
        return found

    async def stats(self) -> pb.StatsResponse:
        """Return the counts of the service."""
        stats: pb.StatsResponse = await self.client.call(self.client.stub.Stats, pb.StatsRequest())
        return stats


@contextlib.asynccontextmanager
async def peer(server: Server, access: "pb.Access" = pb.ACCESS_STREAM) -> AsyncIterator[Peer]:
    """Register a `Peer`, which gives all its leases back at the end."""
    async with StagingClient(server.address) as client:
        made = await Peer.register(client, access)
        try:
            yield made
        finally:
            await made.release()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds; fails after half a minute."""
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.05)


def random_blocks(seed: int, *keys: bytes) -> dict[bytes, NDArray[np.uint8]]:
    """Return blocks with random bytes."""
    data = np.random.default_rng(seed).integers(0, 256, (len(keys), NUM_PARTS, PART_BYTES), np.uint8)
    return dict(zip(keys, data, strict=True))


class RedisServer:
    """A Redis of its own, started anew as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        """Take a free port; nothing runs before `start`."""
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start with the dump of an earlier run, if that saved one, and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        for _ in range(400):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
                self.ask("PING")
                return
            time.sleep(0.05)
        raise AssertionError("redis-server did not start")

    def ask(self, command: str) -> bytes:
        """Send one command and return the answer as it is on the wire."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(4096)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Kill it; nothing is saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def disk_table(folder: Path, num_slots: int) -> str:
    """Return `[disk]` for a disk tier of as many blocks; without direct I/O where the file system has none."""
    probe = folder / "probe"
    flags = os.O_RDWR | os.O_CREAT
    try:
        os.close(os.open(probe, flags | os.O_DIRECT))
        use_direct_io = "true"
    except OSError:
        use_direct_io = "false"
    probe.unlink(missing_ok=True)
    max_bytes = ALIGNMENT + num_slots * SLOT_BYTES
    return f'[disk]\nfolder = "{folder}"\nmax_bytes = {max_bytes}\nuse_direct_io = {use_direct_io}\n'


def kill_while_writing(folder: Path, num_rounds: int, seed: int) -> list[int]:
    """Stage blocks until the service is killed, start it again and check what it found; so many times.

    Asserts that every block found is what was staged, that no more are lost than were being written, and that the file
    never grows. Returns the blocks found after each start.
    """
    rng = np.random.default_rng(seed)
    num_slots = 24
    tables = disk_table(folder, num_slots)
    content: dict[bytes, NDArray[np.uint8]] = {}
    found_after = []
    num_before = 0

    async def round_(server: Server, kill_after_s: float) -> int:
        async with StagingClient(server.address) as client:
            user = await Peer.register(client)
            found = await user.check(list(content), content)
            found_after.append(len(found))
            stats = await user.stats()
            assert stats.num_held_disk_blocks == len(found) >= num_before - NUM_WRITERS
            assert stats.num_disk_errors_total == 0, "a torn block was found"
            for path in folder.glob("*.blocks"):
                assert path.stat().st_size <= ALIGNMENT + num_slots * SLOT_BYTES
            for key in content.keys() - set(found):
                del content[key]
            killing = asyncio.get_running_loop().call_later(kill_after_s, server.process.kill)
            num_held = 0
            with contextlib.suppress(PeerUnavailableError, TransferTimeoutError):
                while True:
                    fresh = random_blocks(int(rng.integers(2**32)), *(rng.bytes(8) for _ in range(3)))
                    content.update(fresh)
                    await user.release(await user.stage(fresh))
                    num_held = (await user.stats()).num_held_disk_blocks
            killing.cancel()
            return num_held

    for _ in range(num_rounds):
        with running(folder, "is_strict = true", tables) as server:
            num_before = asyncio.run(round_(server, float(rng.uniform(0.05, 0.5))))
            server.end(signal.SIGKILL)
    return found_after
