"""What the staging service shows at `/metrics`; names and labels are a part of its interface."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from oasiskv.core.tiers import BlockStatus
from oasiskv.services.rpc.metrics import LoopCollector
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.disk_tier import DISK_ERRORS
from oasiskv.services.staging.service import StagingService


class StagingCollector(LoopCollector):
    """Reads a staging service."""

    def __init__(self, service: StagingService, data_plane: DataPlane) -> None:
        """Be made in the event loop of the service."""
        super().__init__()
        self._service = service
        self._data_plane = data_plane

    async def _read(self) -> list[Metric]:
        service = self._service
        service.leases.expire()
        transport = self._data_plane.transport  # as it is now: one that does not start has given way to none
        return [
            InfoMetricFamily(
                "oasiskv_staging",
                "This process, what its peers read over, and why",
                value={"epoch": service.epoch, "transport": transport.name, "transport_reason": transport.reason},
            ),
            *self._levels(),
            *self._blocks(),
            *self._disk(),
        ]

    def _levels(self) -> Iterator[Metric]:
        service, tiers, leases = self._service, self._service.tiers, self._service.leases
        block_bytes = service.config.fingerprint.block_bytes
        num_blocks = service.config.leases.num_blocks
        num_empty = leases.num_free - leases.num_cached
        counts = leases.counts()
        yield _gauge(
            "capacity_bytes",
            "Room for blocks",
            tier={"host": num_blocks, "disk": tiers.disk.num_slots},
            unit=block_bytes,
        )
        yield _gauge(
            "used_bytes",
            "Bytes of blocks",
            tier={"host": num_blocks - num_empty, "disk": tiers.disk.num_held},
            unit=block_bytes,
        )
        yield _gauge(
            "evictable_bytes", "Bytes of blocks that no lease holds", tier={"host": leases.num_cached}, unit=block_bytes
        )
        for name, text, value in (
            ("leases", "Leases and handles that have not ended", counts.num_leases),
            ("peers", "Registered peers", counts.num_peers),
            ("links", "Processes that reach the memory", counts.num_links),
            ("fenced_blocks", "Blocks whose lease ended while their writer may still write", counts.num_fenced_blocks),
            ("unwritten_blocks", "Blocks in memory that wait to be written to disk", tiers.num_unwritten),
            ("retired_slots", "Slots of the disk that the device failed on", tiers.disk.num_retired),
            ("draining", "1 if new work is refused", int(service.is_draining)),
        ):
            yield GaugeMetricFamily(f"oasiskv_staging_{name}", text, value)
        directory = service.directory
        if service.config.directory is not None:
            yield GaugeMetricFamily(
                "oasiskv_staging_directory_connected", "1 if Redis answered the last time", int(directory.is_connected)
            )
            yield CounterMetricFamily(
                "oasiskv_staging_directory_failures", "Times that Redis did not answer", directory.num_failures
            )
            yield CounterMetricFamily(
                "oasiskv_staging_directory_rebuilds", "Times that the whole index was written", directory.num_rebuilds
            )
        yield CounterMetricFamily(
            "oasiskv_staging_expired_leases", "Leases and handles that ended by time", counts.num_expired_total
        )

    def _blocks(self) -> Iterator[Metric]:
        service, tiers = self._service, self._service.tiers
        yield CounterMetricFamily("oasiskv_staging_sealed_blocks", "Blocks that became findable", tiers.num_sealed)
        yield _counter("leased_blocks", "Blocks given by key, by the tier that held them", tier=service.num_leased)
        yield _counter(
            "missed_blocks", "Blocks asked for by key and not given, the first of each lease", cause=service.num_missed
        )
        evicted = {"host": tiers.num_left - service.num_corrupt_blocks, "disk": tiers.disk.num_evicted}
        yield _counter("evictions", "Blocks that made room for others", tier=evicted)
        drops = CounterMetricFamily(
            "oasiskv_staging_drops", "Blocks that a tier lost and that had not to go", labels=["tier", "reason"]
        )
        drops.add_metric(["host", "corrupt"], service.num_corrupt_blocks)
        drops.add_metric(["host", "not_written"], tiers.num_lost)
        traffic = service.disk_tier.counts if service.disk_tier else {}
        for status in sorted(DISK_ERRORS, key=lambda one: one.value):
            number = sum(count for (_, found), count in traffic.items() if found is status)
            drops.add_metric(["disk", status.value], number)
        yield drops

    def _disk(self) -> Iterator[Metric]:
        tier = self._service.disk_tier
        if tier is None:
            return
        moved = {what: tier.counts[what, BlockStatus.INTACT] for what in ("read", "write")}
        block_bytes = self._service.config.fingerprint.block_bytes
        yield _counter("disk_bytes", "Bytes that went between memory and disk", unit=block_bytes, op=moved)
        yield _counter("disk_seconds", "Time of that, added up over what ran at a time", op=tier.seconds)


def _gauge(name: str, text: str, unit: int = 1, **by_label: dict[str, int]) -> Metric:
    ((label, values),) = by_label.items()
    family = GaugeMetricFamily(f"oasiskv_staging_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number * unit)
    return family


def _counter(name: str, text: str, unit: int = 1, **by_label: "dict[str, int] | dict[str, float]") -> Metric:
    ((label, values),) = by_label.items()
    family = CounterMetricFamily(f"oasiskv_staging_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number * unit)
    return family
