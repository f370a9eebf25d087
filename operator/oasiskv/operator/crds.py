"""The CustomResourceDefinitions and the reference page, written from `api` by `python -m oasiskv.operator.crds`."""

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from oasiskv.operator import api, api_status
from oasiskv.operator.schema import rows, schema

ROOT = Path(__file__).parents[3]
FOLDER, PAGE = "helm/oasiskv/crds", "docs/operator-reference.md"
VERSION = f"{api.GROUP}/version"
"""Annotation of a definition: the version of this package that wrote it, so that none replaces a newer one."""
MAX_NAME = 35
"""Longest name of a service: its longest label value is NAME-staging-GENERATION-HASH, of 63 characters at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of resource."""

    name: str
    plural: str
    short: str
    spec: type
    status: type | None = None
    columns: tuple[tuple[str, str, str, int], ...] = ()
    """Name, type, JSON path, and priority: 0 always shown, 1 with `-o wide`."""
    scale: tuple[str, str, str] | None = None
    """Paths of the wanted number, the number there is, and the selector."""


def _condition(name: str, part: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{name}")].{part}'


SERVICE = Kind(
    name="OasisKVService",
    plural="oasiskvservices",
    short="oks",
    spec=api.ServiceSpec,
    status=api_status.ServiceStatus,
    columns=(
        ("Ready", "string", _condition("Ready"), 0),
        ("Reason", "string", _condition("Ready", "reason"), 0),
        ("Prefill", "string", ".status.roles.prefill.summary", 0),
        ("Decode", "string", ".status.roles.decode.summary", 0),
        ("Staging", "string", ".status.roles.staging.summary", 0),
        ("URL", "string", ".status.url", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Model", "string", ".spec.model.uri", 1),
        ("KV", "string", ".status.servingKvGeneration", 1),
    ),
    scale=(".spec.decode.replicas", ".status.roles.decode.current", ".status.roles.decode.selector"),
)
PROFILE = Kind(
    name="OasisKVProfile",
    plural="oasiskvprofiles",
    short="okp",
    spec=api.ProfileSpec,
    columns=(
        ("GPUs", "string", ".spec.placement.gpuProducts", 0),
        ("Fabric", "string", ".spec.network.fabric", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
    ),
)
KINDS = (SERVICE, PROFILE)


def definition(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
    properties: dict[str, Any] = {"spec": {"description": kind.spec.__doc__} | schema(kind.spec)}
    version: dict[str, Any] = {"name": api.VERSION, "served": True, "storage": True}
    if kind.status is not None:
        properties["status"] = {"description": kind.status.__doc__} | _as_found(schema(kind.status))
        conditions = properties["status"]["properties"]["conditions"]
        conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        version["subresources"] = {"status": {}}
    if kind.scale is not None:
        names = ("specReplicasPath", "statusReplicasPath", "labelSelectorPath")
        version["subresources"]["scale"] = dict(zip(names, kind.scale, strict=True))
    version["additionalPrinterColumns"] = [
        {"name": name, "type": type_, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, type_, path, priority in kind.columns
    ]
    version["schema"] = {
        "openAPIV3Schema": {
            "type": "object",
            "required": ["spec"],
            "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
            | properties,
            "x-kubernetes-validations": _name_rules(kind),
        }
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{api.GROUP}",
            "annotations": {VERSION: importlib.metadata.version("oasiskv")},
        },
        "spec": {
            "group": api.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def page() -> str:
    """Return the reference page."""
    lines = [
        "# Resources of the operator",
        "",
        "Written by `make crds` from `operator/oasiskv/operator/api.py`; [design note 0007](design/0007-operator.md)"
        " says what the operator makes of them.",
    ]
    for kind in KINDS:
        lines += ["", f"## {kind.name}", "", f"`{api.GROUP}/{api.VERSION}`, short `{kind.short}`. {kind.spec.__doc__}"]
        lines += ["", "| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        for row in rows(kind.spec, "spec"):
            field, type_, default, meaning = (cell.replace("|", "\\|") for cell in row)
            lines.append(f"| `{field}` | {type_} | {default} | {meaning} |")
        if kind.status is not None:
            lines += ["", f"### Status of {kind.name}", "", "| field | meaning |", "| --- | --- |"]
            lines += [f"| `{row[0]}` | {row[3]} |" for row in rows(kind.status, "status")]
    return "\n".join(lines) + "\n"


def files() -> Mapping[str, str]:
    """Return the text of every generated file by its path in the repository."""
    made = {
        f"{FOLDER}/{kind.plural}.yaml": yaml.safe_dump(definition(kind), sort_keys=False, width=120) for kind in KINDS
    }
    return made | {PAGE: page()}


def main() -> int:
    """Write the generated files."""
    for path, text in files().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(path)
    return 0


def _as_found(of: Any) -> Any:
    """Return the schema of a status: it says what was found, so nothing is filled in or held against rules."""
    if not isinstance(of, dict):
        return of
    return {name: _as_found(each) for name, each in of.items() if name not in ("default", "x-kubernetes-validations")}


def _name_rules(kind: Kind) -> list[dict[str, str]]:
    if kind is not SERVICE:
        return []
    name = "self.metadata.name"
    return [
        {
            "rule": f"{name}.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size({name}) <= {MAX_NAME}",
            "message": f"name: expected a DNS label that begins with a letter, of at most {MAX_NAME} characters",
        }
    ]


if __name__ == "__main__":
    sys.exit(main())
