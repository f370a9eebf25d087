"""Measure the SSD of a folder under the disk tier's file, with plain threads, and with NIXL's POSIX back end.

python benchmarks/staging_disk.py --folder /var/tmp --out disk.json
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.tiers import BlockStatus
from oasiskv.services.checksums import checksums
from oasiskv.services.staging.disk_file import ALIGNMENT, DiskConfig, DiskFile, slot_bytes

# Layers, KV heads and tokens of float16 blocks with heads of 128: 64 KiB, 256 KiB, and a block of Qwen3-8B.
SHAPES = {"64 KiB": (2, 4, 16), "256 KiB": (8, 4, 16), "2.25 MiB": (36, 8, 16)}
THREADS = (1, 2, 4, 8)


class Place:
    """Blocks in memory, aligned as those of the pool, and a file of the disk tier with a slot for each."""

    def __init__(self, folder: Path, name: str, total_bytes: int) -> None:
        layers, heads, tokens = SHAPES[name]
        self.shape = Fingerprint(
            model_hash=name, dtype="float16", block_size=tokens, num_layers=layers, num_kv_heads=heads, head_dim=128
        )
        self.num_blocks = total_bytes // self.shape.block_bytes
        memory = mmap.mmap(-1, self.num_blocks * self.shape.block_bytes)
        self.parts = np.frombuffer(memory, np.uint8).reshape(self.num_blocks, layers, -1)
        self.parts[:] = np.random.default_rng(0).integers(0, 256, self.parts.shape, np.uint8)
        self.sums = checksums(self.parts)
        config = DiskConfig(folder=str(folder), max_bytes=ALIGNMENT + self.num_blocks * slot_bytes(self.shape))
        self.file = DiskFile.open(config, self.shape)

    def write(self, block: int) -> None:
        status = self.file.write(block, b"%d" % block, block, self.parts[block], self.sums[block], lambda: True)
        assert status is BlockStatus.INTACT

    def read(self, block: int) -> None:
        status, _ = self.file.read(block, b"%d" % block, block, self.parts[block])
        assert status is BlockStatus.INTACT

    def offset(self, block: int) -> int:
        return ALIGNMENT + block * slot_bytes(self.shape)


def plain(place: Place, fd: int, is_read: bool) -> Callable[[int], None]:
    def move(block: int) -> None:
        data = [place.parts[block].reshape(-1).data]
        moved = os.preadv(fd, data, place.offset(block)) if is_read else os.pwritev(fd, data, place.offset(block))
        assert moved == place.shape.block_bytes

    return move


def in_threads(work: Callable[[int], None], num_threads: int, num_blocks: int) -> float:
    order = np.random.default_rng(1).permutation(num_blocks).tolist()
    with ThreadPoolExecutor(num_threads) as threads:
        start_s = time.perf_counter()
        list(threads.map(work, order))
        return time.perf_counter() - start_s


class Nixl:
    """NIXL's POSIX back end over the same descriptor; one transfer of all blocks."""

    def __init__(self, place: Place, fd: int, queue: str) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {queue: "true"})
        block_bytes = place.shape.block_bytes
        order = np.random.default_rng(1).permutation(place.num_blocks).tolist()
        start = place.parts.ctypes.data
        memory = [(start + block * block_bytes, block_bytes, 0, "") for block in order]
        files = [(place.offset(block), block_bytes, fd, "") for block in order]
        registered = self.agent.register_memory([(start, place.parts.nbytes, 0, "")], "DRAM", backends=["POSIX"])
        assert registered is not None
        self.files = self.agent.register_memory(files, "FILE", backends=["POSIX"])
        self.memory = self.agent.get_xfer_descs([one[:3] for one in memory], "DRAM")

    def move(self, is_read: bool) -> float:
        start_s = time.perf_counter()
        operation = "READ" if is_read else "WRITE"
        handle = self.agent.initialize_xfer(operation, self.memory, self.files.trim(), "bench")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start_s
        self.agent.release_xfer_handle(handle)
        assert state == "DONE", state
        return seconds


def measure(folder: Path, name: str, total_bytes: int, repeats: int) -> list[dict[str, object]]:
    place = Place(folder, name, total_bytes)
    flags = os.O_RDWR | os.O_DIRECT
    fd = os.open(place.file.path, flags)
    found: list[dict[str, object]] = []

    def record(how: str, op: str, run: Callable[[], float]) -> None:
        seconds = statistics.median(run() for _ in range(repeats))
        gb_per_s = place.num_blocks * place.shape.block_bytes / seconds / 1e9
        found.append({"block": name, "how": how, "op": op, "gb_per_s": round(gb_per_s, 3)})
        print(found[-1], file=sys.stderr)

    for op, is_read, tier in (("write", False, place.write), ("read", True, place.read)):
        for number in THREADS:
            work = plain(place, fd, is_read)
            record(f"plain, {number} threads", op, lambda w=work, n=number: in_threads(w, n, place.num_blocks))
        for queue in ("use_uring", "use_aio", "use_posix_aio"):
            try:
                backend = Nixl(place, fd, queue)
                backend.move(is_read)
            except Exception as error:
                found.append({"block": name, "how": f"NIXL {queue}", "op": op, "failed": f"{type(error).__name__}"})
                continue
            record(f"NIXL POSIX, {queue}", op, lambda b=backend, r=is_read: b.move(r))
        for number in THREADS:
            record(f"disk tier, {number} threads", op, lambda w=tier, n=number: in_threads(w, n, place.num_blocks))
    os.close(fd)
    place.file.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the SSD to measure")
    parser.add_argument("--bytes", type=int, default=2**29, help="bytes that are moved each time (512 MiB)")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts (3)")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    results = []
    for name in SHAPES:
        with TemporaryDirectory(dir=args.folder) as folder:
            results += measure(Path(folder), name, args.bytes, args.repeats)
    about = {"host": platform.machine(), "num_cpus": os.cpu_count(), "kernel": platform.release(), "bytes": args.bytes}
    text = json.dumps({"command": " ".join(["python", *sys.argv]), **about, "results": results}, indent=1)
    print(text) if args.out is None else args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
