"""What can be said of the chart without helm."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.crds import MAX_NAME
from oasiskv.operator.facts import INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT
from oasiskv.operator.kinds import read
from oasiskv.operator.render import render
from oasiskv.operator.testing import SPEC

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/oasiskv"
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


def test_the_schema_knows_every_value_and_every_value_is_used() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def known(of: Mapping[str, Any], path: str = "") -> Iterator[str]:
        for name, each in of.get("properties", {}).items():
            yield f"{path}.{name}"
            yield from known(each, f"{path}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    listed = set(known(schema)) - {".global"}
    assert listed == {path for path in paths(values) if not path.startswith(".operator.resources.")}
    leaves = [path for path in listed if not any(other.startswith(f"{path}.") for other in listed)]
    assert [path for path in leaves if f".Values{path}" not in templates] == []


def test_a_name_that_the_api_server_would_refuse_is_refused_before() -> None:
    assert f"at most {MAX_NAME} characters" in (CHART / "templates/validate.yaml").read_text()


def test_the_operator_may_write_every_kind_that_it_makes_and_no_other() -> None:
    spec = read(ServiceSpec, {**SPEC, "prefill": {"scaling": SCALING}}, "spec")
    assert spec.placement is not None
    assert spec.network is not None
    kinds = frozenset({INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT})
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
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert "secrets" not in re.findall(r"resources: \[(.*)\]", text)
    assert not [line for line in text.splitlines() if re.search(r"(apiGroups|resources|verbs): .*\*", line)]
