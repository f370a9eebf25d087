"""What a service with an engine shows at `/metrics` of the engine: vLLM's own metrics, and KV in bytes."""

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

KV_BLOCKS = {
    "engine": ("oasiskv_engine_blocks_held", "oasiskv_engine_blocks"),
    "host": ("oasiskv_host_blocks_held", "oasiskv_host_blocks"),
}
"""By place: what the engine's backend calls blocks that requests hold, and all of them."""


class EngineCollector(Collector):
    """The metrics that vLLM registers in this process."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing: they come while the engine starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return all but those of the process, which stand in every registry."""
        for family in REGISTRY.collect():
            if not family.name.startswith(("process_", "python_")):
                yield family


def kv_bytes(role: str, block_bytes: int) -> Iterator[Metric]:
    """Return the KV that requests hold in the engine's memory and in host memory, and the room there.

    Args:
        role: `prefill` or `decode`.
        block_bytes: Of a block, all layers.
    """
    names = [name for pair in KV_BLOCKS.values() for name in pair]
    found: dict[str, float] = dict.fromkeys(names, 0.0)
    for family in REGISTRY.restricted_registry(names).collect():
        for sample in family.samples:
            found[sample.name] += sample.value
    held = GaugeMetricFamily(f"oasiskv_{role}_kv_bytes", "Bytes of blocks that requests hold", labels=["place"])
    room = GaugeMetricFamily(f"oasiskv_{role}_kv_capacity_bytes", "Room for blocks", labels=["place"])
    for place, (used, capacity) in KV_BLOCKS.items():
        held.add_metric([place], found[used] * block_bytes)
        room.add_metric([place], found[capacity] * block_bytes)
    yield from (held, room)


def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    """Return a metric of one sample."""
    family = GaugeMetricFamily(f"oasiskv_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, text: str, label: str, values: "dict[str, int]") -> Metric:
    """Return a metric of one sample for each value of a label."""
    family = CounterMetricFamily(f"oasiskv_{name}", text, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], number)
    return family
