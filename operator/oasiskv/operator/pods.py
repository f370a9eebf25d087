"""The pods of the three roles: containers, volumes, probes and where they may run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oasiskv.operator import settings
from oasiskv.operator.api import Decode, Network, Placement, Prefill, ServiceSpec
from oasiskv.operator.kinds import quantity
from oasiskv.operator.names import digest, labels, selector
from oasiskv.operator.placement import PRODUCT, requests

HOME, CONFIG = "/var/cache/oasiskv", "/etc/oasiskv"
STAGING_EXTRA_GIB = 4
"""Memory of a staging pod beside its pool: Python, checksums, buffers of gRPC and UCX."""
HANDOVER_SLEEP_S = 15
"""Time in which the name of staging comes to lead to the next pod everywhere, before this one hands over by it."""
STOP_S = 30
"""Left after a drain for the process to end by itself."""
UNLIMITED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the pods of a service have in common."""

    service: str
    """Name of the service."""

    spec: ServiceSpec
    placement: Placement
    network: Network
    kv: str
    """KV generation."""

    @property
    def tls_secret(self) -> str | None:
        """The Secret with the pods' certificate; None where they speak in the clear."""
        tls = self.spec.tls
        return None if tls is None else tls.secret or f"{self.service}-tls-{self.kv}"

    def labels(self, role: str) -> dict[str, str]:
        """Return the labels of a role's pods."""
        return labels(self.service, role, self.kv)

    def annotations(self, container: str) -> dict[str, str]:
        """Return the annotations of a pod whose container has that name."""
        made = {}
        if self.network.networks:
            made["k8s.v1.cni.cncf.io/networks"] = ",".join(self.network.networks)
        if self.network.memlock == "NRI":
            limit = f"- type: RLIMIT_MEMLOCK\n  hard: {UNLIMITED}\n  soft: {UNLIMITED}\n"
            made[f"ulimits.nri.containerd.io/container.{container}"] = limit
        return made


def engine_pod(site: Site, role: str, container: str, config_map: str) -> dict[str, Any]:
    """Return the pod spec of prefill or decode.

    Args:
        site: What pods have in common.
        role: Which of the two.
        container: Name of its container.
        config_map: Holds its configuration.
    """
    spec: Prefill | Decode = site.spec.prefill if role == "prefill" else site.spec.decode
    asked = requests(spec.resources, site.placement, site.network)
    ports = {"grpc": settings.PREFILL_PORT}
    if role == "decode":
        # KServe's Service exposes the first port as 80, the others as they are.
        ports = {"http1": settings.HTTP_PORT, "grpc-oip": settings.OIP_PORT, "grpc-decode": settings.DECODE_PORT}
    made = _container(site, role, container, asked, ports, spec.drain.pre_stop_seconds)
    made["volumeMounts"] += [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}}
    ]
    claim, _ = settings.model_folder(site.spec)
    if claim:
        made["volumeMounts"] += [{"name": "model", "mountPath": settings.MODELS, "readOnly": True}]
        volumes += [{"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}]
    if site.spec.model.token_secret is not None:
        reference = {"name": site.spec.model.token_secret, "key": "token"}
        made["env"] += [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]
    pod = _pod(site, made, config_map, volumes, spec.drain.pre_stop_seconds + spec.drain.timeout_seconds)
    near = {
        "labelSelector": {"matchLabels": selector(site.service, "staging", site.kv)},
        "topologyKey": site.placement.topology_key,
    }
    pod["affinity"]["podAffinity"] = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]
    }
    pod["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector(site.service, role)},
        }
    ]
    if site.placement.claim is not None:
        made["resources"]["claims"] = [{"name": "devices"}]
        pod["resourceClaims"] = [
            {"name": "devices", "resourceClaimTemplateName": claim_template(site)["metadata"]["name"]}
        ]
    if site.placement.runtime_class is not None:
        pod["runtimeClassName"] = site.placement.runtime_class
    return pod


def claim_template(site: Site) -> dict[str, Any]:
    """Return the object by which each pod with a GPU gets its own devices, near one another; it cannot be changed."""
    claim = site.placement.claim
    assert claim is not None
    classes = {"gpu": claim.gpu_class, "rdma": claim.rdma_class}
    devices = {
        "requests": [{"name": name, "exactly": {"deviceClassName": cls}} for name, cls in classes.items()],
        "constraints": [{"requests": list(classes), "matchAttribute": claim.same}],
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": f"{site.service}-devices-{digest(devices)}", "labels": labels(site.service, "service")},
        "spec": {"spec": {"devices": devices}},
    }


