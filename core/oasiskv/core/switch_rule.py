"""When requests become sparse: as early as they can, when the engine's pool fills, or when a step gains by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oasiskv.core.config import LookaheadConfig

Reason = Literal["early", "memory", "speed", "handover"]
"""Why a request was switched."""

LEAST_GAIN = 0.03
"""Share of a step's time that switching must save: no request switches back, and estimates err by about as much."""

LEAST_LENGTH = 2.5
"""Budgets that a request must be long to switch for speed: a shorter one saves too little for what it gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Time of a decode step of one model on one kind of GPU, fitted to measured steps; see docs/design/0006."""

    fixed_ms: float
    """What a step of any batch takes: reading the weights, launching, sampling."""
    row_ms: float
    """What each request adds to that, its KV aside."""
    block_ms: float
    """Attention over one resident block, all layers and heads."""
    sparse_ms: float
    """What a step takes more as soon as one request is sparse: the drafter's pass and the kernels of every layer."""
    predict_ms: float
    """Scoring one complete block of a sparse request, all layers and heads."""
    transfer_ms: float
    """Host link time of one sparse request that fetches its whole cap in every layer and head."""
    overlap_loss: float
    """How much longer a step takes than the longer of foreground and transfer, as a share of the shorter."""
    budget_blocks: int
    """Resident blocks of a sparse request."""

    def step_ms(self, dense: Sequence[int], sparse: Sequence[int]) -> float:
        """Estimate a step.

        Args:
            dense: Blocks of each dense request.
            sparse: Complete blocks of each sparse request.
        """
        attended = sum(dense) + self.budget_blocks * len(sparse)
        foreground = self.fixed_ms + self.row_ms * (len(dense) + len(sparse)) + self.block_ms * attended
        if not sparse:
            return foreground
        # Prediction reads the memory that the foreground reads; the transfer runs beside both.
        foreground += self.sparse_ms + self.predict_ms * sum(sparse)
        transfer = self.transfer_ms * len(sparse)
        return max(foreground, transfer) + self.overlap_loss * min(foreground, transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What a kind of GPU does, as measured in decode steps of served models; see docs/design/0006."""

    memory_bytes_per_s: float
    """Reading weights and KV."""
    predict_bytes_per_s: float
    """Reading summary rows beside the foreground."""
    link_bytes_per_s: float
    """Fetching units from host memory with nothing beside it."""
    overlap_loss: float
    """See `StepCost`."""
    layer_ms: float
    """What a layer takes beside its bytes."""
    row_ms: float
    """See `StepCost`."""
    sparse_layer_ms: float
    """What a layer takes more in a step with a sparse request, its share of the drafter included."""

    def step_cost(
        self,
        config: LookaheadConfig,
        *,
        weight_bytes: int,
        num_layers: int,
        num_kv_heads: int,
        unit_bytes: int,
        rows_per_page: int,
    ) -> StepCost:
        """Return the cost of a model's steps on this device.

        Args:
            config: The backend's settings.
            weight_bytes: Weights that one process reads in a step.
            num_layers: Layers of the target model.
            num_kv_heads: KV heads of one process.
            unit_bytes: Bytes of one (layer, block, head).
            rows_per_page: Blocks summarized by a unit's bytes.
        """
        block_bytes = num_layers * num_kv_heads * unit_bytes
        return StepCost(
            fixed_ms=1e3 * weight_bytes / self.memory_bytes_per_s + self.layer_ms * num_layers,
            row_ms=self.row_ms,
            block_ms=1e3 * block_bytes / self.memory_bytes_per_s,
            sparse_ms=self.sparse_layer_ms * num_layers,
            predict_ms=1e3 * block_bytes / rows_per_page / self.predict_bytes_per_s,
            transfer_ms=1e3 * config.first_cap * block_bytes / self.link_bytes_per_s,
            overlap_loss=self.overlap_loss,
            budget_blocks=config.budget_blocks,
        )


DEVICE_SPEEDS = {
    "NVIDIA H200": DeviceSpeed(
        memory_bytes_per_s=4.25e12,
        predict_bytes_per_s=3.0e12,
        link_bytes_per_s=49.5e9,
        overlap_loss=0.12,
        layer_ms=0.05,
        row_ms=0.02,
        sparse_layer_ms=0.015,
    ),
}
"""By the device's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRule:
    """Which dense requests to switch in a step; it sees blocks alone, so that its choices can be replayed.

    `early` switches everything that may. Otherwise a request switches when the pool needs its blocks and, with a
    `cost`, when the step is estimated to take less time.
    """

    is_early: bool = False
    cost: StepCost | None = None

    def choose(
        self,
        dense: Mapping[str, int],
        others: Sequence[int],
        sparse: Sequence[int],
        needed: int,
        freed: Mapping[str, int],
    ) -> dict[str, Reason]:
        """Choose among the requests of a step.

        Args:
            dense: Complete blocks of the decoding requests that may switch.
            others: Blocks of the other requests of the step, which stay dense.
            sparse: Complete blocks of the sparse requests.
            needed: Engine blocks that should come free.
            freed: Engine blocks that each of `dense` gives back.

        Returns:
            The requests to switch and why. Ties fall to the name that sorts first.
        """
        if self.is_early:
            return dict.fromkeys(dense, "early")
        longest = sorted(dense, key=lambda name: (-dense[name], name))
        chosen: dict[str, Reason] = {}
        for name in longest:
            if needed <= 0:
                break
            chosen[name] = "memory"
            needed -= freed[name]
        if self.cost is not None and len(chosen) < len(longest):
            for name in longest[len(chosen) : self._fastest(longest, len(chosen), dense, others, sparse)]:
                chosen[name] = "speed"
        return chosen

    def _fastest(
        self, longest: Sequence[str], least: int, dense: Mapping[str, int], others: Sequence[int], sparse: Sequence[int]
    ) -> int:
        """Return how many of the longest requests to switch, at least `least`, for the fastest step."""
        assert self.cost is not None
        blocks = [dense[name] for name in longest]
        most = sum(length >= LEAST_LENGTH * self.cost.budget_blocks for length in blocks)
        times = [
            self.cost.step_ms([*others, *blocks[count:]], [*sparse, *blocks[:count]])
            for count in range(least, max(least, most) + 1)
        ]
        best = min(range(len(times)), key=times.__getitem__)
        return least + best if times[best] < (1 - LEAST_GAIN) * times[0] else least
