"""What the cluster is and holds, as the reconcile sees it: plain values, so that a test can make any cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from oasiskv.operator.api import ProfileSpec
from oasiskv.operator.api_status import ServiceStatus

SCALED_OBJECT = "ScaledObject.keda.sh"
POD_MONITOR = "PodMonitor.monitoring.coreos.com"
CERTIFICATE = "Certificate.cert-manager.io"
CLAIM_TEMPLATE = "ResourceClaimTemplate.resource.k8s.io"
INFERENCE_SERVICE = "InferenceService.serving.kserve.io"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object of the service's namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """Of a node."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, with what it offers."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, Fraction]
    """By resource, in its base unit."""
    used: Mapping[str, Fraction] = field(default_factory=dict)
    """Requested by pods that are not of this service's engines."""
    taints: tuple[Taint, ...] = ()
    is_ready: bool = True
    """Whether it is ready and lets pods be scheduled."""
    is_cordoned: bool = False
    """Whether somebody told it to take no more pods, as before it is emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment, StatefulSet or InferenceService, as its controller last reported it."""

    desired: int
    updated: int = 0
    """Pods of its newest template."""
    ready: int = 0
    total: int = 0
    """Pods of any template."""
    is_current: bool = True
    """Whether the report is about its newest generation."""
    message: str = ""
    """What its controller says is wrong; empty where nothing is."""

    @property
    def is_done(self) -> bool:
        """Whether every pod is of the newest template, and ready."""
        return self.is_current and self.updated == self.ready == self.total == self.desired


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(Workload):
    """The InferenceService."""

    kv_generation: str
    """That it was last told to serve."""
    url: str = ""
    """Where KServe exposes it; empty as long as it does not."""
    no_route: str = ""
    """What KServe says of why it does not; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the ready pods of a role say of their load."""

    num_pods: int
    """That answered."""
    num_silent: int = 0
    """That did not."""
    queued_tokens: float = 0.0
    """Of prefill: prompt tokens that are not computed yet, of all pods."""
    kv_share: float = 0.0
    """Of decode: share of the room for KV that is in use, on GPU or host, whichever is fuller; mean over pods."""
    stall_share: float = 0.0
    """Of decode: share of the time in which steps waited for KV; mean over pods."""

    def text(self, role: str) -> str:
        """Return it for people."""
        if role == "prefill":
            return f"{self.queued_tokens:.0f} prompt tokens wait at {self.num_pods} pods"
        return f"{self.num_pods} pods hold KV in {self.kv_share:.0%} of their room and wait {self.stall_share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaReport:
    """What pods say of RDMA."""

    num_pods: int
    """That said something."""
    problem: str = ""
    """What keeps the first one that complains from using it, with its name; empty if nothing does."""
    note: str = ""
    """What makes it slow; empty if nothing does."""
    ways: str = ""
    """How near ports are to GPUs, as `2 PIX, 1 SYS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An OasisKVProfile."""

    generation: int
    spec: ProfileSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a reconcile looks at beside the service itself."""

    now: str
    """Time, in RFC 3339."""

    operator: str = ""
    """Which operator looks."""

    kinds: frozenset[str] = frozenset({INFERENCE_SERVICE})
    """Kinds of others that the API server knows, as `Kind.group`."""

    nodes: tuple[Node, ...] | None = ()
    """None where the operator may not look at nodes, as in one namespace alone."""

    profile: Profile | None = None
    """That the service names; None where there is none of that name."""

    children: Mapping[Ref, str | None] = field(default_factory=dict)
    """Objects that the service owns, with the KV generation in their labels."""

    configs_in_use: frozenset[str] = frozenset()
    """ConfigMaps that a pod, or the template of an object, of the service names; templates of claims too."""

    prefills: Mapping[str, Workload] = field(default_factory=dict)
    """By KV generation."""

    stagings: Mapping[str, Workload] = field(default_factory=dict)
    """By name of the StatefulSet."""

    staging_revisions: Mapping[str, str] = field(default_factory=dict)
    """By KV generation: the revision that its Service leads to, where staging pods are handed over."""

    staging_origins: Mapping[str, str] = field(default_factory=dict)
    """By name of the StatefulSet, of those that are handed over: the revision of its template where that was new."""

    emptied: Mapping[str, str] = field(default_factory=dict)
    """By name of the StatefulSet: the node of its pod, if that takes no more pods."""

    certificates: Mapping[str, str] = field(default_factory=dict)
    """By KV generation: what cert-manager says of why there is none yet; empty if there is."""

    decode: Decode | None = None
    decode_pods: Mapping[str, int] = field(default_factory=dict)
    """Number of decode pods that are there, by KV generation."""

    refused: str = ""
    """What the API server refused to write, and why; empty if nothing."""

    contested: str = ""
    """What somebody else keeps changing back; empty if nothing."""

    verified: frozenset[tuple[str, str]] = frozenset()
    """Revisions of prefill and of decode between which a checksummed block has crossed, through staging."""

    unverified: str = ""
    """What a decode pod says of why none has crossed; empty if nothing."""

    rdma: RdmaReport | None = None
    """What pods say of RDMA; None where none was asked, or none said anything."""

    loads: Mapping[str, Load] = field(default_factory=dict)
    """By role, as far as they were asked for."""

    status: ServiceStatus = field(default_factory=ServiceStatus)
    """What the last reconcile wrote."""
