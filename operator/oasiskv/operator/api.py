"""The resources of `oasiskv.io/v1alpha1`. Schema and documentation are generated from here, so none can differ.

A default never changes within a version of the API: objects that are stored without the field would change with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from oasiskv.core.config import LookaheadConfig
from oasiskv.operator.api_scaling import DecodeScaling, Scaling
from oasiskv.operator.kinds import Bounds, Pattern, Quantity, Rule, SettingsOf

GROUP, VERSION = "oasiskv.io", "v1alpha1"

DIGEST = r"@sha256:[0-9a-f]{64}"
IMAGE = rf"^[a-z0-9][a-zA-Z0-9._/-]*(:[0-9]+/[a-zA-Z0-9._/-]+)?(:[\w.-]+({DIGEST})?|{DIGEST})$"
Image = Annotated[str, Pattern(IMAGE, "oasiskv/engine:0.4.0")]
Name = Annotated[str, Pattern(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", "models")]
Key = Annotated[str, Pattern(r"^[a-z0-9.-]+/[\w.-]+$", "nvidia.com/gpu")]
Count = Annotated[int, Bounds(1, 65536)]
TESTS = {"debug_verify", "debug_hold_layers", "debug_cap_replay", "debug_poison"}
OURS = frozenset({*TESTS, "cap_log", "host_limit_bytes", "host_backing"})
"""Settings of the backend that are for tests, or follow from the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is served, and what its KV looks like. A change of `hash` or of a number is a new KV generation."""

    uri: Annotated[
        str, Pattern(r"^(hf://[\w.-]+/[\w.-]+|pvc://[a-z0-9.-]+(/\.?[\w-][\w.-]*)+/?)$", "pvc://models/qwen3-8b")
    ]
    """`hf://OWNER/NAME`, which the engine downloads, or `pvc://CLAIM/FOLDER`, which is mounted read-only."""

    hash: Annotated[str, Pattern(r"^\S{1,256}$", "sha256 of the weights")]
    """Of the weights and of all else that shapes K and V; services with other hashes exchange no KV."""

    name: Annotated[str, Pattern(r"^[\w./:-]{1,128}$", "qwen3-8b")] | None = None
    """What requests call it; else OWNER/NAME, or the folder below /models."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of K and V."""

    num_layers: Count
    """Layers with a KV cache."""

    num_kv_heads: Count
    """KV heads of the model."""

    head_dim: Count
    """Width of K, and of V, per token and KV head."""

    token_secret: Name | None = None
    """Secret whose key `token` is the token of `hf://`; none for a model that everybody may read."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.tokenSecret) || self.uri.startsWith('hf://')",
            "tokenSecret: expected it with an hf:// model only, since nothing else would use it",
            lambda model: model.token_secret is None or model.uri.startswith("hf://"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine of prefill and decode."""

    block_size: Annotated[int, Bounds(16, 256)] = 16
    """Tokens per block. A change is a new KV generation."""

    lookahead: Annotated[Mapping[str, Any], SettingsOf(LookaheadConfig, OURS)] = field(default_factory=dict)
    """Settings of the lookahead backend. What is not said is the image's default."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of vLLM's engine by their name in Python, such as `max_model_len`. Those that the services set
    are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a container of an engine gets; requests and limits are equal, so no default of a cluster shrinks it."""

    cpu: Quantity = "16"
    """Cores."""

    memory: Quantity = "128Gi"
    """Host memory, that of the host pool and of `sharedMemory` included."""

    shared_memory: Quantity = "16Gi"
    """Size of /dev/shm, through which the engine's processes talk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How pods are replaced."""

    max_surge: Annotated[int, Bounds(0, 1024)] = 1
    """Pods above `replicas` at a time; no more than there are GPUs for."""

    max_unavailable: Annotated[int, Bounds(0, 1024)] = 0
    """Pods below `replicas` at a time."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.maxSurge + self.maxUnavailable > 0",
            "maxSurge: expected it or maxUnavailable above 0, else nothing could be replaced",
            lambda rollout: rollout.max_surge + rollout.max_unavailable > 0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """How a pod that has to go ends."""

    pre_stop_seconds: Annotated[int, Bounds(0, 600)] = 15
    """Time in which routers learn that the pod is leaving, while it still serves."""

    timeout_seconds: Annotated[int, Bounds(1, 86400)] = 300
    """Time that requests under way then get, before they are aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The pods that compute prompts; one GPU each."""

    replicas: Annotated[int, Bounds(0, 1024)] | None = None
    """How many; 1 if neither this nor `scaling` is said."""

    scaling: Scaling | None = None
    """Has the load decide instead."""

    image: Image | None = None
    """Instead of the service's."""

    resources: Resources = field(default_factory=Resources)
    """Of each pod."""

    rollout: Rollout = field(default_factory=Rollout)
    """Replacement of pods."""

    drain: Drain = field(default_factory=Drain)
    """End of a pod."""

    max_requests: Annotated[int, Bounds(1, 65536)] = 256
    """Most prompts under way in a pod; more are refused, so that another pod gets them."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.replicas) && has(self.scaling))",
            "replicas: expected it or scaling, got both: one owner decides how many there are",
            lambda prefill: prefill.replicas is None or prefill.scaling is None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The pods that generate answers; one GPU each. The scale subresource is their `replicas`."""

    replicas: Annotated[int, Bounds(1, 1024)] = 1
    """How many; with `scaling`, with how many to begin."""

    scaling: DecodeScaling | None = None
    """Has the load decide."""

    image: Image | None = None
    """Instead of the service's."""

    resources: Resources = field(default_factory=Resources)
    """Of each pod."""

    rollout: Rollout = field(default_factory=Rollout)
    """Replacement of pods."""

    drain: Drain = field(default_factory=Drain)
    """End of a pod."""

    max_requests: Annotated[int, Bounds(1, 65536)] = 1024
    """Most requests under way in a pod; more are refused."""

    local_prompt_tokens: Annotated[int, Bounds(0, 10_000_000)] = 0
    """Prompts of at most this many tokens are computed by decode itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssd:
    """Blocks on disk below those in memory; an emptyDir, if neither of the last two fields is said."""

    size: Quantity
    """Of the volume. Nine tenths of it hold blocks, the rest is the file system's."""

    storage_class: Name | None = None
    """A volume claim of this class, so that blocks survive the pod's move."""

    host_path: Annotated[str, Pattern(r"^/[^:]+$", "/mnt/nvme/oasiskv")] | None = None
    """A folder of the node, of one service alone. Needs a namespace that allows privileged pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.storageClass) && has(self.hostPath))",
            "storageClass: expected it or hostPath, got both",
            lambda ssd: ssd.storage_class is None or ssd.host_path is None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The pod that holds KV between prefill and decode, in host memory."""

    memory: Quantity = "256Gi"
    """Memory of the pool. The pod gets 4 GiB more."""

    cpu: Quantity = "8"
    """Cores."""

    image: Image | None = None
    """Instead of the service's."""

    ssd: Ssd | None = None
    """A second tier. A change is a new KV generation."""

    directory: Annotated[str, Pattern(r"^rediss?://[^@\s]+$", "redis://redis.llm.svc:6379/0")] | None = None
    """URL of a Redis in which staging pods of several services tell one another what they hold; it has no password."""

    drain_seconds: Annotated[int, Bounds(1, 3600)] = 120
    """Time that leases get to end, and blocks to reach the disk or the next pod, before the pod ends."""

    huge_pages: Literal["2Mi", "1Gi"] | None = None
    """Size of the pages of the pool, which a node must have set aside; none takes small ones."""

    replacement: Literal["InPlace", "HandOver"] = "InPlace"
    """How a changed pod takes the place of the one that runs: once that has ended, or before, so that it gets what that
    holds in memory. HandOver needs room for both meanwhile, and moves the pod off a node that is cordoned, for which an
    eviction waits. A change is a new KV generation."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.replacement != 'HandOver' || !has(self.ssd)",
            "replacement: expected InPlace with ssd, since what is on a disk cannot be handed over",
            lambda staging: staging.replacement != "HandOver" or staging.ssd is None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that pods bear, in Kubernetes' words."""

    key: Annotated[str, Pattern(r"^\S+$", "nvidia.com/gpu")]
    """Of the taint."""

    value: str | None = None
    """Of the taint; none bears every value."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Of the taint; none bears every effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """A GPU and an RDMA device that are near one another, by dynamic resource allocation."""

    gpu_class: Name = "gpu.nvidia.com"
    """DeviceClass of GPUs."""

    rdma_class: Name
    """DeviceClass of RDMA devices."""

    same: Key = "resource.kubernetes.io/pcieRoot"
    """Attribute of both that has to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where pods may run."""

    gpu_products: tuple[str, ...] = ("NVIDIA-H100-80GB-HBM3",)
    """Values of the node label `nvidia.com/gpu.product` that are allowed; empty allows all."""

    gpu_resource: Key = "nvidia.com/gpu"
    """Name under which nodes offer GPUs."""

    claim: DeviceClaim | None = None
    """How prefill and decode get their devices, instead of by `gpuResource` and `network.rdma`, which staging keeps.
    With it the operator does not count devices, and a rollout may ask for more than there are."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""

    tolerations: tuple[Toleration, ...] = ()
    """Taints that pods bear."""

    topology_key: Key = "topology.kubernetes.io/zone"
    """Engines prefer to be where their staging pod is, by this label of nodes."""

    priority_class: Name | None = None
    """Priority of all pods."""

    runtime_class: Name | None = None
    """Container runtime of the pods with a GPU."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.claim) || !has(self.gpuResource) || self.gpuResource == 'nvidia.com/gpu'",
            "gpuResource: expected it without claim, since nothing else would use it",
            lambda placement: placement.claim is None or placement.gpu_resource == "nvidia.com/gpu",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """The devices that KV moves by."""

    resource: Key
    """Name under which nodes offer them."""

    count: Annotated[int, Bounds(1, 64)] = 1
    """Per pod."""

    gid_index: Annotated[int, Bounds(0, 255)] | None = None
    """GID of a RoCE port to use; none leaves it to UCX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How KV moves between pods."""

    fabric: Literal["RDMA", "TCP", "Stream"] = "TCP"
    """RDMA and TCP move it one-sidedly, which neither encrypts nor tells peers apart; Stream by checked gRPC alone."""

    rdma: Rdma | None = None
    """With RDMA."""

    networks: tuple[Annotated[str, Pattern(r"^[a-z0-9.-]+(/[a-z0-9.-]+)?(@\w+)?$", "llm/roce-rail0")], ...] = ()
    """Multus networks that every pod joins."""

    memlock: Literal["Host", "NRI"] = "Host"
    """Who lifts the limit on locked memory: the container runtime's own setting, or its NRI plugin by annotation."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "(self.fabric == 'RDMA') == has(self.rdma)",
            "rdma: expected it with fabric RDMA, and only then",
            lambda network: (network.fabric == "RDMA") == (network.rdma is not None),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRef:
    """Which OasisKVProfile says what the service does not."""

    name: Name
    """Of a profile in the service's namespace."""

    update: Literal["Pinned", "Auto"] = "Pinned"
    """Whether a changed profile is taken at the next change of the service, or at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How clients reach decode; an InferenceService of KServe."""

    timeout_seconds: Annotated[int, Bounds(1, 86400)] = 3600
    """Longest request."""

    visibility: Literal["External", "ClusterLocal"] = "External"
    """Whether KServe makes a route from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """Who makes certificates, in cert-manager's words."""

    name: Name
    """Of the issuer."""

    kind: Annotated[str, Pattern(r"^[A-Za-z][A-Za-z0-9]*$", "Issuer")] = "Issuer"
    """`Issuer`, of the service's namespace; `ClusterIssuer`; or a kind of another group."""

    group: Name = "cert-manager.io"
    """Of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Mutual TLS between the pods of a service, and for callers of decode.v1. A change is a new KV generation.

    Clients' HTTP and the Open Inference Protocol stay plain for KServe's route. So do KV bytes with fabric RDMA or TCP.
    """

    issuer: Issuer | None = None
    """Has cert-manager make a certificate, and renew it; pods need no restart for that."""

    secret: Name | None = None
    """A Secret with `tls.crt`, `tls.key` and `ca.crt` instead. The certificate is for servers and clients, and names
    `*.NAMESPACE.svc`, since hosts have the KV generation in their names."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.issuer) != has(self.secret)",
            "issuer: expected it or secret, and not both",
            lambda tls: (tls.issuer is None) != (tls.secret is None),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What pods tell."""

    otlp_endpoint: Annotated[str, Pattern(r"^https?://\S+$", "http://otel-collector:4317")] | None = None
    """Where traces go, by OTLP over gRPC; none makes none."""

    sampling_ratio: Annotated[float, Bounds(0, 1)] = 0.01
    """Share of requests without a caller's trace that get one."""

    pod_monitor: Literal["Auto", "Off"] = "Auto"
    """Auto makes a PodMonitor where the Prometheus operator is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One model, served by decode pods that get KV from prefill pods through a staging pod."""

    image: Image
    """Of all containers; with a tag or digest, and no default, so that nothing but its owner changes it."""

    pull_secrets: tuple[Name, ...] = ()
    """Secrets of the registry."""

    model: Model
    """What is served."""

    engine: Engine = field(default_factory=Engine)
    """Settings of prefill and decode together."""

    prefill: Prefill = field(default_factory=Prefill)
    """Computes prompts."""

    decode: Decode = field(default_factory=Decode)
    """Generates answers."""

    staging: Staging = field(default_factory=Staging)
    """Holds KV in between."""

    profile: ProfileRef | None = None
    """Says `placement` and `network` where this service does not."""

    placement: Placement | None = None
    """Where pods run; replaces the profile's as a whole."""

    network: Network | None = None
    """How KV moves; replaces the profile's as a whole."""

    endpoint: Endpoint = field(default_factory=Endpoint)
    """How clients reach it."""

    tls: Tls | None = None
    """Certificates; none lets pods speak in the clear, within the network policy."""

    telemetry: Telemetry = field(default_factory=Telemetry)
    """Traces and metrics."""

    network_policy: Literal["Enabled", "Disabled"] = "Enabled"
    """Whether pods accept KV traffic from pods of this service alone, and clients on decode's ports alone."""

    suspend: bool = False
    """Stops the pods with GPUs; staging keeps what it holds."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.profile) && has(self.placement) && has(self.network))",
            "profile: expected it without placement or without network, else it has nothing to say",
            lambda spec: spec.profile is None or spec.placement is None or spec.network is None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """The hardware and networks of a cluster, said once for its services."""

    placement: Placement = field(default_factory=Placement)
    """Where pods run."""

    network: Network = field(default_factory=Network)
    """How KV moves."""
