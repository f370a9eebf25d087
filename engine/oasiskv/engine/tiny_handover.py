"""Two tiny workers and the staged blocks between them, for tests of handovers."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from oasiskv.core.commands import Admission, StepCommands
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import LeaseExpiredError, PeerUnavailableError
from oasiskv.engine.pipeline import InlinePipeline, Pipeline
from oasiskv.engine.state import CacheShape
from oasiskv.engine.tiny_worker import Texts, TinyRow, TinyWorker

BLOCK = 16
BUDGET = 3
SHAPE = CacheShape(
    num_layers=3,
    num_target_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    block_size=BLOCK,
    dtype=torch.float32,
    scale=0.4,
)
TEXTS = Texts(2, 400, SHAPE, seed=7)


class Shelf:
    """Staged blocks in a dictionary; counts what is read, and breaks where it is told to."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int, int], torch.Tensor] = {}
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self.calls: list[tuple[str, int]] = []
        """Lease and first layer of each read."""
        self.lost: set[str] = set()
        self.held: list[Future[None]] | None = None
        """Writes that are not over, while the test keeps them open."""
        self.is_slow: set[str] = set()
        """Leases whose reads end when the test says so."""
        self.reading: list[tuple[Future[None], Callable[[], None]]] = []
        self.is_closed = False
        self.forgotten: list[str] = []

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Keep the blocks; see `StagedBlocks`."""
        assert data.is_contiguous()
        done: Future[None] = Future()
        for place, index in enumerate(block_indices):
            for layer in range(data.shape[1]):
                self.parts[lease, index, first_layer + layer] = data[place, layer].clone()
        if self.held is not None:
            self.held.append(done)
        elif lease in self.lost:
            done.set_exception(PeerUnavailableError("staging: away"))
        else:
            done.set_result(None)
        return done

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Copy blocks out; see `StagedBlocks`."""
        done: Future[None] = Future()
        self.calls.append((lease, first_layer))
        if lease in self.lost:
            done.set_exception(LeaseExpiredError("lease: ended"))
            return done

        def read() -> None:
            for place, index in enumerate(block_indices):
                for layer in range(out.shape[1]):
                    self.reads[lease, index, first_layer + layer] += 1
                    out[place, layer] = self.parts[lease, index, first_layer + layer]

        if lease in self.is_slow:
            self.reading.append((done, read))
        else:
            read()
            done.set_result(None)
        return done

    def end_read(self, error: Exception | None = None) -> None:
        """End the oldest read that is open."""
        done, read = self.reading.pop(0)
        if error is None:
            read()
            done.set_result(None)
        else:
            done.set_exception(error)

    def receipt(self, lease: str) -> bytes:
        """Return the lease."""
        return lease.encode()

    def forget(self, lease: str) -> None:
        """Note that it was called."""
        self.forgotten.append(lease)

    def close(self) -> None:
        """Note that it was called."""
        self.is_closed = True


def make_worker(pipeline: Pipeline | None = None, *, asks: bool = False, **changes: Any) -> TinyWorker:
    """Return a worker with small pools, whose settings are those of these tests but for the changes."""
    settings = {"budget_blocks": BUDGET, "min_cap": 2, "fetch_ratio": 0, "debug_verify": True, **changes}
    return TinyWorker(
        LookaheadConfig.from_mapping(settings),
        SHAPE,
        TEXTS,
        num_engine_blocks=64,
        num_host_blocks=64,
        max_requests=2,
        max_blocks=26,
        pipeline=pipeline or InlinePipeline(),
        asks=asks,
    )


def row(request_id: str, num_computed: int, num_new: int) -> TinyRow:
    """Return a row of request `a` or `b`, whose engine blocks are those from 1 on, or from 31 on."""
    first = 1 if request_id == "a" else 31
    ids = list(range(first, first + -(-(num_computed + num_new) // BLOCK)))
    return TinyRow(
        request_id=request_id, text=int(first > 1), num_computed=num_computed, num_new=num_new, block_ids=ids
    )


def host_ids(request_id: str) -> list[int]:
    """Return the host blocks of a request."""
    first = 0 if request_id == "a" else 30
    return list(range(first, first + 25))


def prefill(worker: TinyWorker, num_tokens: int, request_id: str = "a", lease: str | None = None) -> list[torch.Tensor]:
    """Run a prompt in chunks and its first decode step, which switches it; stage it under a lease if there is one."""
    stage = {} if lease is None else {request_id: lease}
    middle = num_tokens // 2 // BLOCK * BLOCK
    num_middle, num_complete = middle // BLOCK, num_tokens // BLOCK
    streams: list[dict[str, tuple[int, int]]] = [
        {request_id: pair} if stage else {} for pair in ((0, num_middle), (num_middle, num_complete))
    ]
    first = StepCommands(host_blocks={request_id: host_ids(request_id)}, stage=stage, stream=streams[0])
    worker.run(first, [row(request_id, 0, middle)])
    second = StepCommands(store={request_id: (0, num_middle)}, stream=streams[1])
    worker.run(second, [row(request_id, middle, num_tokens - middle)])
    last = StepCommands(store={request_id: (num_middle, num_complete)}, switch={request_id: num_complete})
    return worker.run(last, [row(request_id, num_tokens, 1)])


def orders(
    worker: TinyWorker, num_tokens: int, request_id: str = "a", lease: str = "lease", room: int | None = None
) -> StepCommands:
    """Return the orders that begin a staged request; blocks it must not read get a value that no token has."""
    ids, num_complete = host_ids(request_id), num_tokens // BLOCK
    worker.pool.units[ids] = -99.0
    block_ids = tuple(row(request_id, 0, num_tokens).block_ids)
    return StepCommands(
        room={request_id: (None, ids[: num_complete if room is None else room])},
        host_blocks={request_id: ids[num_complete:]},
        admit={request_id: Admission(lease=lease, num_tokens=num_tokens, block_ids=block_ids)},
    )


def begin(worker: TinyWorker, num_tokens: int, request_id: str = "a", lease: str = "lease", **changes: Any) -> None:
    """Let a staged request come; all reads end at once here."""
    commands = orders(worker, num_tokens, request_id, lease, **changes)
    worker.run(commands, [])
    assert worker.runtime.take_arrived() == ({request_id}, {})


def hand_over(sender: TinyWorker, shelf: Shelf, num_tokens: int, request_id: str = "a", lease: str = "lease") -> None:
    """Prefill and stage a request, and let it end."""
    sender.runtime.attach(shelf)
    prefill(sender, num_tokens, request_id, lease)
    assert sender.runtime.outbox.take(lease)
    sender.run(StepCommands(released=(request_id,)), [])


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Assert that outputs are the same, bit for bit, layer by layer."""
    for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), f"layer {layer}"
