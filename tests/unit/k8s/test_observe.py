from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from oasiskv.operator.facts import Facts, Ref, Taint, Workload
from oasiskv.operator.kinds import write
from oasiskv.operator.observe import Seen, add, amount, observe, read_node, read_pod
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.testing import service

KV = "oasiskv.io/kv-generation"


def labels(role: str, kv: str = "a", name: str = "chat") -> dict[str, str]:
    return {"oasiskv.io/service": name, "oasiskv.io/role": role, KV: kv}


def workload(kind: str, role: str, *, kv: str = "a", generation: int = 1, **status: Any) -> dict[str, Any]:
    counts = {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}
    pod = {"volumes": [{"name": "config", "configMap": {"name": f"chat-{role}-{kv}"}}, {"name": "tmp", "emptyDir": {}}]}
    return {
        "kind": kind,
        "metadata": {"name": f"chat-{role}-{kv}", "generation": generation, "labels": labels(role, kv)},
        "spec": {"replicas": 2, "template": {"metadata": {"labels": labels(role, kv)}, "spec": pod}},
        "status": counts | status,
    }


def inference(kv: str = "a", *, observed: int = 1, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "kind": "InferenceService",
        "metadata": {"name": "chat", "generation": 1, "labels": labels("decode", kv)}
        | ({"annotations": annotations} if annotations else {}),
        "spec": {"predictor": {"minReplicas": 2, "volumes": []}},
        "status": {"observedGeneration": observed, "url": "http://chat"},
    }


def pod(role: str = "decode", **changes: Any) -> dict[str, Any]:
    requests = {"cpu": "500m", "nvidia.com/gpu": 1}
    made: dict[str, Any] = {
        "metadata": {"name": "x", "namespace": "llm", "labels": labels(role)},
        "spec": {"nodeName": "n", "containers": [{"resources": {"requests": requests}}, {}]},
        "status": {"phase": "Running"},
    }
    return made | changes


def node(**spec: Any) -> dict[str, Any]:
    ready = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": "n", "labels": {"a": "b"}},
        "spec": spec,
        "status": {"allocatable": {"cpu": "4", "memory": "1Gi"}, "conditions": ready},
    }


def facts(pods: Any = (), nodes: Any = None, **seen: Any) -> Facts:
    used: dict[str, Fraction] = {}
    read = [read_pod(pod) for pod in pods]
    for each in read:
        add(used, each.requests if each.node else {})
    own = [each for each in read if (each.namespace, each.labels.get("oasiskv.io/service")) == ("llm", "chat")]
    found = None if nodes is None else [replace(read_node(each), used=used) for each in nodes]
    return observe(Seen(service=service(), pods=own, nodes=found, **seen), "2026-01-01T00:00:00Z")


def test_a_cluster_with_nothing_in_it_is_what_a_new_service_sees() -> None:
    assert facts() == Facts(now="2026-01-01T00:00:00Z", kinds=frozenset(), nodes=None)


def test_workloads_are_found_by_kv_generation_and_staging_by_its_name() -> None:
    found = facts(children=[workload("Deployment", "prefill"), workload("StatefulSet", "staging", kv="b")])
    done = Workload(desired=2, updated=2, ready=2, total=2)
    assert (found.prefills, found.stagings) == ({"a": done}, {"chat-staging-b": done})
    assert found.children == {Ref("Deployment", "chat-prefill-a"): "a", Ref("StatefulSet", "chat-staging-b"): "b"}
    assert found.configs_in_use == {"chat-prefill-a", "chat-staging-b"}


def test_a_service_tells_which_staging_it_leads_to() -> None:
    labels = {"oasiskv.io/kv-generation": "b"}
    made = {"kind": "Service", "metadata": {"name": "chat-staging-b", "namespace": "llm", "labels": labels}}
    assert facts(children=[{**made, "spec": {"selector": {"a": "b"}}}]).staging_revisions == {}
    selector = {"oasiskv.io/staging-revision": "r1"}
    assert facts(children=[{**made, "spec": {"selector": selector}}]).staging_revisions == {"b": "r1"}


def test_a_certificate_is_there_when_cert_manager_says_so() -> None:
    metadata = {"name": "chat-tls-a", "namespace": "llm", "labels": {"oasiskv.io/kv-generation": "a"}}
    made: dict[str, Any] = {"kind": "Certificate", "metadata": metadata, "spec": {}}
    assert facts(children=[made]).certificates == {"a": "cert-manager has not made it yet"}
    for status, why in (("False", "no such issuer"), ("True", "")):
        ready = {"type": "Ready", "status": status, "message": "no such issuer"}
        said = {"status": {"conditions": [{"type": "Issuing", "status": "True"}, ready]}}
        assert facts(children=[made | said]).certificates == {"a": why}


