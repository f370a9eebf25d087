"""A whole control plane for tests, without containers: real controllers, simulated kubelets, and the real KServe."""

import base64
import ipaddress
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from oasiskv.operator.testing import PRODUCT
from oasiskv.operator.testing_server import BINARIES, START_S, ApiServer, _free_port

ALL = (*BINARIES, "kube-controller-manager", "kube-scheduler", "kwok", "kserve-controller")
SYSTEM = "kserve"
"""Namespace of KServe."""
SIMULATED = "kwok.x-k8s.io/node=fake"
"""Annotation of the nodes that kwok simulates."""
KSERVE = {
    "inferenceservices": ("InferenceService", "v1beta1", "Namespaced"),
    "servingruntimes": ("ServingRuntime", "v1alpha1", "Namespaced"),
    "clusterservingruntimes": ("ClusterServingRuntime", "v1alpha1", "Cluster"),
    "clusterstoragecontainers": ("ClusterStorageContainer", "v1alpha1", "Cluster"),
    "trainedmodels": ("TrainedModel", "v1alpha1", "Namespaced"),
    "inferencegraphs": ("InferenceGraph", "v1alpha1", "Namespaced"),
}
OPTIONAL = {
    "Certificate": ("cert-manager.io", "certificates", "v1"),
    "PodMonitor": ("monitoring.coreos.com", "podmonitors", "v1"),
    "ScaledObject": ("keda.sh", "scaledobjects", "v1alpha1"),
}
NODE_SIZE = {
    "cpu": "192",
    "memory": "2Ti",
    "pods": "110",
    "nvidia.com/gpu": "8",
    "rdma/roce_gdr": "64",
    "ephemeral-storage": "6Ti",
}


