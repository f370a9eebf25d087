"""What a worker counts beside the device counters, and the snapshot that `engine.vllm.stats` publishes."""

from dataclasses import dataclass, field

import torch

from oasiskv.engine.state import CacheShape
from oasiskv.kernels.rows import Counter


@dataclass(slots=True)
class RuntimeCounters:
    """Host-side counts of one worker since it started."""

    num_layers: int
    late: list[int] = field(init=False)
    """Units per layer that were fetched and that the layer had to wait for."""
    late_layers: int = 0
    """Waits for a layer that were not over at once."""
    stall_s: float = 0.0
    """Time the foreground waited."""
    transfer_s: float = 0.0
    """Time in which transfers were under way, where that is measured."""
    stored_blocks: int = 0
    """Blocks written through while dense, all layers and heads."""
    undrafted_steps: int = 0
    """Steps in which the drafter only kept its KV up to date."""
    switches: int = 0
    """Requests that became sparse."""
    sparse_rows: int = 0
    """Rows of steps that ran sparse."""
    allowed_blocks: int = 0
    """Blocks that a KV head was allowed to fetch, summed over these rows."""
    draft_rows: int = 0
    """Those of them whose lookahead query was a draft token's; the others looked ahead with their own."""

    def __post_init__(self) -> None:
        """Start from zero."""
        self.late = [0] * self.num_layers

    def add_late(self, layer: int, num_units: int, waited_s: float) -> None:
        """Count one wait that was not over at once."""
        self.late[layer] += num_units
        self.late_layers += 1
        self.stall_s += waited_s

    def take_waits(self, waited: torch.Tensor) -> None:
        """Take over what a device counted of waits since the start.

        Args:
            waited: `int64[num_layers, len(Waited)]`, in host memory.
        """
        passes, units, nanoseconds, transfers = waited.T.tolist()
        self.late, self.late_layers, self.stall_s = units, sum(passes), sum(nanoseconds) / 1e9
        self.transfer_s = sum(transfers) / 1e9

    def add_sources(self, num_drafts: int, num_rows: int) -> None:
        """Count the sparse rows of a step by the source of their lookahead query."""
        self.draft_rows += num_drafts
        self.sparse_rows += num_rows

    def snapshot(self, counters: torch.Tensor, shape: CacheShape) -> dict[str, float]:
        """Sum everything up to one number per name.

        Args:
            counters: `int64[num_layers, num_kv_heads, len(Counter)]`.
            shape: This process's KV cache.
        """
        total = counters.sum((0, 1)).tolist()
        completed = total[Counter.EVICTED] - total[Counter.FETCHED]
        stored_units = self.stored_blocks * shape.num_layers * shape.num_kv_heads + completed
        return {
            **{counter.name.lower(): total[counter] for counter in Counter},
            "late": sum(self.late),
            "late_layers": self.late_layers,
            "stall_seconds": self.stall_s,
            "transfer_seconds": self.transfer_s,
            "load_bytes": total[Counter.FETCHED] * shape.unit_bytes,
            "store_bytes": stored_units * shape.unit_bytes,
            "undrafted_steps": self.undrafted_steps,
            "switches": self.switches,
            "sparse_rows": self.sparse_rows,
            "allowed_blocks": self.allowed_blocks,
            "source_draft": self.draft_rows,
            "source_self": self.sparse_rows - self.draft_rows,
        }
