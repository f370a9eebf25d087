"""What the operator measures of itself, in Prometheus' words."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oasiskv.operator.api_status import Condition

Key = tuple[str, str]


class Metrics:
    """The operator's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "oasiskv_operator_api_requests",
            "Answers of the API server",
            ["verb", "code"],
            registry=self.registry,
        )
        self.writes = Counter("oasiskv_operator_writes", "Objects written", ["verb", "kind"], registry=self.registry)
        self.reconcile_s = Histogram(
            "oasiskv_operator_reconcile_seconds",
            "Time of a reconcile of one service, by how it ended",
            ["result"],
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=self.registry,
        )
        self.is_leader = Gauge("oasiskv_operator_is_leader", "1 if this operator writes", registry=self.registry)
        self._conditions = Gauge(
            "oasiskv_operator_condition",
            "1 for the status that a condition of a service has",
            ["namespace", "name", "type", "status"],
            registry=self.registry,
        )
        self._labels: dict[Key, set[tuple[str, str]]] = {}

    def answered(self, verb: str, code: int) -> None:
        """Count an answer of the API server."""
        self._requests.labels(verb, str(code)).inc()

    def says(self, key: Key, conditions: Iterable[Condition]) -> None:
        """Show the conditions of a service, and none that it had before."""
        now: set[tuple[str, str]] = {(each.type, each.status) for each in conditions}
        for old in self._labels.get(key, set()) - now:
            self._conditions.remove(*key, *old)
        for each in now:
            self._conditions.labels(*key, *each).set(1)
        self._labels[key] = now
        if not now:
            del self._labels[key]

    def show(self, name: str, text: str, rows: Callable[[], Mapping[str, float]]) -> None:
        """Show numbers by kind, which are asked for when somebody looks."""
        self.registry.register(_Asked(name, text, rows))


class _Asked(Collector):
    def __init__(self, name: str, text: str, rows: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._text, self._rows = name, text, rows

    def describe(self) -> Iterable[Metric]:
        return [GaugeMetricFamily(self._name, self._text, labels=["kind"])]

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=["kind"])
        for kind, value in self._rows().items():
            family.add_metric([kind], value)
        yield family
