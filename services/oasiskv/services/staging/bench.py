"""Measures the staging tier on this host: bytes by every path beside a plain copy of the same, and calls under load."""

import asyncio
import mmap
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import PeerUnavailableError, UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services import nixl
from oasiskv.services.checksums import checksum
from oasiskv.services.clients import background
from oasiskv.services.clients.one_sided import OneSidedPool
from oasiskv.services.clients.session import Lease, SessionConfig, StagingSession
from oasiskv.services.clients.staging import MappedPool, StagingClient
from oasiskv.services.staging.process import StagingProcess

Row = dict[str, object]
NUM_LAYERS = 8
# Tokens per block with 8 heads of 128 in float16: parts of 8, 64 and 512 KiB.
BLOCK_SIZES = (2, 16, 128)
# Settings of the service, of the session, and by what its bytes then move.
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mapped": ({}, {}, "mapped"),
    "UCX shared memory": ({"transport": "shm"}, {"locality": "remote"}, "one-sided"),
    "UCX TCP": ({"locality": "remote", "transport": "tcp"}, {}, "one-sided"),
    "gRPC stream": ({"is_strict": True, "memory_socket": ""}, {}, "stream"),
}
SSD = "SSD"
ALL_PATHS = (*PATHS, SSD)
NIXL_FOR = {"mapped": "UCX shared memory", "gRPC stream": "UCX TCP"}
"""Paths that are none of NIXL's, and the one of NIXL's that crosses the same: its plain copy is named beside them."""
NUM_LEASES = 1000
MEMORIES = ("host", "pinned", "gpu")