def test_a_report_about_an_older_generation_is_not_current() -> None:
    assert not facts(children=[workload("Deployment", "prefill", generation=2)]).prefills["a"].is_current


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([{"type": "Available", "status": "False", "message": "no quorum"}], "no quorum"),
        ([{"type": "ReplicaFailure", "status": "True", "message": "quota"}], "quota"),
        ([{"type": "ReplicaFailure", "status": "False", "message": "fine"}], ""),
        ([{"type": "Available", "status": "True", "message": "fine"}], ""),
    ],
)
def test_what_a_controller_complains_of_is_passed_on(conditions: list[dict[str, str]], message: str) -> None:
    made = facts(children=[workload("Deployment", "prefill", conditions=conditions)])
    assert made.prefills["a"].message == message


def test_decode_has_the_counts_of_the_deployment_that_kserve_made() -> None:
    decode = facts(children=[inference()], decode=workload("Deployment", "decode")).decode
    assert decode is not None
    assert (decode.kv_generation, decode.url, decode.is_done) == ("a", "http://chat", True)


@pytest.mark.parametrize(
    ("made", "deployment"),
    [
        (inference("b"), workload("Deployment", "decode")),  # KServe has not written the Deployment yet
        (inference(observed=0), workload("Deployment", "decode")),
        (inference(), workload("Deployment", "decode", generation=2)),
        (inference(), None),
    ],
)
def test_decode_is_not_done_before_every_controller_has_seen_the_change(made: Any, deployment: Any) -> None:
    decode = facts(children=[made], decode=deployment).decode
    assert decode is not None
    assert not decode.is_done


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ([], ("http://chat", "")),
        ([{"type": "IngressReady", "status": "True"}], ("http://chat", "")),
        ([{"type": "IngressReady", "status": "False", "message": "no gateway"}], ("", "no gateway")),
        ([{"type": "IngressReady", "status": "Unknown", "reason": "NotAccepted"}], ("", "NotAccepted")),
        ([{"type": "Ready", "status": "False", "message": "no pods"}], ("http://chat", "")),
    ],
)
def test_an_address_whose_route_is_lost_is_none(route: list[dict[str, str]], expected: tuple[str, str]) -> None:
    made = inference()
    made["status"]["conditions"] = route
    decode = facts(children=[made], decode=workload("Deployment", "decode")).decode
    assert decode is not None
    assert (decode.url, decode.no_route) == expected


def test_a_stopped_inference_service_is_done_without_a_deployment() -> None:
    decode = facts(children=[inference(annotations={"serving.kserve.io/stop": "true"})]).decode
    assert decode is not None
    assert decode.is_done


def test_pods_are_counted_while_they_are_there() -> None:
    pods = [
        pod(),
        pod(metadata={"name": "y", "namespace": "llm", "labels": labels("decode", "b"), "deletionTimestamp": "now"}),
        pod(status={"phase": "Failed"}),
        pod(metadata={"name": "z", "namespace": "other", "labels": labels("decode")}),
        pod("prefill"),
    ]
    assert facts(pods=pods).decode_pods == {"a": 1, "b": 1}


def test_a_node_is_used_by_what_others_request_and_by_staging_but_not_by_own_engines() -> None:
    other = {"name": "o", "namespace": "other", "labels": {}}
    init = {"nodeName": "n", "containers": [{}], "initContainers": [{"resources": {"requests": {"memory": "1Gi"}}}]}
    pods = [
        pod(),
        pod("prefill"),
        pod("staging"),
        pod(metadata=other),
        pod(metadata=other, spec=init),
        pod(metadata=other, status={"phase": "Succeeded"}),
        pod(metadata=other, spec={"containers": [{}]}),
    ]
    (found,) = facts(nodes=[node()], pods=pods).nodes or ()
    assert found.used == {"cpu": 1, "nvidia.com/gpu": 2, "memory": 2**30}
    assert found.allocatable == {"cpu": Fraction(4), "memory": Fraction(2**30)}


def test_a_sidecar_counts_beside_the_containers() -> None:
    sidecar = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "2"}}}
    spec = {"nodeName": "n", "containers": [{"resources": {"requests": {"cpu": "1"}}}], "initContainers": [sidecar]}
    other = {"name": "o", "namespace": "other", "labels": {}}
    (found,) = facts(nodes=[node()], pods=[pod(metadata=other, spec=spec)]).nodes or ()
    assert found.used == {"cpu": 3}


@pytest.mark.parametrize(("spec", "is_ready"), [({}, True), ({"unschedulable": True}, False)])
def test_a_node_that_takes_no_pods_is_not_ready(spec: dict[str, Any], is_ready: bool) -> None:
    (found,) = facts(nodes=[node(**spec)]).nodes or ()
    assert found.is_ready is is_ready


def test_a_node_without_a_good_report_is_not_ready() -> None:
    made = node(taints=[{"key": "k", "effect": "NoSchedule"}])
    made["status"]["conditions"][1]["status"] = "Unknown"
    (found,) = facts(nodes=[made]).nodes or ()
    assert (found.is_ready, found.taints) == (False, (Taint(key="k", value="", effect="NoSchedule"),))


