"""Counters on their way from workers and scheduler to the server's /metrics."""

from collections.abc import Mapping
from typing import Any, Self

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: dict[str, tuple[str, str]] = {
    "predicted": (
        "predicted_blocks",
        "Blocks that a lookahead query predicted for the next step, per layer and KV head.",
    ),
    "hit": ("hit_blocks", "Predicted blocks that were resident."),
    "fetched": ("fetched_blocks", "Predicted blocks that were absent and fetched from host memory."),
    "deferred": ("deferred_blocks", "Predicted blocks that were absent and over the cap."),
    "wasted": ("wasted_blocks", "Fetched blocks evicted before another prediction named them."),
    "evicted": ("evicted_blocks", "Resident blocks that gave their slot to a fetched or a completed block."),
    "late": ("late_blocks", "Fetched blocks that their layer had to wait for."),
    "late_layers": ("late_layers", "Layer runs that had to wait for their transfer."),
    "stall_seconds": ("stall_seconds", "Time that layers waited for transfers, summed over workers."),
    "transfer_seconds": (
        "transfer_seconds",
        "Time in which transfers were under way, summed over workers; measured on a GPU where the cap is auto.",
    ),
    "cap_changes": ("cap_changes", "How often the cap changed, per worker."),
    "load_bytes": ("load_bytes", "Bytes moved from host memory into resident slots."),
    "store_bytes": ("store_bytes", "Bytes written through to host memory."),
    "undrafted_steps": (
        "undrafted_steps",
        "Steps in which the drafter only kept its KV up to date, for no request was sparse; per worker.",
    ),
    "switches": ("switches", "Requests that became sparse, per worker."),
    "switched_early": ("switched_early", "Requests that became sparse as early as they could."),
    "switched_memory": ("switched_for_memory", "Requests that became sparse because the engine's pool was full."),
    "switched_handover": ("switched_for_handover", "Requests that became sparse to go on in another process."),
    "switched_speed": ("switched_for_speed", "Requests that became sparse because steps take less time so."),
    "sparse_rows": ("sparse_steps", "Steps of requests that ran sparse, per worker."),
    "allowed_blocks": ("allowed_blocks", "Blocks that a KV head was allowed to fetch, summed over these, per worker."),
    "dense_steps": ("dense_steps", "Decode steps of requests that ran with everything resident."),
    "finished_requests": ("finished_requests", "Requests that finished or were aborted."),
    "finished_engine_blocks": ("finished_engine_blocks", "Engine blocks that requests held when they finished."),
    "finished_dense_blocks": (
        "finished_dense_blocks",
        "Engine blocks that they would have held with everything resident.",
    ),
    "source_draft": ("lookahead_draft", "Sparse steps whose lookahead query was a draft token's, per worker."),
    "staged_bytes": ("staged_bytes", "Bytes written to staging for other processes."),
    "streamed_bytes": ("streamed_bytes", "Of these, bytes of layers whose pass still went on."),
    "handovers": ("handovers", "Requests that began with KV from staging, per worker."),
    "handover_bytes": ("handover_bytes", "Bytes of all KV of these requests when they began."),
    "admitted_bytes": ("admitted_bytes", "Bytes of it that were fetched when they began, summaries included."),
    "loaded_bytes": ("loaded_bytes", "Bytes of prompts' first blocks that came from staging and were not computed."),
    "missed": ("missed_blocks", "Blocks that were selected and absent from this host, per layer."),
    "missed_bytes": ("missed_bytes", "Bytes fetched from staging for these."),
    "source_self": ("lookahead_self", "Sparse steps whose lookahead query was the token's own, per worker."),
}
"""Counted name: (metric name, help). Metrics are called `oasiskv_<name>_total`."""

GAUGES: dict[str, str] = {
    "budget_blocks": "Resident blocks of a sparse request per layer and KV head (configured).",
    "cap_blocks": "Blocks that a KV head may fetch per step (in force).",
    "chunk_tokens": "Prompt tokens that a step may compute beside sparse decodes, where chunks is auto; else 0.",
    "engine_blocks": "Blocks of the engine's KV cache in all.",
    "engine_blocks_held": "Blocks of the engine's KV cache in use.",
    "host_blocks_held": "Host blocks that requests hold.",
    "host_blocks_unfetched": "Further host blocks that requests would hold if all their KV had come from staging.",
    "host_blocks": "Host blocks in all.",
}


class LookaheadStats(KVConnectorStats):
    """What one side counted since it last told: sums in `counts`, states in `levels`."""

    @classmethod
    def of(cls, counts: Mapping[str, float], levels: Mapping[str, float] | None = None) -> Self:
        """Build from counts since the last time, and present levels."""
        return cls(data={"counts": dict(counts), "levels": dict(levels or {})})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {"counts": {}, "levels": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another side's counts; later levels replace earlier ones."""
        counts = self.data.setdefault("counts", {})
        for name, value in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0) + value
        self.data.setdefault("levels", {}).update(other.data.get("levels", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one flat mapping for the log: what is not zero, in numbers that can be read, by the metrics' names."""
        counts = {COUNTERS[name][0]: value for name, value in self.data.get("counts", {}).items()}
        found = {**counts, **self.data.get("levels", {})}
        return {name: round(value, 3) for name, value in found.items() if value}

    def is_empty(self) -> bool:
        """Say whether there is nothing to tell."""
        return not any(self.data.get("counts", {}).values()) and not self.data.get("levels")


class LookaheadPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, labelled as vLLM labels its own."""

    def __init__(self, *args: Any) -> None:
        """Register every metric, in the place of those of an engine that this process ran before, as vLLM does."""
        super().__init__(*args)
        for collector in list(REGISTRY._collector_to_names):
            if getattr(collector, "_name", "").startswith("oasiskv_"):
                REGISTRY.unregister(collector)
        self._counters = {
            name: self._per_engine(self._counter_cls, f"oasiskv_{metric}", text)
            for name, (metric, text) in COUNTERS.items()
        }
        self._gauges = {
            # Of several API servers one is told of a step.
            name: self._per_engine(self._gauge_cls, f"oasiskv_{name}", text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }

    def _per_engine(self, metric_class: Any, name: str, documentation: str, **options: str) -> dict[int, Any]:
        metric = metric_class(name=name, documentation=documentation, labelnames=self._labelnames, **options)
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts and set levels."""
        for name, value in transfer_stats_data.get("counts", {}).items():
            self._counters[name][engine_idx].inc(value)
        for name, value in transfer_stats_data.get("levels", {}).items():
            self._gauges[name][engine_idx].set(value)
