"""What decides how many pods a role has; the same rules as for `api`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from oasiskv.operator.kinds import Bounds, Pattern, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """What KEDA asks."""

    address: Annotated[str, Pattern(r"^https?://\S+$", "http://prometheus.monitoring:9090")]
    """URL of the server."""

    query: Annotated[str, Pattern(r"\S", "sum(some_metric)")]
    """Its answer, divided by `threshold` and rounded up, is the wanted number of pods."""

    threshold: Annotated[float, Bounds(1e-6, 1e12)]
    """What one pod shall carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The number of prefill pods follows the prompts that wait."""

    min_replicas: Annotated[int, Bounds(1, 1024)] = 1
    """Fewest pods."""

    max_replicas: Annotated[int, Bounds(1, 1024)]
    """Most pods."""

    queued_tokens: Annotated[int, Bounds(1, 2**31 - 1)] = 16384
    """Prompt tokens not computed yet that one pod shall have; the operator asks the pods and counts."""

    scale_in_seconds: Annotated[int, Bounds(0, 86400)] = 300
    """How long fewer pods must do before one goes."""

    prometheus: Prometheus | None = None
    """Where KEDA, if it is installed, finds a metric to decide by instead of the operator."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas: expected at most maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetrics:
    """Where KEDA finds the pods' own metrics."""

    address: Annotated[str, Pattern(r"^https?://\S+$", "http://prometheus.monitoring:9090")]
    """URL of a Prometheus that scrapes the pods, with labels `namespace` and `pod` as a PodMonitor gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeScaling:
    """The number of decode pods follows the KV that they hold and the time that they wait for it."""

    min_replicas: Annotated[int, Bounds(1, 1024)] = 1
    """Fewest pods."""

    max_replicas: Annotated[int, Bounds(1, 1024)]
    """Most pods."""

    kv_share: Annotated[float, Bounds(0.01, 1)] = 0.8
    """Share of a pod's room for KV, on the GPU or on the host, that shall be in use."""

    stall_share: Annotated[float, Bounds(0.001, 1)] = 0.1
    """Share of a pod's time that its steps shall wait for KV."""

    scale_in_seconds: Annotated[int, Bounds(0, 86400)] = 300
    """How long fewer pods must do before one goes."""

    prometheus: PodMetrics | None = None
    """Has KEDA, if it is installed, decide by the same shares instead of the operator; it writes `replicas`."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.prometheus) || self.scaleInSeconds <= 3600",
            "scaleInSeconds: expected at most 3600 with prometheus, as much as KEDA can wait",
            lambda scaling: scaling.prometheus is None or scaling.scale_in_seconds <= 3600,
        ),
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas: expected at most maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
        ),
    )
