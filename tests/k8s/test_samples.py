"""What people begin with: the samples are taken as they are, and each field that is wrong is refused by its name."""

import copy
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasiskv.operator.api import ProfileSpec
from oasiskv.operator.crds import KINDS, definition
from oasiskv.operator.facts import CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, Facts, Profile
from oasiskv.operator.kinds import read
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.testing import SPEC
from oasiskv.operator.testing_server import ApiServer

SAMPLES = sorted((Path(__file__).parents[2] / "examples/kubernetes").glob("*.yaml"))
NOW = "2026-01-01T00:00:00Z"
FACTS = Facts(now=NOW, kinds=frozenset({INFERENCE_SERVICE, CERTIFICATE, CLAIM_TEMPLATE}))
LONG = "x" * 600

Path_ = tuple[str | int, ...]


def create(cluster: ApiServer, made: dict[str, Any]) -> dict[str, Any]:
    """Return an object as the API server would take it; an unknown field is an error, as kubectl has it."""
    plural = f"{made['kind'].lower()}s"
    path = f"/apis/{made['apiVersion']}/namespaces/llm/{plural}?dryRun=All&fieldValidation=Strict"
    taken: dict[str, Any] = cluster.ask("POST", path, made)
    return taken


def accepted(service: dict[str, Any], profiles: dict[str, Profile]) -> str:
    """Return what the operator has against a service; empty if nothing."""
    name = service["spec"].get("profile", {}).get("name")
    facts = Facts(now=NOW, kinds=FACTS.kinds, profile=profiles.get(name))
    found = {each.type: each for each in reconcile(service, facts).status.conditions}
    return "; ".join(found[kind].message for kind in ("Accepted", "ProfileResolved") if found[kind].status != "True")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_taken_as_it_is(path: Path, cluster: ApiServer) -> None:
    made = [each for each in yaml.safe_load_all(path.read_text()) if each["apiVersion"].startswith("oasiskv.io/")]
    taken = [create(cluster, each) for each in made]
    profiles = {
        each["metadata"]["name"]: Profile(generation=1, spec=read(ProfileSpec, each["spec"], "spec"))
        for each in taken
        if each["kind"] == "OasisKVProfile"
    }
    services = [each for each in taken if each["kind"] == "OasisKVService"]
    assert [accepted(each, profiles) for each in services] == [""]


def test_there_is_a_sample_to_begin_with() -> None:
    assert "smallest" in [path.stem for path in SAMPLES]


# What must not be said together is said in turn, by the field that is looked at.
FULL: dict[str, Any] = {
    **SPEC,
    "prefill": {
        "scaling": {"maxReplicas": 4, "prometheus": {"address": "http://p:9090", "query": "a", "threshold": 1}}
    },
    "decode": {"replicas": 2, "scaling": {"maxReplicas": 4, "prometheus": {"address": "http://p:9090"}}},
    "placement": {"claim": {"rdmaClass": "a"}, "tolerations": [{"key": "a"}], "nodeSelector": {"a": "b"}},
    "tls": {"issuer": {"name": "a"}},
}
ALONE: dict[Path_, tuple[Path_, Any]] = {
    ("prefill", "replicas"): (("prefill",), {}),
    ("tls", "secret"): (("tls",), {}),
    ("profile",): (("placement",), None),
    ("placement", "gpuResource"): (("placement",), {}),
    ("model", "tokenSecret"): (("model",), {**SPEC["model"], "uri": "hf://a/b"}),
    ("staging", "replacement"): (("staging",), {}),
}


def wrong(schema: dict[str, Any]) -> list[Any]:
    """Return values that a field must not have."""
    if "x-kubernetes-int-or-string" in schema:
        return ["lots", {"a": 1}]
    match schema["type"]:
        case "integer" | "number" as kind:
            beyond = [schema[end] + step for end, step in (("minimum", -1), ("maximum", 1)) if end in schema]
            return ["many", *beyond, *([1.5] if kind == "integer" else [])]
        case "string":
            return [7, *(["Wrong"] if "enum" in schema else ()), *(["", " ", LONG] if "pattern" in schema else ())]
        case "boolean":
            return ["perhaps"]
    return ["text", 5]


def cases(schema: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield a field, and a value that it must not have; None for one that must not be left out."""
    if path:
        yield from ((path, value) for value in wrong(schema))
    if schema.get("type") == "array":
        yield from cases(schema["items"], (*path, 0))
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield from cases(values, (*path, "key"))
    if "properties" in schema:
        yield (*path, "nonsense"), 1
        yield from (((*path, name), None) for name in schema.get("required", ()))
        for name, of in schema["properties"].items():
            yield from cases(of, (*path, name))


def put(spec: dict[str, Any], path: Path_, value: Any) -> None:
    """Set a field, or take it out; what is above it is made where it is not there."""
    *above, last = path
    at: Any = spec
    for key, below in zip(above, path[1:], strict=True):
        if isinstance(at, dict):
            at = at.setdefault(key, [{}] if isinstance(below, int) else {})
        else:
            at = at[int(key)]
    if value is None:
        at.pop(last, None)
    else:
        at[last] = value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_field_that_is_wrong_is_refused_by_its_name(kind: Any, cluster: ApiServer) -> None:
    schema = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    base = FULL if kind.name == "OasisKVService" else {name: FULL[name] for name in ("placement", "network")}
    metadata = {"name": "wrong", "namespace": "llm"}
    unnamed, num = [], 0
    for path, value in cases(schema):
        spec = copy.deepcopy(base)
        for alone, (where, instead) in ALONE.items() if kind.name == "OasisKVService" else ():
            if path[: len(alone)] == alone:
                put(spec, where, copy.deepcopy(instead))
        put(spec, path, value)
        made = {"apiVersion": "oasiskv.io/v1alpha1", "kind": kind.name, "metadata": metadata, "spec": spec}
        try:
            taken = create(cluster, made)
            taken["metadata"]["generation"] = 1
            said = accepted(taken, {}) if kind.name == "OasisKVService" else ""
        except urllib.error.HTTPError as error:
            with error:
                said = json.loads(error.read())["message"]
        name = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
        num += 1
        if f"spec{name}" not in said:
            unnamed.append(f"spec{name} = {value!r:.40}: {said[:200]}")
    assert unnamed == []
    assert num > 40
