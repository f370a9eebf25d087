from typing import Any

import pytest

from oasiskv.operator.differs import differs

WANTED: dict[str, Any] = {
    "metadata": {"name": "a", "labels": {"x": "1"}},
    "spec": {
        "replicas": 2,
        "memory": "1Gi",
        "affinity": {},
        "value": "",
        "ports": [{"containerPort": 80, "protocol": "TCP"}],
        "args": ["a", "b"],
    },
}
OWNED: dict[str, Any] = {
    "f:metadata": {"f:labels": {"f:x": {}}},
    "f:spec": {
        "f:replicas": {},
        "f:memory": {},
        "f:ports": {'k:{"containerPort":80,"protocol":"TCP"}': {".": {}, "f:containerPort": {}, "f:protocol": {}}},
        "f:args": {},
    },
}


def live(spec: dict[str, Any] | None = None, owned: dict[str, Any] = OWNED, manager: str = "us") -> dict[str, Any]:
    entry = {"manager": manager, "operation": "Apply", "fieldsV1": owned}
    filled = {"name": "a", "labels": {"x": "1", "theirs": "2"}, "uid": "u", "managedFields": [entry]}
    found = {
        "replicas": 2,
        "memory": "1024Mi",
        "ports": [{"containerPort": 80, "protocol": "TCP", "hostPort": 0}],
        "args": ["a", "b"],
        "filledIn": True,
    }
    return {"metadata": filled, "spec": found | (spec or {}), "status": {}}


def test_what_was_filled_in_and_other_words_for_a_quantity_are_no_difference() -> None:
    assert not differs(WANTED, live(), "us")


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 3},
        {"replicas": None},
        {"memory": "2Gi"},
        {"memory": None},
        {"args": ["b", "a"]},
        {"args": ["a", "b", "c"]},
        {"args": []},
        {"ports": [{"containerPort": 81, "protocol": "TCP"}]},
        {"value": "said"},
    ],
)
def test_a_value_that_somebody_changed_is_a_difference(spec: dict[str, Any]) -> None:
    assert differs(WANTED, live(spec), "us")


def test_an_item_that_others_added_to_a_list_of_named_items_is_none() -> None:
    ports = [{"containerPort": 90, "protocol": "TCP"}, {"containerPort": 80, "protocol": "TCP"}]
    assert not differs(WANTED, live({"ports": ports}), "us")


@pytest.mark.parametrize(
    "owned",
    [
        {**OWNED, "f:spec": OWNED["f:spec"] | {"f:paused": {}}},
        {**OWNED, "f:metadata": {"f:annotations": {"f:b": {}}}},
        {**OWNED, "f:spec": {"f:ports": {'k:{"containerPort":81,"protocol":"TCP"}': {".": {}}}}},
    ],
)
def test_a_field_that_was_applied_earlier_and_is_no_longer_wanted_is_a_difference(owned: dict[str, Any]) -> None:
    assert differs(WANTED, live(owned=owned), "us")


def test_an_object_that_was_never_applied_differs() -> None:
    assert differs(WANTED, live(manager="them"), "us")
