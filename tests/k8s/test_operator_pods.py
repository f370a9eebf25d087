"""What the operator does about what pods say of themselves; one process answers for all of them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from oasiskv.core.service_config import read_services
from oasiskv.operator.settings import METRICS_PORT
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_operator import Start, condition, is_settled, sample, wait_for

pytestmark = pytest.mark.timeout(240)


class Pods:
    """Answers `/readyz` and `/metrics` at the address that every simulated pod has."""

    def __init__(self, address: str) -> None:
        self.answers: dict[str, str] = {}
        answers = self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answers.get(self.path, "").encode()
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address, METRICS_PORT), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def answering(plane: ControlPlane) -> Iterator[Pods]:
    made = Pods(plane.pod_address)
    yield made
    made.close()


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"p{abs(hash(request.node.name)) % 10**8}"
    plane.check("create", "namespace", name)
    yield name
    plane.check("delete", "oks", "--all", "-n", name, "--wait=false")


def revisions(plane: ControlPlane, namespace: str) -> tuple[str, str]:
    """Return the revisions of prefill and decode in the files that their pods read."""
    found = {}
    for role, kind, path in (
        ("prefill", "deployments", ("spec", "template", "spec")),
        ("decode", "inferenceservices", ("spec", "predictor")),
    ):
        (made,) = plane.get(kind, "-n", namespace, "-l", f"oasiskv.io/role={role},!app")["items"]
        for step in path:
            made = made[step]
        (name,) = (volume["configMap"]["name"] for volume in made["volumes"] if "configMap" in volume)
        config = read_services(plane.get("configmap", name, "-n", namespace)["data"]["oasiskv.toml"])
        found[role] = getattr(config, role).revision
    return found["prefill"], found["decode"]


def readyz(prefill: str, decode: str, *, is_verified: bool, rdma: str = "") -> str:
    reason = "" if is_verified else "UnsupportedError: expected model abc, got def"
    peer = {"address": "p:1", "is_ready": True, "is_verified": is_verified, "revision": prefill, "reason": reason}
    path = {"is_verified": is_verified, "peers": [peer]}
    said = {"role": "decode", "revision": decode, "is_ready": True, "reasons": [], "kv_path": path}
    return json.dumps(said | {"rdma": {"problem": rdma, "note": "", "closeness": "PIX"}})


def test_ready_is_true_when_a_block_has_crossed_for_this_revision_and_not_before(
    plane: ControlPlane, cluster_admin: Path, namespace: str, start: Start, answering: Pods
) -> None:
    answering.answers["/readyz"] = readyz("", "", is_verified=False, rdma="memlock: expected 9, got 1")
    start(cluster_admin, "--read-nodes")
    plane.put([sample("chat", namespace)])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "pods to be ready", 90)
    rdma = condition(plane, namespace, "chat", "RDMAReady")
    assert (rdma["status"], rdma["reason"]) == ("False", "PodsCannotUseIt")
    assert rdma["message"].endswith(": memlock: expected 9, got 1")
    prefill, decode = revisions(plane, namespace)
    answering.answers["/readyz"] = readyz(prefill, decode, is_verified=False)

    def why() -> str:
        message: str = condition(plane, namespace, "chat", "Ready").get("message", "")
        return message

    wait_for(lambda: why().endswith("UnsupportedError: expected model abc, got def"), "the reason")
    answering.answers["/readyz"] = readyz("another", decode, is_verified=True)
    wait_for(lambda: why().endswith("it knows 1 prefill services"), "another revision not to count")
    answering.answers["/readyz"] = readyz(prefill, decode, is_verified=True)
    wait_for(lambda: condition(plane, namespace, "chat", "Ready").get("status") == "True", "the service to be ready")
    plane.check("wait", "oks/chat", "-n", namespace, "--for=condition=Ready", "--timeout=10s")
    wait_for(lambda: condition(plane, namespace, "chat", "RDMAReady")["status"] == "True", "the pods to be asked again")
    assert condition(plane, namespace, "chat", "RDMAReady")["reason"] == "Usable"
    # What crossed for one revision says nothing of the next one.
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", '{"spec":{"image":"oasiskv/engine:9"}}')
    wait_for(lambda: condition(plane, namespace, "chat", "Ready").get("status") == "False", "it not to be ready")
    wait_for(
        lambda: condition(plane, namespace, "chat", "Ready")["reason"] == "KVPathUnverified",
        "the new pods to be asked",
        90,
    )
    answering.answers["/readyz"] = readyz(*revisions(plane, namespace), is_verified=True)
    wait_for(lambda: condition(plane, namespace, "chat", "Ready").get("status") == "True", "it to be ready again")


def test_without_keda_the_operator_asks_the_pods_and_scales_both_roles(
    plane: ControlPlane, cluster_admin: Path, namespace: str, start: Start, answering: Pods
) -> None:
    start(cluster_admin, "--read-nodes")
    prefill = {"scaling": {"maxReplicas": 4, "queuedTokens": 1000}}
    decode = {"replicas": 2, "scaling": {"maxReplicas": 3}}
    plane.put([sample("chat", namespace, prefill=prefill, decode=decode)])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "pods to be ready", 90)
    answering.answers["/metrics"] = (
        "oasiskv_prefill_queued_tokens 3500.0\n"
        'oasiskv_decode_kv_bytes{place="host"} 99.0\noasiskv_decode_kv_capacity_bytes{place="host"} 100.0\n'
    )

    def numbers() -> tuple[int, int]:
        roles = plane.get("oks", "chat", "-n", namespace)["status"]["roles"]
        return roles["prefill"]["ready"], roles["decode"]["ready"]

    wait_for(lambda: numbers() == (4, 3), "four prefill and three decode pods")
    (inference,) = plane.get("inferenceservices", "-n", namespace)["items"]
    assert inference["spec"]["predictor"]["minReplicas"] == 3
    active = condition(plane, namespace, "chat", "ScalingActive")
    assert (active["status"], active["reason"]) == ("True", "Operator")
    assert "4 instead of 1: 3500 prompt tokens wait at 1 pods" in active["message"]
    # The number that the spec says is where it began, and is not written over.
    assert plane.get("oks", "chat", "-n", namespace)["spec"]["decode"]["replicas"] == 2
    (staging,) = plane.get("statefulsets", "-n", namespace)["items"]
    assert staging["spec"]["replicas"] == 1
