"""The resources on a real API server: it takes and refuses what the operator takes and refuses."""

import json
from typing import Any

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.facts import Facts
from oasiskv.operator.kinds import read, write
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.testing import SPEC
from oasiskv.operator.testing_server import ApiServer

PROMETHEUS = {"address": "http://prometheus", "query": "up", "threshold": 1}
GOOD: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an image by tag and digest": {"image": f"registry:5000/engine:0.4.0@sha256:{'0' * 64}"},
    "a hidden folder": {"model": {**SPEC["model"], "uri": "pvc://models/.cache/qwen3-8b/"}},
    "a number for a quantity": {"staging": {"cpu": 4}},
    "scaling": {"prefill": {"scaling": {"maxReplicas": 2, "prometheus": PROMETHEUS}}},
    "scaling of decode": {
        "decode": {"scaling": {"maxReplicas": 2, "prometheus": {"address": "http://prometheus:9090"}}}
    },
    "certificates of an issuer": {"tls": {"issuer": {"name": "ca"}}},
    "certificates of a Secret": {"tls": {"secret": "ca"}},
    "a stream": {"network": {"fabric": "Stream"}},
    "a profile for placement": {"profile": {"name": "h100"}, "placement": None},
}
BAD: dict[str, dict[str, Any]] = {
    "an image without a tag": {"image": "engine"},
    "a digest cut short": {"image": "engine:0.4.0@sha256:0123"},
    "a folder above the volume": {"model": {**SPEC["model"], "uri": "pvc://models/a/../../etc"}},
    "certificates of nobody": {"tls": {}},
    "certificates of both": {"tls": {"issuer": {"name": "ca"}, "secret": "ca"}},
    "a wait that KEDA cannot": {
        "decode": {"scaling": {"maxReplicas": 2, "scaleInSeconds": 4000, "prometheus": {"address": "http://a:1"}}}
    },
    "a name with a space": {"model": {**SPEC["model"], "name": "a b"}},
    "no decode": {"decode": {"replicas": 0}},
    "an unknown field": {"decode": {"replica": 2}},
    "an unknown setting": {"engine": {"lookahead": {"budget": 1}}},
    "a setting for tests": {"engine": {"lookahead": {"debugVerify": True}}},
    "an unknown fabric": {"network": {"fabric": "Wire"}},
    "RDMA without devices": {"network": {"fabric": "RDMA"}},
    "devices without RDMA": {"network": {"rdma": {"resource": "rdma/a"}}},
    "a rollout that cannot move": {"decode": {"rollout": {"maxSurge": 0}}},
    "two owners of a number": {"prefill": {"replicas": 1, "scaling": {"maxReplicas": 2, "prometheus": PROMETHEUS}}},
    "least above most": {"prefill": {"scaling": {"minReplicas": 3, "maxReplicas": 2, "prometheus": PROMETHEUS}}},
    "two places for an SSD": {"staging": {"ssd": {"size": "1Ti", "hostPath": "/a", "storageClass": "b"}}},
    "a token for a claim": {"model": {**SPEC["model"], "tokenSecret": "a"}},
    "a profile with nothing to say": {"profile": {"name": "a"}, "placement": {}, "network": {}},
    "a quantity that is none": {"staging": {"memory": "1GiB"}},
    "a newline at the end": {"image": "engine:1\n"},
    "a letter that is not of ASCII": {"image": "engine:\u00e9"},
    "a text for a number": {"decode": {"replicas": "2"}},
}


def resource(spec: dict[str, Any], name: str = "chat") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "llm"}
    return {"apiVersion": "oasiskv.io/v1alpha1", "kind": "OasisKVService", "metadata": metadata, "spec": spec}


def is_read(spec: dict[str, Any]) -> bool:
    try:
        read(ServiceSpec, spec, "spec")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_what_is_taken_here_is_taken_there(change: dict[str, Any], cluster: ApiServer) -> None:
    spec = {**SPEC, **change}
    assert is_read(spec)
    printed = cluster.check("create", "--dry-run=server", "-o", "json", "-f", "-", put=resource(spec))
    # What the API server filled in is what the operator takes for absent.
    assert read(ServiceSpec, json.loads(printed)["spec"], "spec") == read(ServiceSpec, spec, "spec")


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_is_refused_here_is_refused_there(change: dict[str, Any], cluster: ApiServer) -> None:
    spec = {**SPEC, **change}
    assert not is_read(spec)
    done = cluster.kubectl("create", "--dry-run=server", "-f", "-", put=resource(spec))
    assert done.returncode, done.stdout
    assert "spec" in done.stderr


@pytest.mark.parametrize(("length", "is_taken"), [(35, True), (36, False)])
def test_a_name_that_is_too_long_is_refused_with_the_longest_that_is_not(
    length: int, is_taken: bool, cluster: ApiServer
) -> None:
    done = cluster.kubectl("create", "--dry-run=server", "-f", "-", put=resource(dict(SPEC), "a" * length))
    assert (done.returncode == 0) is is_taken
    assert is_taken or "of at most 35 characters" in done.stderr


def test_a_status_is_kept_as_it_was_written(cluster: ApiServer) -> None:
    cluster.check("create", "-f", "-", put=resource(dict(SPEC), "status"))
    made = json.loads(cluster.check("get", "oks", "status", "-o", "json"))
    made["status"] = write(reconcile(made, Facts(now="2026-01-01T00:00:00Z")).status)
    cluster.check("replace", "--subresource=status", "-f", "-", put=made)
    assert json.loads(cluster.check("get", "oks", "status", "-o", "json"))["status"] == made["status"]
    assert "PodsReady" not in cluster.check("get", "oks", "status")
    assert "NotMade" in cluster.check("get", "oks", "status")


def test_the_scale_subresource_is_the_number_of_decode_pods(cluster: ApiServer) -> None:
    cluster.check("create", "-f", "-", put=resource(dict(SPEC), "scale"))
    cluster.check("scale", "oks", "scale", "--replicas=5")
    assert cluster.check("get", "oks", "scale", "-o", "jsonpath={.spec.decode.replicas}") == "5"


def test_objects_applied_twice_are_written_once(cluster: ApiServer) -> None:
    cluster.check("create", "-f", "-", put=resource(dict(SPEC), "twice"))
    made = json.loads(cluster.check("get", "oks", "twice", "-o", "json"))
    # This API server has no KServe.
    objects = reconcile(made, Facts(now="2026-01-01T00:00:00Z", kinds=frozenset())).apply
    items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    apply = ("apply", "--server-side", "--field-manager=oasiskv-operator", "-o", "json", "-f", "-")
    first, second = (json.loads(cluster.check(*apply, put=items))["items"] for _ in range(2))
    assert len(first) == len(objects)
    assert [each["metadata"]["resourceVersion"] for each in first] == [
        each["metadata"]["resourceVersion"] for each in second
    ]