def test_a_status_that_was_written_is_read_again() -> None:
    of = service()
    status = reconcile(of, Facts(now="2026-01-01T00:00:00Z")).status
    of["status"] = write(status)
    assert observe(Seen(service=of), "now").status == status


def test_a_status_that_cannot_be_read_is_as_none() -> None:
    of = service()
    of["status"] = {"roles": "all fine"}
    assert observe(Seen(service=of), "now") == observe(Seen(service=service()), "now")


def test_a_template_that_kserve_still_makes_pods_of_counts_as_a_pod() -> None:
    old = workload("Deployment", "decode", kv="old")
    assert facts(children=[inference("new")], decode=old).decode_pods == {"old": 1}
    old["spec"]["replicas"] = 0
    assert facts(children=[inference("new")], decode=old).decode_pods == {}


def test_what_was_verified_is_in_the_status() -> None:
    of = service()
    of["status"] = write(reconcile(of, Facts(now="2026-01-01T00:00:00Z")).status) | {"verifiedRevision": "r1 r2"}
    assert observe(Seen(service=of), "now").verified == {("r1", "r2")}
    assert facts().verified == frozenset()


def test_a_profile_is_read_with_its_generation() -> None:
    found = facts(profile={"metadata": {"generation": 3}, "spec": {"network": {"fabric": "Stream"}}}).profile
    assert found is not None
    assert (found.generation, found.spec.network.fabric) == (3, "Stream")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", 3 * 2**29),
        ("2Ei", 2**61),
        ("1E", 10**18),
        ("1E3", 1000),
        ("12e-1", Fraction(6, 5)),
        ("100n", Fraction(1, 10**7)),
        ("250u", Fraction(1, 4000)),
        (".5", Fraction(1, 2)),
        ("-1", -1),
        ("", 0),
        ("many", 0),
        ("1 Gi", 0),
        ("1GiB", 0),
    ],
)
def test_every_way_to_write_a_quantity_is_read(text: str, value: Fraction) -> None:
    assert amount(text) == value


def test_last_words_are_those_of_a_container_that_ended() -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": "a", "namespace": "llm", "labels": {"oasiskv.io/service": "chat"}},
        "spec": {"containers": []},
    }
    for state, words in (
        ({"running": {}}, ""),
        ({"terminated": {"exitCode": 0}}, ""),
        ({"terminated": {"exitCode": 0, "message": "3 left"}}, "3 left"),
    ):
        assert read_pod({**pod, "status": {"containerStatuses": [{"state": state}]}}).last_words == words
    stranger = {**pod, "metadata": {**pod["metadata"], "labels": {}}}
    ended = {"containerStatuses": [{"state": {"terminated": {"message": "3 left"}}}]}
    assert read_pod({**stranger, "status": ended}).last_words == ""
    # One that failed says the end of its log, which is about no request.
    failed = {"containerStatuses": [{"state": {"terminated": {"exitCode": 1, "message": "Traceback"}}}]}
    assert read_pod({**pod, "status": failed}).last_words == ""


WAITS = {"reason": "ImagePullBackOff", "message": "no such image"}
FAILED = {"exitCode": 2, "message": "Traceback\nerror: spec: expected a model, got none\n"}
UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({}, ""),
        ({"conditions": [UNPLACED]}, "0/3 nodes are available"),
        ({"conditions": [{**UNPLACED, "status": "True"}]}, ""),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        ({"containerStatuses": [{"state": {"waiting": WAITS}}]}, "ImagePullBackOff: no such image"),
        (
            {"containerStatuses": [{"state": {"terminated": FAILED}}]},
            "its container ended with code 2: error: spec: expected a model, got none",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {}}]},
            "CrashLoopBackOff",
        ),
        (  # the same as long as it ends over and over, so that nothing is told anew
            {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": FAILED}}
                ]
            },
            "its container ended with code 2: error: spec: expected a model, got none",
        ),
        (
            {"containerStatuses": [{"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
            "its container ended with code 137: OOMKilled",
        ),
        ({"containerStatuses": [{"ready": True, "lastState": {"terminated": FAILED}}]}, ""),
        ({"initContainerStatuses": [{"state": {"waiting": WAITS}}]}, "ImagePullBackOff: no such image"),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": FAILED}}]}, ""),
    ],
)
def test_what_keeps_a_pod_from_coming_up_is_said_by_its_workload(status: dict[str, Any], trouble: str) -> None:
    roles = {"prefill": "Deployment", "decode": "Deployment", "staging": "StatefulSet"}
    for role, kind in roles.items():
        made = workload(kind, role)
        name = f"{made['metadata']['name']}-0"
        metadata = {"name": name, "namespace": "llm", "labels": labels(role)}
        children = [inference()] if role == "decode" else [made]
        seen = facts(
            children=children,
            decode=made if role == "decode" else None,
            pods=[pod(role, metadata=metadata, status=status)],
        )
        (found,) = [seen.decode] if role == "decode" else [*seen.prefills.values(), *seen.stagings.values()]
        assert found is not None
        assert found.message == (f"pod {name}: {trouble}" if trouble else "")
