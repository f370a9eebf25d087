"""Measure what is left to stage when a prompt's chunk has been computed: sent chunk by chunk, and layer by layer.

python benchmarks/staging_layers.py --layer-ms 20 --repeats 9 --out layers.json

A layer computes nothing here: it takes as long as it is told to, as one does on a GPU beside which the host is free.
The rest is the product's: `Outbox`, a staging session, and a staging process that bytes reach one-sidedly over TCP.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.engine.handover import Outbox, StagedBlocks
from oasiskv.engine.host_pool import HostPool
from oasiskv.engine.state import CacheShape, WorkingSets
from oasiskv.services.clients.blocks import SessionBlocks
from oasiskv.services.clients.session import SessionConfig, StagingSession
from oasiskv.services.staging.process import StagingProcess

KV = Fingerprint(model_hash="bench", dtype="bfloat16", block_size=16, num_layers=36, num_kv_heads=8, head_dim=128)
SHAPE = CacheShape(
    num_layers=KV.num_layers,
    num_target_layers=KV.num_layers,
    num_query_heads=32,
    num_kv_heads=KV.num_kv_heads,
    head_dim=KV.head_dim,
    block_size=KV.block_size,
    dtype=torch.bfloat16,
    scale=1.0,
)


def compute(
    outbox: Outbox, blocks: StagedBlocks, lease: str, num_blocks: int, layer_s: float, *, by_layer: bool
) -> float:
    """Run one chunk, and return the seconds from the end of its last layer until all of it is in staging."""
    outbox.open("request", lease)
    table = torch.arange(num_blocks, dtype=torch.int32)
    outbox.stream({"request": (0, num_blocks)} if by_layer else {}, {"request": table})
    for layer in range(SHAPE.num_layers):
        time.sleep(layer_s)
        outbox.put_layer(blocks, layer)
    ended = time.perf_counter()
    outbox.store(blocks, "request", 0, table, 0, num_blocks)
    for write in outbox._writes[lease]:
        write.result()
    return time.perf_counter() - ended


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the chunk (%(default)s)")
    parser.add_argument("--layer-ms", type=float, default=20.0, help="time that a layer computes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    num_blocks = args.tokens // KV.block_size
    sets = WorkingSets(LookaheadConfig(budget_blocks=16), SHAPE, 1, num_blocks + 1, torch.device("cpu"))
    sets.host_table[0, :num_blocks] = torch.arange(num_blocks)
    cache = (num_blocks, KV.num_kv_heads, KV.block_size, 2 * KV.head_dim)
    kv_caches = [torch.zeros(cache, dtype=SHAPE.dtype) for _ in range(SHAPE.num_layers)]
    tails: dict[str, list[float]] = {"by chunk": [], "by layer": []}
    with (
        TemporaryDirectory() as folder,
        HostPool.private(SHAPE.host_pool(num_blocks), SHAPE.host_dtype) as pool,
        StagingProcess(Path(folder), KV, num_blocks, staging={"transport": "tcp"}) as process,
    ):
        config = SessionConfig(address=process.address, fingerprint=KV, name="bench", may_write=True, locality="remote")
        session = StagingSession(config)
        blocks, lease = SessionBlocks(session, SHAPE), session.allocate(num_blocks).result()
        outbox = Outbox(SHAPE, sets, kv_caches, pool)
        for _ in range(args.repeats):
            for name, tail_ms in tails.items():
                by_layer = name == "by layer"
                tail_ms.append(
                    1e3 * compute(outbox, blocks, lease.token, num_blocks, args.layer_ms / 1000, by_layer=by_layer)
                )
        path = session.path
        blocks.close()
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "path": path,
        "chunk_mib": num_blocks * KV.block_bytes / 2**20,
        "layer_ms": args.layer_ms,
        "tail_ms": {
            name: {"median": statistics.median(values), "least": min(values), "all": values}
            for name, values in tails.items()
        },
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["tail_ms"], indent=1))


if __name__ == "__main__":
    main()
