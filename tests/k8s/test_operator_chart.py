"""One chain from an empty namespace by helm, with the operator's own pod as a process, to nothing again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oasiskv.operator.testing import PRODUCT
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_helm import CHART, Helm, helms, older
from oasiskv.operator.testing_kubelet import LABEL, FakeKubelet
from oasiskv.operator.testing_operator import OWNED, condition, forbidden, is_settled, sample, wait_for

pytestmark = pytest.mark.timeout(300)

OURS = "deployments,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,jobs,pods,leases"
VALUES = [
    "crds.upgrade=false",  # by a Job: test_helm.py
    f"operator.nodeSelector.{LABEL.replace('.', chr(92) + '.')}=true",
    f"operator.tolerations[0].key={LABEL},operator.tolerations[0].operator=Exists",
]


@pytest.fixture
def kubelet(plane: ControlPlane, tmp_path: Path) -> Iterator[FakeKubelet]:
    made = FakeKubelet(plane, "cpu-2", tmp_path)
    try:
        made.start()
        yield made
    finally:
        print(made.printed())  # shown where a test failed
        made.stop()


def uids(plane: ControlPlane, namespace: str) -> set[str]:
    found = plane.get("pods", "-n", namespace, "-l", "oasiskv.io/service")["items"]
    return {pod["metadata"]["uid"] for pod in found}


def test_from_an_empty_namespace_to_a_served_model_and_back(
    plane: ControlPlane, chart: Helm, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    helm, system, namespace = Helm(helms()[0], tmp_path / "helm", plane.kubeconfig), "by-helm", "models"
    num_forbidden = len(forbidden(plane))
    for each in (system, namespace):
        plane.check("create", "namespace", each)
        plane.check("label", "namespace", each, "pod-security.kubernetes.io/enforce=restricted")
    sets = [part for value in VALUES for part in ("--set-string" if "nodeSelector" in value else "--set", value)]
    helm.check("install", "oasiskv", str(older(tmp_path)), f"--namespace={system}", "--skip-crds", "--wait", *sets)
    assert kubelet.num_starts(system) == 1
    plane.put([sample("chat", namespace)])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "chat to settle", 90)
    inference = plane.get("inferenceservice", "chat", "-n", namespace)
    assert {each["type"]: each["status"] for each in inference["status"]["conditions"]}["Ready"] == "True"
    nodes = {node["metadata"]["name"]: node["metadata"]["labels"] for node in plane.get("nodes")["items"]}
    pods = plane.get("pods", "-n", namespace)["items"]
    assert {nodes[pod["spec"]["nodeName"]]["nvidia.com/gpu.product"] for pod in pods} == {PRODUCT}
    assert condition(plane, namespace, "chat", "Ready")["reason"] == "KVPathUnverified"  # no pod here moves KV

    running = uids(plane, namespace)
    helm.check("upgrade", "oasiskv", str(CHART), f"--namespace={system}", "--wait", *sets)
    wait_for(lambda: kubelet.codes, "the operator before to end")
    assert list(kubelet.codes.values()) == [0]
    # The new one works, and what runs was left alone.
    patch: dict[str, Any] = {"spec": {"networkPolicy": "Disabled"}}
    path = f"/apis/oasiskv.io/v1alpha1/namespaces/{namespace}/oasiskvservices/chat"
    plane.ask("PATCH", path, patch, "application/merge-patch+json")
    wait_for(lambda: plane.get("networkpolicies", "-n", namespace)["items"] == [], "the new operator to work", 90)
    assert uids(plane, namespace) == running

    plane.check("delete", "oks", "chat", "-n", namespace, "--timeout=30s")
    wait_for(lambda: not plane.get(f"{OWNED},pods", "-n", namespace, "-l", "oasiskv.io/service")["items"], "nothing")
    # Not afterwards: its role goes before it has ended, and then it cannot give the Lease back.
    assert forbidden(plane)[num_forbidden:] == []
    assert len(wide(plane, system)) == 2
    helm.check("uninstall", "oasiskv", f"--namespace={system}", "--wait")
    # The Lease is the operator's own. The rest every namespace has.
    left = {"Lease/oasiskv-operator", "ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}
    wait_for(lambda: names(plane, system) == left, "nothing that the chart made")
    assert wide(plane, system) == []
    assert kubelet.errors == []


def names(plane: ControlPlane, namespace: str) -> set[str]:
    """Return what there is of the kinds that a chart makes."""
    return {f"{each['kind']}/{each['metadata']['name']}" for each in plane.get(OURS, "-n", namespace)["items"]}


def wide(plane: ControlPlane, namespace: str) -> list[str]:
    """Return the roles of the cluster, and their bindings, that a release in a namespace made."""
    found = plane.get("clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/instance=oasiskv")["items"]
    return [name for each in found if (name := each["metadata"]["name"]).startswith(f"{namespace}-")]
