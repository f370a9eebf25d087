"""Services whose pods are real processes, for tests: their volume, their Secret and requests to them."""

import base64
from pathlib import Path
from typing import Any

import httpx

from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_kubelet import LABEL
from oasiskv.operator.testing_operator import sample

SECRET = "mine"


def volume(namespace: str, folder: Path) -> list[dict[str, Any]]:
    """Return a claim of models and the volume that it is bound to."""
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": "none"}
    claim = {"volumeName": namespace, "resources": {"requests": size}}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": namespace},
            "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": {**common, **claim},
        },
    ]


def small_service(namespace: str, model: dict[str, Any], engine: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a service that a processor can run, on the node of the fake kubelet.

    Args:
        namespace: Where it is.
        model: What it serves.
        engine: With which settings.
        changes: More of its spec.
    """
    resources = {"cpu": "1", "memory": "1Gi", "sharedMemory": "64Mi"}
    role = {"resources": resources, "drain": {"preStopSeconds": 1, "timeoutSeconds": 60}}
    spec = {
        "model": model,
        "engine": engine,
        "prefill": role,
        "decode": {**role, "replicas": 1},
        "staging": {"memory": "32Mi", "cpu": "1", "drainSeconds": 30},
        "placement": {"nodeSelector": {LABEL: "true"}, "tolerations": [{"key": LABEL}]},
        "network": {"fabric": "TCP"},
        "telemetry": {},
    }
    return sample("chat", namespace, **{**spec, **changes})


def put_secret(plane: ControlPlane, namespace: str, folder: Path, name: str) -> None:
    """Put a certificate, its key and that of its authority, from files, into the Secret that a service mounts."""
    files = {"tls.crt": f"{name}.pem", "tls.key": f"{name}.key", "ca.crt": "authority.pem"}
    data = {key: base64.b64encode((folder / file).read_bytes()).decode() for key, file in files.items()}
    metadata = {"name": SECRET, "namespace": namespace}
    plane.put([{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}])


def infer(url: str, model: str, text: str, num_tokens: int, timeout_s: float = 300) -> dict[str, Any]:
    """Ask by the Open Inference Protocol's REST for the likeliest tokens, and return what came out by its name."""
    inputs = [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}]
    body = {"inputs": inputs, "parameters": {"max_tokens": num_tokens, "temperature": 0.0}}
    answer = httpx.post(f"http://{url}/v2/models/{model}/infer", json=body, timeout=timeout_s)
    assert answer.status_code == 200, answer.text
    return {one["name"]: one["data"][0] for one in answer.json()["outputs"]}
