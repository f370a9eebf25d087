"""The operator as a process under the chart's role, over real controllers and the real KServe."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from oasiskv.operator.testing import PRODUCT
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_helm import Helm
from oasiskv.operator.testing_operator import (
    OWNED,
    OperatorProcess,
    Start,
    chart_role,
    condition,
    forbidden,
    is_settled,
    sample,
    versions,
    wait_for,
)

pytestmark = pytest.mark.timeout(240)

PROMETHEUS = {"address": "http://prometheus:9090", "query": "up", "threshold": 2}


@pytest.fixture(scope="module")
def account(plane: ControlPlane, chart: Helm) -> Path:
    return chart_role(plane, chart, "system")


@pytest.fixture(autouse=True)
def nothing_forbidden(plane: ControlPlane) -> Iterator[None]:
    before = len(forbidden(plane))
    yield
    assert forbidden(plane)[before:] == []


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a namespace of the test's own, in which only pods of the restricted level may run."""
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    plane.check("create", "namespace", name)
    plane.check("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    plane.check("delete", "oks", "--all", "-n", name, "--wait=false")


def settle(plane: ControlPlane, namespace: str, name: str = "chat") -> None:
    wait_for(lambda: is_settled(plane, namespace, name), f"{name} to settle", 90)


def turns(operator: OperatorProcess) -> float:
    return operator.metric("oasiskv_operator_reconcile_seconds_count")


def quiet(operator: OperatorProcess) -> float:
    """Return the number of writes when there have been none for a second."""
    last, since_s = operator.metric("oasiskv_operator_writes_total"), time.monotonic()
    while time.monotonic() < since_s + 1:
        time.sleep(0.1)
        if (now := operator.metric("oasiskv_operator_writes_total")) != last:
            last, since_s = now, time.monotonic()
    return last


def events(plane: ControlPlane, namespace: str) -> dict[str, dict[str, Any]]:
    """Return what was told of a service by the operator, by reason; each decision is told once."""
    found = plane.get("events.events.k8s.io", "-n", namespace)["items"]
    own = [each for each in found if each["regarding"].get("kind") == "OasisKVService"]
    made = {each["reason"]: each for each in own}
    assert len(made) == len(own)
    return made


def test_from_nothing_to_pods_on_the_right_hosts_and_back(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    operator = start(account, "--read-nodes")
    plane.put([sample("chat", namespace)])
    settle(plane, namespace)
    inference = plane.get("inferenceservices", "chat", "-n", namespace)
    found = {each["type"]: each["status"] for each in inference["status"]["conditions"]}
    assert (found["PredictorReady"], found["Ready"]) == ("True", "True")
    pods = plane.get("pods", "-n", namespace)["items"]
    roles = sorted(pod["metadata"]["labels"]["oasiskv.io/role"] for pod in pods)
    assert roles == ["decode", "decode", "prefill", "staging"]
    nodes = {node["metadata"]["name"]: node for node in plane.get("nodes")["items"]}
    places = {nodes[pod["spec"]["nodeName"]]["metadata"]["labels"]["nvidia.com/gpu.product"] for pod in pods}
    assert places == {PRODUCT}
    status = plane.get("oks", "chat", "-n", namespace)["status"]
    assert status["placement"] == {"fittingPods": 3, "matchingNodes": 99, "wantedPods": 3}
    assert status["url"] == f"http://chat-{namespace}.example.com"
    # Every pod is ready, and still nobody may say that the service is: no block has crossed.
    ready = condition(plane, namespace, "chat", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "KVPathUnverified")

    num_writes, before, num_turns = quiet(operator), versions(plane, namespace), turns(operator)
    plane.check("annotate", "oks", "chat", "-n", namespace, "somebody/looked=1")
    wait_for(lambda: turns(operator) > num_turns, "a turn")
    assert (quiet(operator), versions(plane, namespace)) == (num_writes, before)

    # Nothing needs the operator to be deleted.
    operator.stop()
    plane.check("delete", "oks", "chat", "-n", namespace, "--wait=true", "--timeout=30s")
    wait_for(lambda: not plane.get(f"{OWNED},pods", "-n", namespace, "-l", "oasiskv.io/service")["items"], "nothing")


def test_a_restart_writes_nothing_and_ends_no_pod(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    operator = start(account, "--read-nodes")
    plane.put([sample("chat", namespace)])
    settle(plane, namespace)
    quiet(operator)
    before = versions(plane, namespace, f"{OWNED},pods")
    assert operator.stop() == 0
    operator = start(account, "--read-nodes")
    wait_for(lambda: turns(operator) >= 1, "a turn")
    assert quiet(operator) == 0
    assert versions(plane, namespace, f"{OWNED},pods") == before


def test_the_second_operator_waits_says_so_and_goes_on_at_once(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    first = start(account, "--read-nodes")
    second = start(account, "--read-nodes", wait=False)
    wait_for(lambda: "operator-0" in second.get("/readyz")[1], "the second to say whom it waits for")
    assert second.get("/readyz") == (503, "waits for the lease, which operator-0 holds\n")
    assert second.get("/healthz") == (200, "ok\n")
    plane.put([sample("chat", namespace)])
    settle(plane, namespace)
    assert (first.metric("oasiskv_operator_is_leader"), second.metric("oasiskv_operator_is_leader")) == (1, 0)
    assert second.metric("oasiskv_operator_writes_total") == 0
    assert first.stop() == 0
    second.wait_ready()
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", '{"prefill":{}, "spec":{"image":"b:2"}}')
    wait_for(lambda: second.metric("oasiskv_operator_writes_total") > 0, "the second to write")


def test_an_operator_of_one_namespace_touches_no_other(plane: ControlPlane, chart: Helm, start: Start) -> None:
    for name in ("mine", "theirs"):
        plane.check("create", "namespace", name)
    account = chart_role(plane, chart, "small", "operator.watchNamespaces={mine}")
    num_calls = len(list(plane.calls()))
    operator = start(account, "--namespace=mine", namespace="small")
    plane.put([sample("chat", "mine"), sample("chat", "theirs")])
    settle(plane, "mine")
    quiet(operator)
    assert versions(plane, "theirs") == {}
    assert "status" not in plane.get("oks", "chat", "-n", "theirs")
    feasible = condition(plane, "mine", "chat", "PlacementFeasible")
    assert (feasible["status"], feasible["reason"]) == ("Unknown", "NodesNotVisible")
    asked = {
        call["requestURI"].split("?")[0]
        for call in list(plane.calls())[num_calls:]
        if call["user"]["username"].startswith("system:serviceaccount:small:")
    }
    assert [
        uri
        for uri in asked
        if "/namespaces/" in uri and uri.split("/namespaces/")[1].split("/")[0] not in ("mine", "small")
    ] == []
    for name in ("mine", "theirs"):
        plane.check("delete", "oks", "chat", "-n", name)


def test_two_operators_whose_scopes_overlap_never_work_on_one_service(
    plane: ControlPlane, chart: Helm, account: Path, namespace: str, start: Start
) -> None:
    first = start(account, "--read-nodes")
    plane.put([sample("chat", namespace)])
    settle(plane, namespace)
    # A second release, of this namespace alone, which by itself would say and decide other things.
    small = chart_role(plane, chart, "second", f"operator.watchNamespaces={{{namespace}}}")
    second = start(small, f"--namespace={namespace}", namespace="second")
    wait_for(lambda: "LeftToAnotherOperator" in events(plane, namespace), "the second to say that it waits")
    note = events(plane, namespace)["LeftToAnotherOperator"]["note"]
    who = f"operator second/oasiskv-operator leaves services of namespace {namespace} to operator"
    assert note == f"{who} system/oasiskv-operator, which was there first"
    num_writes = quiet(first)
    patch = '{"spec":{"decode":{"replicas":3}}}'
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", patch)
    settle(plane, namespace)
    assert quiet(first) > num_writes
    assert second.metric("oasiskv_operator_writes_total") == 1  # the Event
    # When the first one has gone for good, its right ends by time; here somebody ends it.
    first.stop()
    plane.check("delete", "lease", "oasiskv-services", "-n", namespace)
    plane.check("annotate", "oks", "chat", "-n", namespace, "somebody/looked=1")

    def operator() -> str:
        said: str = plane.get("oks", "chat", "-n", namespace)["status"]["operator"]
        return said

    wait_for(lambda: operator() == "second/oasiskv-operator", "the second to go on")
    plane.check("delete", "oks", "chat", "-n", namespace)
    left = "/apis/coordination.k8s.io/v1/namespaces"
    wait_for(lambda: not plane.ask("GET", f"{left}/{namespace}/leases")["items"], "its lease to go with the service")


def test_kinds_that_are_installed_later_are_used_without_a_restart_and_each_number_has_one_owner(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    operator = start(account, "--read-nodes", "--resync-seconds=2")
    scaling = {"maxReplicas": 3, "prometheus": PROMETHEUS}
    decode = {"replicas": 2, "scaling": {"maxReplicas": 4, "prometheus": {"address": "http://prometheus:9090"}}}
    plane.put([sample("chat", namespace, prefill={"scaling": scaling}, decode=decode)])
    settle(plane, namespace)
    # Without KEDA the operator itself asks the pods, of which none answers here.
    wait_for(lambda: condition(plane, namespace, "chat", "ScalingActive")["reason"] == "NoMetrics", "no answer")
    plane.define_optional("PodMonitor", "ScaledObject")
    wait_for(lambda: plane.get("scaledobjects,podmonitors", "-n", namespace)["items"].__len__() == 3, "both kinds")
    settle(plane, namespace)
    assert condition(plane, namespace, "chat", "ScalingActive")["reason"] == "Keda"
    # KEDA's number is left alone, and is the operator's again when KEDA is not wanted any more.
    name = f"chat-prefill-{plane.get('oks', 'chat', '-n', namespace)['status']['kvGeneration']}"
    plane.check("scale", "deployment", name, "-n", namespace, "--replicas=3")
    wait_for(lambda: plane.get("oks", "chat", "-n", namespace)["status"]["roles"]["prefill"]["ready"] == 3, "3 pods")
    quiet(operator)
    assert plane.get("deployment", name, "-n", namespace)["spec"]["replicas"] == 3
    # Of decode it scales the service itself, as its target says.
    target = plane.get("scaledobject", "chat-decode", "-n", namespace)["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "oasiskv.io/v1alpha1", "kind": "OasisKVService", "name": "chat"}
    plane.check("scale", "oks", "chat", "-n", namespace, "--replicas=3")
    wait_for(lambda: plane.get("oks", "chat", "-n", namespace)["status"]["roles"]["decode"]["ready"] == 3, "3 pods")
    plane.check(
        "patch",
        "oks",
        "chat",
        "-n",
        namespace,
        "--type=json",
        "-p",
        json.dumps(
            [
                {"op": "replace", "path": "/spec/prefill", "value": {"replicas": 2}},
                {"op": "remove", "path": "/spec/decode/scaling"},
            ]
        ),
    )
    operator.stop()  # in the middle, as it may be
    start(account, "--read-nodes", "--resync-seconds=2")
    wait_for(lambda: plane.get("scaledobjects", "-n", namespace)["items"] == [], "no scaler")
    wait_for(lambda: plane.get("deployment", name, "-n", namespace)["status"].get("readyReplicas") == 2, "2 pods")


def test_what_the_api_server_refuses_is_in_the_status_until_it_is_allowed(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    start(account, "--read-nodes")
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": namespace},
    }
    plane.put([{**quota, "spec": {"hard": {"count/statefulsets.apps": "0"}}}])
    wait_for(lambda: "used" in plane.get("resourcequota", "none", "-n", namespace).get("status", {}), "the quota")
    plane.put([sample("chat", namespace)])
    wait_for(lambda: condition(plane, namespace, "chat", "Applied").get("status") == "False", "the refusal")
    assert "exceeded quota: none" in condition(plane, namespace, "chat", "Applied")["message"]
    plane.check("delete", "resourcequota", "none", "-n", namespace)
    settle(plane, namespace)
    assert condition(plane, namespace, "chat", "Applied")["status"] == "True"


def test_pods_that_have_no_room_are_said_in_numbers_and_start_when_there_is(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    start(account, "--read-nodes")
    placement = {"nodeSelector": {"pool": "new"}, "tolerations": [{"key": "nvidia.com/gpu"}]}
    plane.put([sample("chat", namespace, placement=placement)])
    wait_for(lambda: condition(plane, namespace, "chat", "PlacementFeasible").get("status") == "False", "the blocker")
    message = condition(plane, namespace, "chat", "PlacementFeasible")["message"]
    assert message == "pool: expected new on a node, got 0 of 100 nodes"
    pods = ("StagingReady", "PrefillReady", "DecodeReady")

    def waits() -> list[bool]:
        said = [condition(plane, namespace, "chat", kind).get("message", "") for kind in pods]
        return [": pod chat-" in each and "nodes are available: " in each for each in said]

    wait_for(lambda: all(waits()), "what the scheduler says of the pods that there are")
    plane.add_nodes(1, "new", pool="new")
    wait_for(lambda: condition(plane, namespace, "chat", "PlacementFeasible").get("status") == "True", "room")
    settle(plane, namespace)
    wait_for(lambda: "RolloutDone" in events(plane, namespace), "the last event")
    told = events(plane, namespace)
    assert told["NoNodeMatches"]["note"] == f"PlacementFeasible: {message}"
    assert (told["NoNodeMatches"]["type"], told["Fits"]["type"]) == ("Warning", "Normal")
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", '{"spec":{"staging":{"memory":"1"}}}')
    wait_for(lambda: "InvalidSpec" in events(plane, namespace), "the refused edit to be told")
    assert "series" not in told["NoNodeMatches"]
    assert "EditReverted" not in told  # of what controllers and webhooks fill in
    plane.check("delete", "node", "new-0")


def devices(driver: str, name: str, node: str, roots: Sequence[str]) -> dict[str, Any]:
    """Return what a driver of devices says of a node: where at PCIe each one hangs."""
    made = [
        {"name": f"{name}-{index}", "attributes": {"resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{root}"}}}
        for index, root in enumerate(roots)
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "pool": pool, "nodeName": node, "devices": made}
    metadata = {"name": f"{node}-{name}"}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def test_a_gpu_and_the_port_beside_it_are_claimed_together(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    start(account, "--read-nodes")
    put: list[dict[str, Any]] = []
    for name in ("gpu", "nic"):
        selectors = [{"cel": {"expression": f"device.driver == '{name}.test'"}}]
        metadata = {"name": f"{name}.test"}
        put.append({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata})
        put[-1]["spec"] = {"selectors": selectors}
    for node in ("h100-0", "h100-1"):  # of each two, one GPU and one port are neighbours
        put += [devices("gpu.test", "gpu", node, ("0a", "0b")), devices("nic.test", "nic", node, ("0c", "0b"))]
    plane.put(put)
    claim = {"claim": {"gpuClass": "gpu.test", "rdmaClass": "nic.test"}}
    placement = {**sample("chat", namespace)["spec"].get("placement", {}), **claim}
    plane.put([sample("chat", namespace, placement=placement, decode={"replicas": 1})])
    settle(plane, namespace)
    claims = plane.get("resourceclaims", "-n", namespace)["items"]
    given = [
        sorted((each["pool"], each["device"]) for each in one["status"]["allocation"]["devices"]["results"])
        for one in claims
    ]
    assert sorted(given) == [[(node, "gpu-1"), (node, "nic-1")] for node in ("h100-0", "h100-1")]
    feasible = condition(plane, namespace, "chat", "PlacementFeasible")
    assert (feasible["status"], feasible["message"]) == ("True", "devices of classes are not counted")
    # Another class is another template, and the old one goes when no pod's template names it any more.
    (before,) = plane.get("resourceclaimtemplates", "-n", namespace)["items"]
    patch = '{"spec":{"placement":{"claim":null}}}'
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", patch)
    wait_for(lambda: plane.get("resourceclaimtemplates", "-n", namespace)["items"] == [], f"no {before['kind']}")
    settle(plane, namespace)
    plane.check("delete", "oks", "chat", "-n", namespace)
    plane.check("delete", "deviceclasses,resourceslices", "--all")


def test_certificates_are_asked_of_cert_manager_when_it_is_there_and_never_done_without(
    plane: ControlPlane, account: Path, namespace: str, start: Start
) -> None:
    start(account, "--read-nodes", "--resync-seconds=2")
    plane.put([sample("chat", namespace, tls={"issuer": {"name": "ca"}})])

    def why() -> tuple[str, str]:
        found = condition(plane, namespace, "chat", "CertificatesReady")
        return found.get("status", ""), found.get("reason", "")

    wait_for(lambda: why() == ("False", "CertManagerMissing"), "it to say that cert-manager is missing")
    plane.define_optional("Certificate")
    wait_for(lambda: why() == ("False", "NotIssued"), "a certificate to be waited for")
    (made,) = plane.get("certificates", "-n", namespace)["items"]
    for kind in ("statefulsets", "deployments"):
        for each in plane.get(kind, "-n", namespace)["items"]:
            secrets = [volume["secret"] for volume in each["spec"]["template"]["spec"]["volumes"] if "secret" in volume]
            assert [each["secretName"] for each in secrets] == [made["spec"]["secretName"]]
    # As cert-manager does once the Secret is there.
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    change = json.dumps({"status": {"conditions": [ready]}})
    name = made["metadata"]["name"]
    plane.check("patch", "certificate", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", change)
    wait_for(lambda: why() == ("True", "Issued"), "the certificate to be there")
    settle(plane, namespace)
    # A Secret of one's own instead is another KV generation, and the certificate goes with the old one.
    tls = '{"spec":{"tls":{"issuer":null,"secret":"mine"}}}'
    plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", tls)
    wait_for(lambda: why() == ("True", "Named"), "the Secret to be named")
    settle(plane, namespace)
    wait_for(lambda: plane.get("certificates", "-n", namespace)["items"] == [], "no certificate")