def staging_pod(site: Site, config_map: str) -> dict[str, Any]:
    """Return the pod spec of staging, without the volume of an SSD that a claim holds."""
    staging = site.spec.staging
    pool, extra = int(quantity(staging.memory)), STAGING_EXTRA_GIB * 2**30
    asked = {"cpu": staging.cpu, "memory": str(pool + extra)}
    if staging.huge_pages is not None:
        # They do not count as memory, and come whole.
        page = int(quantity(staging.huge_pages))
        asked |= {"memory": str(extra), f"hugepages-{staging.huge_pages}": str(-(-pool // page) * page)}
    if site.network.rdma is not None:
        asked[site.network.rdma.resource] = str(site.network.rdma.count)
    sleep_s = HANDOVER_SLEEP_S if staging.replacement == "HandOver" else 0
    made = _container(site, "staging", "staging", asked, {"grpc": settings.STAGING_PORT}, sleep_s)
    volumes: list[dict[str, Any]] = []
    if staging.ssd is not None:
        made["volumeMounts"] += [{"name": "disk", "mountPath": settings.DISK}]
        if staging.ssd.host_path is not None:
            volumes = [{"name": "disk", "hostPath": {"path": staging.ssd.host_path, "type": "DirectoryOrCreate"}}]
        elif staging.ssd.storage_class is None:
            volumes = [{"name": "disk", "emptyDir": {"sizeLimit": staging.ssd.size}}]
    return _pod(site, made, config_map, volumes, sleep_s + staging.drain_seconds)


def _container(
    site: Site,
    role: str,
    name: str,
    asked: Mapping[str, str],
    ports: Mapping[str, int],
    pre_stop_s: int,
) -> dict[str, Any]:
    own = {"prefill": site.spec.prefill.image, "decode": site.spec.decode.image, "staging": site.spec.staging.image}
    every = {**ports, "metrics": settings.METRICS_PORT}
    made: dict[str, Any] = {
        "name": name,
        "image": own[role] or site.spec.image,
        "command": ["python", "-m", f"oasiskv.services.{role}", "--config", f"{CONFIG}/oasiskv.toml"],
        "env": _environment(site),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in every.items()],
        "resources": {"requests": dict(asked), "limits": dict(asked)},
        # By plain HTTP, since a kubelet shows no certificate. No liveness probe: the process ends by itself when its
        # engine does, and is not ready while it loads or drains.
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": "metrics", "scheme": "HTTP"},
            "periodSeconds": 5,
            "timeoutSeconds": 3,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        # The end of its log, which the operator tells where a pod does not come up.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "home", "mountPath": HOME},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if pre_stop_s:
        made["lifecycle"] = {"preStop": {"sleep": {"seconds": pre_stop_s}}}
    return made


def _environment(site: Site) -> list[dict[str, Any]]:
    made = {"HOME": HOME}
    if site.network.rdma is not None and site.network.rdma.gid_index is not None:
        made["UCX_IB_GID_INDEX"] = str(site.network.rdma.gid_index)
    telemetry = site.spec.telemetry
    if telemetry.otlp_endpoint is not None:
        made["OTEL_EXPORTER_OTLP_ENDPOINT"] = telemetry.otlp_endpoint
        made["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
        made["OTEL_TRACES_SAMPLER_ARG"] = str(telemetry.sampling_ratio)
    return [{"name": name, "value": value} for name, value in made.items()]


def _pod(
    site: Site, container: dict[str, Any], config_map: str, volumes: list[dict[str, Any]], drain_s: int
) -> dict[str, Any]:
    placement = site.placement
    if (secret := site.tls_secret) is not None:
        container["volumeMounts"] += [{"name": "tls", "mountPath": settings.TLS, "readOnly": True}]
        volumes = [*volumes, {"name": "tls", "secret": {"secretName": secret}}]
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": drain_s + STOP_S,
        "securityContext": {"runAsNonRoot": True, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "home", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            *volumes,
        ],
        "affinity": {},
    }
    if placement.gpu_products:
        # Staging too: it belongs onto the hosts whose network the engines use.
        products = {"key": PRODUCT, "operator": "In", "values": list(placement.gpu_products)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [products]}]}
        pod["affinity"]["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if placement.node_selector:
        pod["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        pod["tolerations"] = [_toleration(each.key, each.value, each.effect) for each in placement.tolerations]
    if placement.priority_class is not None:
        pod["priorityClassName"] = placement.priority_class
    if site.spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in site.spec.pull_secrets]
    return pod


def _toleration(key: str, value: str | None, effect: str | None) -> dict[str, str]:
    made = {"key": key, "operator": "Exists"} if value is None else {"key": key, "operator": "Equal", "value": value}
    return made | ({"effect": effect} if effect is not None else {})