class ControlPlane(ApiServer):
    """An API server with scheduler, controllers, KServe, and kubelets that only say that pods are ready.

    Args:
        folder: For everything that it writes.
        binaries: Where the programs are. KServe's and the optional definitions are read from `crds` in it or beside it,
            if that is there; else kinds without a schema stand for them.
        pod_delay_ms: Least and most time until a pod is ready.
    """

    def __init__(self, folder: Path, binaries: Path, pod_delay_ms: tuple[int, int] = (50, 400)) -> None:
        super().__init__(folder, binaries)
        self._pod_delay_ms = pod_delay_ms
        # Of all pods. On loopback, so that nobody or a test answers for them; a place of its own, whatever else runs.
        self.pod_address = ".".join(["127", *(str(secrets.randbelow(254) + 1) for _ in range(3))])

    def start(self) -> None:
        """Start everything and wait until KServe answers."""
        super().start()
        self.check("create", "namespace", SYSTEM)
        self.put([_kserve_config()])
        # After the definitions: the garbage collector looks for new kinds only every 30 s.
        self._run(
            "kube-controller-manager",
            kubeconfig=self.kubeconfig,
            leader_elect="false",
            kube_api_qps=500,
            kube_api_burst=1000,
            secure_port=_free_port(),
            cert_dir=self._folder / "kcm",
            service_account_private_key_file=self._folder / "sa.key",
            root_ca_file=self._folder / "certs/apiserver.crt",
        )
        self._run(
            "kube-scheduler",
            kubeconfig=self.kubeconfig,
            leader_elect="false",
            secure_port=_free_port(),
            cert_dir=self._folder / "scheduler",
        )
        (self._folder / "kwok.yaml").write_text(yaml.safe_dump_all(_stages(*self._pod_delay_ms, self.pod_address)))
        self._run(
            "kwok",
            kubeconfig=self.kubeconfig,
            # Not all: a pod of another node may be a real process (`testing_kubelet`).
            manage_nodes_with_annotation_selector=SIMULATED,
            node_lease_duration_seconds=40,
            config=self._folder / "kwok.yaml",
            server_address=f"127.0.0.1:{_free_port()}",
        )
        self._start_kserve()

    def add_nodes(self, number: int, prefix: str = "h100", zone: str = "zone-a", **labels: str) -> None:
        """Make hosts with eight H100 GPUs and RDMA devices each."""
        for first in range(0, number, 200):
            self.put([_node(f"{prefix}-{index}", zone, labels) for index in range(first, min(first + 200, number))])

    def define_optional(self, *kinds: str) -> None:
        """Install the definitions of optional kinds."""
        made = []
        for kind in kinds:
            group, plural, version = OPTIONAL[kind]
            real = self._real(f"optional/{group}_{plural}.yaml")
            made.append(real or _definition(group, plural, kind, version, "Namespaced"))
        self.put(made)
        self.wait_for_kinds()

    def get(self, *arguments: str) -> Any:
        """Return what kubectl prints as JSON."""
        return json.loads(self.check("get", *arguments, "-o", "json"))

    def account(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig of a service account."""
        token = self.check("create", "token", name, "-n", namespace, "--duration=24h").strip()
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        path = self._folder / f"{namespace}-{name}.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def calls(self) -> Iterator[Mapping[str, Any]]:
        """Yield what service accounts asked the API server for."""
        for line in (self._folder / "audit.log").read_text().splitlines():
            yield json.loads(line)

    def _define_more(self) -> None:
        for made in self._kserve_definitions():
            self.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", made)

    def _more_flags(self) -> Mapping[str, object]:
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
        }
        (self._folder / "audit.yaml").write_text(json.dumps(policy))
        return {
            "audit_policy_file": self._folder / "audit.yaml",
            "audit_log_path": self._folder / "audit.log",
            "allow_privileged": "true",
        }

    def put(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Apply objects."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.check("apply", "--server-side", "--force-conflicts", "-f", "-", put=items)

    def _real(self, name: str) -> dict[str, Any] | None:
        for folder in (self._binaries, self._binaries.parent):
            if (path := folder / "crds" / name).is_file():
                # KServe's are large: without C this takes as long as an API server.
                made: dict[str, Any] = yaml.load(path.read_text(), yaml.CSafeLoader)
                return made
        return None

    def _kserve_definitions(self) -> Iterator[dict[str, Any]]:
        group = "serving.kserve.io"
        for plural, (kind, version, scope) in KSERVE.items():
            real = self._real(f"kserve/{group}_{plural}.yaml")
            yield real or _definition(group, plural, kind, version, scope)

    def _start_kserve(self) -> None:
        webhook, health = _free_port(), _free_port()
        temporary = self._folder / "kserve"
        certificates = temporary / "k8s-webhook-server/serving-certs"
        certificates.mkdir(parents=True)
        certificate = _certificate(certificates)
        self._run(
            "kserve-controller",
            {"TMPDIR": str(temporary), "KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": SYSTEM},
            metrics_addr="0",
            health_probe_addr=f"127.0.0.1:{health}",
            webhook_port=webhook,
        )
        self.put(_webhooks(webhook, certificate))
        name = "ready"
        probe = {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"predictor": {"containers": [{"name": "kserve-container", "image": "a:1"}]}},
        }
        deadline = time.monotonic() + START_S
        while self.kubectl("create", "--dry-run=server", "-f", "-", put=probe).returncode:
            assert time.monotonic() < deadline, f"KServe does not answer after {START_S} s: see {self._folder}"
            assert self._processes[-1].poll() is None, f"KServe ended: see {self._folder}"
            time.sleep(0.2)


def _definition(group: str, plural: str, kind: str, version: str, scope: str) -> dict[str, Any]:
    open_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": open_object | {"properties": {"status": open_object}}},
                }
            ],
        },
    }


def _kserve_config() -> dict[str, Any]:
    size = {"memoryRequest": "100Mi", "memoryLimit": "1Gi", "cpuRequest": "100m", "cpuLimit": "1"}
    ingress = {
        "ingressGateway": "none/none",
        "ingressDomain": "example.com",
        "ingressClassName": "nginx",
        "domainTemplate": "{{ .Name }}-{{ .Namespace }}.{{ .IngressDomain }}",
        "urlScheme": "http",
        "disableIstioVirtualHost": True,
    }
    data: dict[str, Any] = {
        "deploy": {"defaultDeploymentMode": "Standard"},
        "ingress": ingress,
        "storageInitializer": {"image": "none:1", **size},
        "logger": {"image": "none:1", "defaultUrl": "http://none", **size},
        "batcher": {"image": "none:1", "maxBatchSize": "32", "maxLatency": "5000", **size},
        "agent": {"image": "none:1", **size},
        "router": {"image": "none:1", **size},
        "credentials": {},
        "explainers": {},
        "metricsAggregator": {},
        "security": {},
        "inferenceService": {},
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "inferenceservice-config", "namespace": SYSTEM},
        "data": {name: json.dumps(value) for name, value in data.items()},
    }


def _webhooks(port: int, certificate: bytes) -> list[dict[str, Any]]:
    bundle = base64.b64encode(certificate).decode()
    made: list[dict[str, Any]] = []
    for kind, path in (
        ("Mutating", "mutate-serving-kserve-io-v1beta1-inferenceservice"),
        ("Validating", "validate-serving-kserve-io-v1beta1-inferenceservice"),
    ):
        hook = {
            "name": "inferenceservice.kserve.io",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/{path}", "caBundle": bundle},
            "rules": [
                {
                    "apiGroups": ["serving.kserve.io"],
                    "apiVersions": ["v1beta1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["inferenceservices"],
                }
            ],
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1", "v1beta1"],
        }
        metadata = {"name": "kserve"}
        api = "admissionregistration.k8s.io/v1"
        made.append(
            {"apiVersion": api, "kind": f"{kind}WebhookConfiguration", "metadata": metadata, "webhooks": [hook]}
        )
    return made


def _certificate(folder: Path) -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kserve")]), datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, none = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "tls.key").write_bytes(key.private_bytes(pem, form, none))
    (folder / "tls.crt").write_bytes(made.public_bytes(pem))
    return made.public_bytes(pem)


def _node(name: str, zone: str, labels: Mapping[str, str]) -> dict[str, Any]:
    known = {
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": zone,
        "nvidia.com/gpu.product": PRODUCT,
        "nvidia.com/gpu.count": "8",
    }
    annotations = dict([SIMULATED.split("=")])
    metadata = {"name": name, "labels": known | dict(labels), "annotations": annotations}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "status": {"allocatable": NODE_SIZE, "capacity": NODE_SIZE},
    }


def _stages(least_ms: int, most_ms: int, address: str) -> Iterator[dict[str, Any]]:
    now = "{{ Now | Quote }}"

    def condition(kind: str) -> str:
        return f"- {{type: {kind}, status: 'True', reason: Simulated, message: '', lastTransitionTime: {now}}}"

    ready = "\n".join(["conditions:", *(condition(kind) for kind in ("Initialized", "ContainersReady", "Ready"))])
    containers = (
        "containerStatuses:\n{{ range .spec.containers }}\n- {name: {{ .name | Quote }}, image: {{ .image | Quote }},"
        " imageID: x, ready: true, restartCount: 0, state: {running: {startedAt: " + now + "}}}\n{{ end }}"
    )
    is_there = {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}
    yield _stage(
        "Node",
        "node-ready",
        [{"key": ".status.phase", "operator": "DoesNotExist"}],
        {"statusTemplate": f"conditions:\n{condition('Ready')}\nphase: Running"},
    )
    yield _stage(
        "Pod",
        "pod-ready",
        [is_there, {"key": ".status.phase", "operator": "In", "values": ["Pending"]}],
        {"statusTemplate": f"{ready}\n{containers}\nphase: Running\npodIP: '{address}'\nstartTime: {now}"},
        {"durationMilliseconds": least_ms, "jitterDurationMilliseconds": most_ms},
    )
    yield _stage("Pod", "pod-delete", [{"key": ".metadata.deletionTimestamp", "operator": "Exists"}], {"delete": True})


def _stage(
    kind: str, name: str, when: Sequence[Any], then: Mapping[str, Any], delay: Mapping[str, int] | None = None
) -> dict[str, Any]:
    spec = {
        "resourceRef": {"apiGroup": "v1", "kind": kind},
        "selector": {"matchExpressions": list(when)},
        "next": dict(then),
    } | ({"delay": dict(delay)} if delay else {})
    return {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name}, "spec": spec}
