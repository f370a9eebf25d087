"""What can be said of the chart without helm."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from oasiskv.operator.api import GROUP, ServiceSpec
from oasiskv.operator.crds import KINDS, MAX_NAME
from oasiskv.operator.facts import CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT
from oasiskv.operator.kinds import read
from oasiskv.operator.render import render
from oasiskv.operator.testing import SPEC

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/oasiskv"
TEMPLATES = "".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))
CLAIM = {"rdmaClass": "roce"}
SCALING = {"maxReplicas": 2, "prometheus": {"address": "http://prometheus", "query": "up", "threshold": 1}}


def rules() -> list[dict[str, list[str]]]:
    """Return what the operator may do in a namespace that it works in."""
    found = re.search(
        r'define "oasiskv.rules" -\}\}\n(.*?)\{\{- end', (CHART / "templates/_helpers.tpl").read_text(), re.DOTALL
    )
    assert found is not None
    made: list[dict[str, list[str]]] = yaml.safe_load(found[1])
    return made


def paths(of: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, each in of.items():
        yield f"{path}.{name}"
        if isinstance(each, Mapping):
            yield from paths(each, f"{path}.{name}")


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def known(of: Mapping[str, Any], path: str = "") -> Iterator[str]:
        for name, each in of.get("properties", {}).items():
            yield f"{path}.{name}"
            yield from known(each, f"{path}.{name}")

    def closed(of: Mapping[str, Any]) -> Iterator[bool]:
        if "properties" in of:
            yield of.get("additionalProperties") is False
        for each in (*of.get("properties", {}).values(), *of.get("definitions", {}).values()):
            yield from closed(each)

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = (".operator.resources.", ".monitoring.dashboards.labels.")
    listed = {path for path in known(schema) if not path.startswith(free)} - {".global"}
    assert listed == {path for path in paths(values) if not path.startswith(free)}
    assert all(closed(schema))


def test_a_name_that_the_api_server_would_refuse_is_refused_before() -> None:
    assert f"at most {MAX_NAME} characters" in (CHART / "templates/validate.yaml").read_text()


def test_the_operator_may_write_every_kind_that_it_makes_and_no_other() -> None:
    more = {"prefill": {"scaling": SCALING}, "tls": {"issuer": {"name": "ca"}}, "placement": {"claim": CLAIM}}
    spec = read(ServiceSpec, {**SPEC, **more}, "spec")
    assert spec.placement is not None
    assert spec.network is not None
    kinds = frozenset({CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT})
    made = render({"name": "chat", "namespace": "llm"}, spec, spec.placement, spec.network, kinds)
    wanted = set()
    for each in (*made.common, *made.generation, *made.decode):
        group = each["apiVersion"].rpartition("/")[0]
        wanted.add((group, re.sub("y$", "ie", each["kind"].lower()) + "s"))
    writable = {
        (group, resource)
        for rule in rules()
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if {"get", "list", "watch", "create", "patch", "delete"} == set(rule["verbs"])
    }
    assert writable == wanted


def test_the_operator_reads_no_secret_and_has_no_wildcard() -> None:
    assert "secrets" not in re.findall(r"resources: \[(.*)\]", TEMPLATES)
    assert not [line for line in TEMPLATES.splitlines() if re.search(r"(apiGroups|resources|verbs): .*\*", line)]


def test_the_hook_may_change_our_definitions_and_no_other() -> None:
    text = (CHART / "templates/definitions.yaml").read_text()
    names = [f"{kind.plural}.{GROUP}" for kind in KINDS]
    assert re.findall(r"resourceNames: \[(.*)\]", text) == [", ".join(names)]
    assert re.findall(r"verbs: \[(.*)\]", text) == ["get, patch"]


def test_images_have_exact_tags() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["operator"]["tag"] == ""  # the chart's appVersion
    assert re.fullmatch(r"\d+\.\d+\.\d+(-\w+)?", values["redis"]["tag"])