def run(
    emit: Callable[[Row], None],
    *,
    pool_bytes: int,
    num_repeats: int,
    paths: Sequence[str] = ALL_PATHS,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    memory: str = "host",
) -> None:
    """Measure everything, and hand each result on as soon as it is there.

    What this host does not have, NIXL or direct I/O say, gets a row that says why it is `not_measured`.

    Args:
        emit: Called with each row.
        pool_bytes: Of each service; the largest copy.
        num_repeats: Copies of each kind; ours and the plain ones take turns, and the medians count. Hundreds of calls.
        paths: Some of `ALL_PATHS`.
        block_sizes: In tokens.
        memory: Where bytes come from and go to, one of `MEMORIES`: `pinned` is host memory that a GPU reads and writes
            directly, `gpu` goes on to the GPU, or begins there, through pinned memory. For the SSD it is always the
            service's own.

    Raises:
        UnsupportedError: Memory of a GPU is asked for, and there is none.
    """
    buffers = _Buffers(memory)
    missing: set[str] = set()
    by_nixl: dict[tuple[str, ...], float] = {}

    def finish(row: Row) -> None:
        path, *what = (str(row.get(name)) for name in ("path", "part_KiB", "op", "bytes"))
        plain, ours = row.get("plain_gb_per_s"), row.get("gb_per_s")
        if path in NIXL_FOR.values() and isinstance(plain, float):
            by_nixl[path, *what] = plain
        beside = by_nixl.get((NIXL_FOR.get(path, ""), *what))
        if beside and isinstance(ours, float):
            row |= {"nixl_gb_per_s": beside, "nixl_share": _rounded(ours / beside)}
        emit(row)

    for block_size in block_sizes:
        shape = Fingerprint(
            model_hash="bench",
            dtype="float16",
            block_size=block_size,
            num_layers=NUM_LAYERS,
            num_kv_heads=8,
            head_dim=128,
        )
        for path in sorted(paths, key=lambda path: path in NIXL_FOR):  # which are beside what was found before
            if path in missing:
                continue
            try:
                if path == SSD:
                    _run_disk(emit, shape, pool_bytes // shape.block_bytes, num_repeats)
                else:
                    _run_path(finish, path, shape, pool_bytes // shape.block_bytes, num_repeats, buffers)
            except (UnsupportedError, PeerUnavailableError) as error:
                missing.add(path)
                emit({"path": path, "not_measured": str(error)})
    _run_calls(emit, 100 * num_repeats)


class _Buffers:
    """Makes buffers of a kind of memory, and moves them on to a GPU or from it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._tensors: dict[int, tuple[Any, Any]] = {}
        if kind != "host":
            try:
                import torch
            except ImportError as error:
                raise UnsupportedError(f"memory: expected a CUDA device for {kind}, got {error}") from error
            if not torch.cuda.is_available():
                raise UnsupportedError(f"memory: expected a CUDA device for {kind}, got torch {torch.__version__}")
            self._torch = torch

    def new(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a buffer with the same bytes."""
        if self.kind == "host":
            return data
        pinned = self._torch.from_numpy(data).pin_memory()
        buffer: NDArray[np.uint8] = pinned.numpy()
        self._tensors[buffer.ctypes.data] = (pinned, pinned.to("cuda"))
        return buffer

    def move(self, buffer: NDArray[np.uint8], op: str) -> float:
        """Move a buffer on after a read, or to it before a write, and return the seconds; for `gpu` alone."""
        if self.kind != "gpu":
            return 0.0
        started_s = time.perf_counter()
        pinned, device = self._tensors[buffer.ctypes.data]
        target, source = (device, pinned) if op == "read" else (pinned, device)
        target.copy_(source, non_blocking=True)
        self._torch.cuda.synchronize()
        return time.perf_counter() - started_s


def _run_path(
    emit: Callable[[Row], None],
    path: str,
    shape: Fingerprint,
    num_blocks: int,
    num_repeats: int,
    buffers: _Buffers,
) -> None:
    staging, session, way = PATHS[path]
    with TemporaryDirectory() as folder, StagingProcess(Path(folder), shape, num_blocks, staging=staging) as server:
        config = SessionConfig(
            address=server.address, fingerprint=shape, name="bench", may_write=True, timeout_s=60.0, **session
        )
        with StagingSession(config) as peer:
            rows = _Bench(peer, shape, num_blocks, num_repeats, buffers).rows()
            if peer.path != way:  # which a session leaves by itself when it does not work
                raise UnsupportedError(f"path: expected {way}, got {peer.path}, since {peer.path_reason}")
            for row in rows:
                emit({"path": path, "memory": buffers.kind, "part_KiB": shape.part_bytes // 1024, **row})


class _Bench:
    """One session, and copies of the same bytes by it and without it."""

    def __init__(
        self, peer: StagingSession, shape: Fingerprint, num_blocks: int, num_repeats: int, buffers: _Buffers
    ) -> None:
        self._peer = peer
        self._buffers = buffers
        self._num_repeats = num_repeats
        rng = np.random.default_rng(0)
        self._order = rng.permutation(num_blocks)
        self._plain_agent: tuple[nixl.NixlAgent, str] | None = None
        self._whole = buffers.new(rng.integers(0, 256, (num_blocks, NUM_LAYERS, shape.part_bytes), np.uint8))
        self._layer = buffers.new(rng.integers(0, 256, (num_blocks, 1, shape.part_bytes), np.uint8))
        pool = peer._moves._pool
        if isinstance(pool, OneSidedPool):
            # With a thread of its own that moves bytes on, as NIXL's API for Python makes them.
            agent = nixl.NixlAgent("plain", nixl.net_devices(peer._config.address))
            self._plain_agent = (agent, agent.connect(pool._metadata))
        for buffer in (self._whole, self._layer):
            peer.register(buffer)
            if self._plain_agent is not None:
                self._plain_agent[0].register(buffer)
        self._lease = peer.allocate(num_blocks).result()

    def rows(self) -> list[Row]:
        """Measure writing, then seal and measure reading."""
        blocks = np.arange(len(self._whole))
        found = [
            self._compare("write", "one layer", self._order, 3, self._layer, self._peer.put),
            self._compare("write", "all layers", blocks, 0, self._whole, self._peer.put),
        ]
        keys = [b"%d" % block for block in blocks]
        started_s = time.perf_counter()
        self._peer.seal(self._lease, blocks, keys).result()
        seal_s = time.perf_counter() - started_s
        found += [
            self._compare("read", "one layer", self._order, 3, self._layer, self._fetch),
            self._compare("read", "all layers", blocks, 0, self._whole, self._fetch),
            {"op": "seal", "bytes": "all layers", "gb_per_s": _rounded(self._whole.nbytes / seal_s / 1e9)},
            self._latency(),
        ]
        return found

    def _fetch(self, lease: Lease, blocks: NDArray[Any], first_part: int, out: NDArray[np.uint8]) -> "_Checked":
        return _Checked(self._peer, lease, blocks, first_part, out)

    def _compare(
        self,
        op: str,
        what: str,
        blocks: NDArray[Any],
        first_part: int,
        pieces: NDArray[np.uint8],
        copy: Callable[[Lease, NDArray[Any], int, NDArray[np.uint8]], Any],
    ) -> Row:
        ours: list[float] = []
        plain: list[float | None] = []
        lean: list[float | None] = []
        for _ in range(self._num_repeats + 1):  # the first one touches memory and connects
            for found, is_lean in ((lean, True), (plain, False)):
                plain_s = self._plain(op, blocks, first_part, pieces, is_lean=is_lean)
                found.append(plain_s and plain_s + self._buffers.move(pieces, op))
            moved_s = self._buffers.move(pieces, op) if op == "write" else 0.0
            started_s = time.perf_counter()
            copy(self._lease, blocks, first_part, pieces).result()
            copied_s = time.perf_counter() - started_s
            ours.append(copied_s + (self._buffers.move(pieces, op) if op == "read" else moved_s))
        ours_s = statistics.median(ours[1:])
        num_pieces = len(blocks) if what == "one layer" else len(blocks) * NUM_LAYERS
        row: Row = {
            "op": op,
            "bytes": what,
            "gb_per_s": _rounded(pieces.nbytes / ours_s / 1e9),
            "parts_per_s": round(num_pieces / ours_s),
        }
        if plain[0] is not None:
            pairs = [(one, other) for one, other in zip(plain[1:], ours[1:], strict=True) if one is not None]
            median_s = statistics.median(one for one, _ in pairs)
            row |= {
                "plain_gb_per_s": _rounded(pieces.nbytes / median_s / 1e9),
                # Of pairs that follow one another, so that what else the host does falls on both.
                "share": _rounded(statistics.median(one / other for one, other in pairs)),
                # Of the fastest of each: what is left when the host does nothing else for a moment.
                "best_share": _rounded(min(one for one, _ in pairs) / min(other for _, other in pairs)),
            }
        if lean[0] is not None:
            pairs = [(one, other) for one, other in zip(lean[1:], ours[1:], strict=True) if one is not None]
            row["lean_share"] = _rounded(statistics.median(one / other for one, other in pairs))
            row["best_lean_share"] = _rounded(min(one for one, _ in pairs) / min(other for _, other in pairs))
        return row

    def _latency(self) -> Row:
        times = []
        for block in np.resize(self._order, 200):
            started_s = time.perf_counter()
            self._peer.fetch(self._lease, [int(block)], 3, self._layer[:1]).result()
            times.append(time.perf_counter() - started_s)
        return {"op": "read", "bytes": "one part", "median_ms": _rounded(statistics.median(times) * 1000)}

    def _plain(
        self, op: str, blocks: NDArray[Any], first_part: int, pieces: NDArray[np.uint8], *, is_lean: bool = False
    ) -> float | None:
        """Return the seconds of a copy without checksums, generations and chunks; None where there is none such.

        Streams have none; a lean one, by an agent without a thread of its own as the session's, only NIXL has.
        """
        pool = self._peer._moves._pool
        block_ids = self._lease.block_ids
        assert block_ids is not None
        if isinstance(pool, OneSidedPool):
            assert self._plain_agent is not None
            agent, remote = (pool._agent, pool._remote) if is_lean else self._plain_agent
            offsets = (block_ids[blocks] * np.uint64(pool._shape[1]) + np.uint64(first_part)) * np.uint64(
                pieces.shape[2]
            )
            return _plain_nixl(agent, remote, pool._blocks_address + offsets, pieces, is_read=op == "read")
        if is_lean:
            return None
        if isinstance(pool, MappedPool):
            there = pool.parts.reshape(-1, pieces.shape[2])
            rows = block_ids[blocks].astype(np.intp)[:, None] * NUM_LAYERS + first_part + np.arange(pieces.shape[1])
            started_s = time.perf_counter()
            if op == "read":
                there.take(rows, axis=0, out=pieces, mode="clip")
            else:
                there[rows] = pieces
            return time.perf_counter() - started_s
        return None


class _Checked:
    """A fetch whose every block must be right."""

    def __init__(self, peer: StagingSession, *arguments: Any) -> None:
        self._future = peer.fetch(*arguments)

    def result(self) -> None:
        assert not self._future.result().any()


def _plain_nixl(
    agent: nixl.NixlAgent, remote: str, addresses: NDArray[np.uint64], pieces: NDArray[np.uint8], *, is_read: bool
) -> float:
    """Return the seconds of one NIXL transfer of one piece a block, with its state asked for without a pause."""
    bindings, plain = nixl.load(), agent._agent
    started_s = time.perf_counter()
    rows = np.zeros((2, len(pieces), 3), np.uint64)
    rows[:, :, 1] = pieces[0].nbytes
    rows[0, :, 0] = pieces.ctypes.data + np.arange(len(pieces), dtype=np.uint64) * np.uint64(pieces[0].nbytes)
    rows[1, :, 0] = addresses
    ends = [bindings.nixlXferDList(bindings.DRAM_SEG, side) for side in rows]
    operation = bindings.NIXL_READ if is_read else bindings.NIXL_WRITE
    handle = plain.createXferReq(operation, *ends, remote, "", [])
    status = plain.postXferReq(handle, "")
    while status == bindings.NIXL_IN_PROG:
        status = plain.getXferStatus(handle)
    plain.releaseXferReq(handle)
    assert status == bindings.NIXL_SUCCESS
    return time.perf_counter() - started_s


def _run_disk(emit: Callable[[Row], None], shape: Fingerprint, num_blocks: int, num_repeats: int) -> None:
    """Measure how fast released blocks reach the disk, and how soon a lease brings all of them back into memory."""
    num_bytes = num_blocks * shape.block_bytes
    data = np.random.default_rng(0).integers(0, 256, (num_blocks, NUM_LAYERS, shape.part_bytes), np.uint8)
    times: dict[str, list[float]] = {"write": [], "read": []}
    plain: dict[str, list[float]] = {"write": [], "read": []}
    reason: str | None = None
    with TemporaryDirectory() as name:
        folder = Path(name)
        # Room for one more, since the file has a head.
        disk = {"folder": str(folder / "disk"), "max_bytes": (num_repeats + 2) * (num_bytes + num_blocks * 2**16)}
        (folder / "disk").mkdir()
        with StagingProcess(folder, shape, num_blocks, staging={"transport": "none"}, disk=disk) as server:
            config = SessionConfig(
                address=server.address, fingerprint=shape, name="bench", may_write=True, timeout_s=120.0
            )
            with StagingSession(config) as peer:
                peer.register(data)
                for number in range(num_repeats):
                    keys = [b"%d of %d" % (block, number) for block in range(num_blocks)]
                    lease = peer.allocate(num_blocks).result()
                    peer.put(lease, range(num_blocks), 0, data).result()
                    peer.seal(lease, range(num_blocks), keys).result()
                    started_s = time.perf_counter()
                    peer.release(lease).result()
                    background.wait(_until_on_disk(server.address, (number + 1) * num_blocks))
                    times["write"].append(time.perf_counter() - started_s)
                    peer.release(peer.allocate(num_blocks).result()).result()  # which evicts them from memory
                    started_s = time.perf_counter()
                    taken = peer.lease(keys, min_blocks=num_blocks).result()
                    times["read"].append(time.perf_counter() - started_s)
                    peer.release(taken).result()
                    if reason is None:
                        try:
                            for op, seconds in _plain_posix(folder / "plain", data).items():
                                plain[op].append(seconds)
                        except UnsupportedError as error:
                            reason = str(error)
    for op in ("write", "read"):
        ours_s = statistics.median(times[op])
        row: Row = {
            "path": SSD,
            "part_KiB": shape.part_bytes // 1024,
            "op": op,
            "bytes": "all layers",
            "gb_per_s": _rounded(num_bytes / ours_s / 1e9),
            "parts_per_s": round(num_bytes / shape.part_bytes / ours_s),
        }
        if reason is None:
            plain_s = statistics.median(plain[op])
            row |= {"plain_gb_per_s": _rounded(num_bytes / plain_s / 1e9), "share": _rounded(plain_s / ours_s)}
        emit(row)
    if reason is not None:
        emit({"path": f"{SSD}, plain copy", "not_measured": reason})


async def _until_on_disk(address: str, num_blocks: int) -> None:
    async with StagingClient(address) as client, asyncio.timeout(600):
        while (await client.call(client.stub.Stats, pb.StatsRequest())).num_held_disk_blocks < num_blocks:
            await asyncio.sleep(0.005)


def _plain_posix(path: Path, data: NDArray[np.uint8]) -> dict[str, float]:
    """Return the seconds that NIXL takes to write the same bytes to a file and to read them, past the page cache.

    Raises:
        UnsupportedError: NIXL is not installed, or its back end for files does not start here.
    """
    bindings = nixl.load()
    agent = bindings.nixlAgent("plain", bindings.nixlAgentConfig())
    try:
        backend = agent.createBackend("POSIX", {})
    except nixl.errors() as cause:
        raise UnsupportedError(f"nixl: expected its back end POSIX to start, got {cause}") from cause
    # Of its own pages: without the page cache, addresses must be multiples of theirs.
    memory = np.frombuffer(mmap.mmap(-1, data.nbytes), np.uint8)
    memory[:] = data.reshape(-1)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, data.nbytes)
        for kind, row in (
            (bindings.DRAM_SEG, (memory.ctypes.data, memory.nbytes, 0)),
            (bindings.FILE_SEG, (0, memory.nbytes, fd)),
        ):
            agent.registerMem(bindings.nixlRegDList(kind, np.array([row], np.uint64)), [backend])
        offsets = np.arange(len(data), dtype=np.uint64) * np.uint64(data[0].nbytes)
        rows = np.zeros((2, len(data), 3), np.uint64)
        rows[0, :, 0], rows[1, :, 0], rows[:, :, 1], rows[1, :, 2] = (
            memory.ctypes.data + offsets,
            offsets,
            data[0].nbytes,
            fd,
        )
        ends = (bindings.nixlXferDList(bindings.DRAM_SEG, rows[0]), bindings.nixlXferDList(bindings.FILE_SEG, rows[1]))
        found = {}
        for name, operation in (("write", bindings.NIXL_WRITE), ("read", bindings.NIXL_READ)):
            started_s = time.perf_counter()
            handle = agent.createXferReq(operation, *ends, "plain", "", [backend])
            status = agent.postXferReq(handle, "")
            while status == bindings.NIXL_IN_PROG:
                status = agent.getXferStatus(handle)
            found[name] = time.perf_counter() - started_s
            agent.releaseXferReq(handle)
            assert status == bindings.NIXL_SUCCESS
        return found
    finally:
        os.close(fd)
        path.unlink()


def _run_calls(emit: Callable[[Row], None], num_calls: int) -> None:
    """Measure calls to a service in which a peer holds `NUM_LEASES` leases that it renews."""
    shape = Fingerprint(model_hash="bench", dtype="float16", block_size=1, num_layers=2, num_kv_heads=1, head_dim=8)
    with TemporaryDirectory() as folder, StagingProcess(Path(folder), shape, 4096, staging={"transport": "none"}) as s:
        for row in asyncio.run(_measure_calls(s.address, shape, num_calls)):
            emit({"path": f"calls, {NUM_LEASES} leases", **row})


async def _measure_calls(address: str, shape: Fingerprint, num_calls: int) -> list[Row]:
    async with StagingClient(address) as client:
        register = pb.RegisterPeerRequest(
            fingerprint=pb.Fingerprint(**asdict(shape)), name="bench", access=pb.ACCESS_STREAM
        )
        peer_id = (await client.call(client.stub.RegisterPeer, register)).peer_id
        keys = [b"key %d" % i for i in range(64)]
        allocate = pb.AllocateRequest(peer_id=peer_id, num_blocks=len(keys), ttl_ms=60_000)
        written = await client.call(client.stub.Allocate, allocate)
        parts = [(block, part, bytes(shape.part_bytes)) for block in range(len(keys)) for part in range(2)]
        await client.put(peer_id, written.lease_id, parts)
        sums = [checksum(bytes(shape.part_bytes))] * shape.num_parts
        blocks = [pb.SealedBlock(block_index=i, block_key=key, checksums=sums) for i, key in enumerate(keys)]
        await client.call(client.stub.Seal, pb.SealRequest(peer_id=peer_id, lease_id=written.lease_id, blocks=blocks))
        for _ in range(NUM_LEASES):
            lease = pb.LeaseRequest(peer_id=peer_id, keys=pb.BlockKeys(block_keys=keys[:1]), ttl_ms=60_000)
            await client.call(client.stub.Lease, lease)

        async def lease_and_release() -> None:
            request = pb.LeaseRequest(peer_id=peer_id, keys=pb.BlockKeys(block_keys=keys), ttl_ms=60_000)
            taken = await client.call(client.stub.Lease, request)
            await client.call(client.stub.Release, pb.ReleaseRequest(peer_id=peer_id, lease_ids=[taken.lease_id]))

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "renew all": lambda: client.call(client.stub.Renew, pb.RenewRequest(peer_id=peer_id, ttl_ms=60_000)),
            "locate 64": lambda: client.call(client.stub.Locate, pb.LocateRequest(peer_id=peer_id, block_keys=keys)),
            "lease 64 and release": lease_and_release,
            "describe 64": lambda: client.call(
                client.stub.FetchDescriptors,
                pb.FetchDescriptorsRequest(peer_id=peer_id, lease_id=written.lease_id, in_columns=True),
            ),
        }
        return [await _measure_call(name, call, num_calls) for name, call in calls.items()]


async def _measure_call(name: str, call: Callable[[], Awaitable[object]], num_calls: int) -> Row:
    times = []
    for _ in range(num_calls + 50):
        started_s = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started_s)
    cuts = statistics.quantiles(times[50:], n=100)
    return {"op": name, "p50_ms": _rounded(cuts[49] * 1000), "p99_ms": _rounded(cuts[98] * 1000)}


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
