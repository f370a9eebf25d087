"""An engine worker's way to staging: its layers and KV heads of leased blocks, through a session of the service's peer.

`attach` is the maker that a service names to its engine (`LookaheadWorker.attach_staging`); it runs in the worker.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oasiskv.core.errors import (
    CorruptBlockError,
    LeaseExpiredError,
    OasisError,
    PeerUnavailableError,
    UnsupportedError,
)
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.service_config import TlsConfig
from oasiskv.engine.state import CacheShape
from oasiskv.services.clients.session import FetchStatus, Lease, SessionConfig, StagingSession

MAKER = f"{__name__}:attach"

BUFFER_BYTES = 64 * 2**20
"""Host memory through which all bytes pass, registered once with the transport."""

ERRORS: dict[FetchStatus, type[OasisError]] = {
    FetchStatus.CORRUPT: CorruptBlockError,
    FetchStatus.LOST: LeaseExpiredError,
    FetchStatus.UNAVAILABLE: PeerUnavailableError,
}


def arguments(session: StagingSession, config: SessionConfig) -> dict[str, Any]:
    """Return what `attach` needs in another process to join a session, as plain values."""
    values = asdict(config)
    values["tls"] = None if config.tls is None else {name: str(path) for name, path in asdict(config.tls).items()}
    return {"config": values, "token": session.token}


def attach(given: Mapping[str, Any], shape: CacheShape) -> "SessionBlocks":
    """Join a session of another process.

    Args:
        given: From `arguments`.
        shape: This worker's KV cache.

    Raises:
        OasisError: Staging cannot be had, or its blocks cannot be split among the engine's ranks.
    """
    values = dict(given["config"])
    values["fingerprint"] = Fingerprint(**values["fingerprint"])
    if values["tls"] is not None:
        values["tls"] = TlsConfig(**{name: Path(path) for name, path in values["tls"].items()})
    config = SessionConfig(**values)
    return SessionBlocks(StagingSession(config, token=given["token"]), shape)


class SessionBlocks:
    """The way itself; a thread of its own carries the transfers out one after another.

    A block in staging is split by KV heads among the ranks of its fingerprint; a worker of an engine with fewer ranks
    holds those of several of them, which follow one another. Layers beyond those of the fingerprint belong to a drafter
    that another engine lacks: they are not written, and read as zeros.

    Args:
        session: A session of the peer that owns the leases; closed with this.
        shape: This worker's KV cache.

    Raises:
        UnsupportedError: The ranks of the fingerprint cannot be given out evenly to those of the engine.
    """

    def __init__(self, session: StagingSession, shape: CacheShape) -> None:
        """Take memory for bytes on their way."""
        fingerprint = session.fingerprint
        if fingerprint.tp_size % shape.tp_size:
            raise UnsupportedError(
                f"fingerprint.tp_size: expected a multiple of the engine's {shape.tp_size} ranks, "
                f"got {fingerprint.tp_size}"
            )
        self._session = session
        self._num_ranks = fingerprint.tp_size // shape.tp_size
        self._first_part = shape.tp_rank * self._num_ranks * fingerprint.num_layers
        self._num_layers = fingerprint.num_layers
        self._part_bytes = shape.num_kv_heads * shape.unit_bytes // self._num_ranks
        # The least transfer is one block's layers.
        num_parts = max(shape.num_layers, BUFFER_BYTES // self._part_bytes)
        self._buffer = np.zeros((num_parts, self._part_bytes), np.uint8)
        self._leases: dict[str, Lease] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oasiskv-blocks")
        self._thread.submit(session.register, self._buffer).result()

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Write layers of blocks; see `engine.handover.StagedBlocks`."""

        def put_rows(joined: Lease, indices: NDArray[np.intp], rank: int, room: NDArray[np.uint8], pieces: Any) -> None:
            room[:] = pieces
            self._session.put(joined, indices, self._part(rank, first_layer), room).result()

        return self._submit(lease, block_indices, first_layer, data, put_rows)

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Read layers of blocks; see `engine.handover.StagedBlocks`."""

        def fetch_rows(
            joined: Lease, indices: NDArray[np.intp], rank: int, room: NDArray[np.uint8], pieces: Any
        ) -> None:
            statuses = self._session.fetch(joined, indices, self._part(rank, first_layer), room).result()
            if (statuses != FetchStatus.OK).any():
                place = int((statuses != FetchStatus.OK).argmax())
                status = FetchStatus(int(statuses[place]))
                raise ERRORS[status](f"block_index: expected block {int(indices[place])}, got {status.name.lower()}")
            pieces[:] = room

        out[:, max(0, self._num_layers - first_layer) :] = 0
        return self._submit(lease, block_indices, first_layer, out, fetch_rows)

    def receipt(self, lease: str) -> bytes:
        """Return the checksums of what was put, `uint64[num_blocks, num_parts]`."""
        sums = self._join(lease).sums
        assert sums is not None, "only what was put has a receipt"
        return sums.tobytes()

    def forget(self, lease: str) -> None:
        """Drop what is remembered of a lease, after the transfers before."""
        self._thread.submit(self._leases.pop, lease, None)

    def close(self) -> None:
        """Finish what is under way and end the session in this process."""
        self._thread.shutdown()
        self._session.close()

    def _part(self, rank: int, layer: int) -> int:
        """Return the part of a layer of one of this worker's ranks."""
        return self._first_part + rank * self._num_layers + layer

    def _submit(
        self,
        lease: str,
        block_indices: Sequence[int],
        first_layer: int,
        data: torch.Tensor,
        move: Callable[..., None],
    ) -> "Future[None]":
        num_layers = min(data.shape[1], self._num_layers - first_layer)
        try:
            return self._thread.submit(self._move, lease, block_indices, num_layers, data, move)
        except RuntimeError:  # closed since: another way has taken its place
            failed: Future[None] = Future()
            failed.set_exception(PeerUnavailableError("staging: expected a session that is open, got a closed one"))
            return failed

    def _move(
        self,
        lease: str,
        block_indices: Sequence[int],
        num_layers: int,
        data: torch.Tensor,
        move: Callable[..., None],
    ) -> None:
        if num_layers <= 0:
            return
        joined = self._join(lease)
        shape = (len(block_indices), data.shape[1], self._num_ranks, self._part_bytes)
        pieces = data.view(torch.uint8).numpy().reshape(shape)
        indices = np.asarray(block_indices, np.intp)
        step = len(self._buffer) // num_layers
        for start in range(0, len(indices), step):
            rows = slice(start, start + step)
            count = len(indices[rows])
            for rank in range(self._num_ranks):
                room = self._buffer[: count * num_layers].reshape(count, num_layers, self._part_bytes)
                move(joined, indices[rows], rank, room, pieces[rows, :num_layers, rank])

    def _join(self, lease: str) -> Lease:
        if (joined := self._leases.get(lease)) is None:
            joined = self._leases[lease] = self._session.join(lease)
        return joined
