import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.crds import KINDS, MAX_NAME, SERVICE, Kind, definition, files
from oasiskv.operator.kinds import read
from oasiskv.operator.schema import schema

ROOT = Path(__file__).parents[3]
APPLY_LIMIT = 262144
"""Most bytes of an annotation: `kubectl apply` without --server-side keeps the whole object in one."""


def schemas(of: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, of
    for name, each in of.get("properties", {}).items():
        yield from schemas(each, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in of:
            yield from schemas(of[name], f"{path}.{name}")


def root(kind: Kind) -> Mapping[str, Any]:
    found: Mapping[str, Any] = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("path", files())
def test_generated_files_are_those_of_this_code(path: str) -> None:
    assert (ROOT / path).read_text() == files()[path], "run make crds"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_definition_can_be_applied_from_the_client(kind: Kind) -> None:
    assert len(yaml.safe_dump(definition(kind))) < APPLY_LIMIT // 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_is_described_and_has_a_type(kind: Kind) -> None:
    for path, each in schemas(root(kind)):
        if re.match(r"\.(spec|status)\.", path) and not path.endswith(("items", "additionalProperties")):
            assert each.get("description"), path
        assert "type" in each or each.get("x-kubernetes-int-or-string"), path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_default_in_the_schema_is_what_the_code_takes_for_an_absent_field(kind: Kind) -> None:
    def defaults(of: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for name, each in of["properties"].items():
            if "default" in each:
                made[name] = defaults(each) if each["default"] == {} and "properties" in each else each["default"]
        return made

    required = {
        "image": "a:1",
        "model": {"uri": "hf://a/b", "hash": "h", "numLayers": 1, "numKvHeads": 1, "headDim": 1},
    }
    given = required if kind is SERVICE else {}
    filled = defaults(schema(kind.spec)) | given
    assert read(kind.spec, filled, "spec") == read(kind.spec, given, "spec")


def test_paths_of_columns_and_of_the_scale_subresource_exist() -> None:
    known = {path for path, _ in schemas(root(SERVICE))}
    assert SERVICE.scale is not None
    paths = [*SERVICE.scale, *(path for _, _, path, _ in SERVICE.columns)]
    simple = [path for path in paths if "[" not in path and not path.startswith(".metadata")]
    assert set(simple) <= known
    types = [match for path in paths for match in re.findall(r'@\.type=="(\w+)"', path)]
    assert set(types) == {"Ready"}


def test_a_default_is_whole_so_that_rules_hold_for_it() -> None:
    for kind in KINDS:
        for path, each in schemas(root(kind)):
            if "default" in each and "properties" in each:
                fields = {name for name, field in each["properties"].items() if "default" in field}
                assert fields <= each["default"].keys(), path


def test_nothing_is_filled_into_a_status() -> None:
    assert [path for path, each in schemas(root(SERVICE)["properties"]["status"]) if "default" in each] == []


def test_every_rule_says_what_its_message_begins_with() -> None:
    for kind in KINDS:
        for _, each in schemas(root(kind)):
            for rule in each.get("x-kubernetes-validations", ()):
                assert re.match(r"\w+: expected ", rule["message"])


def test_the_longest_name_leaves_room_for_every_name_that_is_made_of_it() -> None:
    # The longest label value is what the StatefulSet controller writes: its name and a hash of ten digits.
    assert MAX_NAME + len("-staging-") + 8 + len("-") + 10 <= 63
    assert str(MAX_NAME) in root(SERVICE)["x-kubernetes-validations"][0]["rule"]


def test_the_status_that_is_written_is_what_the_schema_keeps() -> None:
    known = {path for path, _ in schemas(schema(ServiceStatus))}
    assert {".conditions.items.lastTransitionTime", ".pinned.profile.network.fabric", ".roles.decode.selector"} <= known
