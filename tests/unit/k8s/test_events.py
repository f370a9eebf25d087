"""What is told of a status that changed, and what is not told."""

from dataclasses import replace
from typing import Any

import pytest

from oasiskv.operator.api_status import Condition, Scaled, ScalingStatus, ServiceStatus
from oasiskv.operator.events import MAX_NOTE, Decision, decisions, event, repeated
from oasiskv.operator.testing import service


def condition(kind: str, status: Any, reason: str, message: str = "", generation: int = 1) -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time="2026-01-01T00:00:00Z",
        observed_generation=generation,
    )


def of(*conditions: Condition, **values: Any) -> ServiceStatus:
    return ServiceStatus(conditions=conditions, **values)


FITS = condition("PlacementFeasible", "True", "Fits")
BLOCKED = condition("PlacementFeasible", "False", "NoRoom", "nvidia.com/gpu: expected 3, got 2")
REFUSED = condition("Accepted", "False", "InvalidSpec", "spec.decode: wrong")
ROLLING, SETTLED = condition("Progressing", "True", "DecodeReady"), condition("Progressing", "False", "Settled")
CROSSED = condition("KVPathVerified", "True", "BlockCrossed", "from prefill a to decode b")


def scaled(replicas: int) -> ServiceStatus:
    return of(scaling=ScalingStatus(decode=Scaled(replicas=replicas, message=f"{replicas} pods")))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (of(), of(BLOCKED), ("Warning", "NoRoom", "PlacementFeasible: nvidia.com/gpu: expected 3, got 2")),
        (of(FITS), of(BLOCKED), ("Warning", "NoRoom", "PlacementFeasible: nvidia.com/gpu: expected 3, got 2")),
        (
            of(BLOCKED),
            of(replace(BLOCKED, reason="NoNodes", message="none")),
            ("Warning", "NoNodes", "PlacementFeasible: none"),
        ),
        (of(BLOCKED), of(FITS), ("Normal", "Fits", "PlacementFeasible holds again")),
        (
            of(REFUSED),
            of(replace(REFUSED, observed_generation=2)),
            ("Warning", "InvalidSpec", "Accepted: spec.decode: wrong"),
        ),
        (of(), of(ROLLING), ("Normal", "RolloutStarted", "pods are made or replaced: DecodeReady")),
        (of(ROLLING), of(SETTLED), ("Normal", "RolloutDone", "all pods are of the newest revision and ready")),
        (
            of(kv_generation="a"),
            of(kv_generation="b"),
            ("Normal", "NewKVGeneration", "KV generation b comes up beside a"),
        ),
        (
            of(serving_kv_generation="a"),
            of(serving_kv_generation="b"),
            ("Normal", "SwitchedKVGeneration", "decode moves from KV generation a to b"),
        ),
        (
            of(),
            of(CROSSED, verified_revision="a b"),
            ("Normal", "KVPathVerified", "a checksummed block has crossed from prefill a to decode b"),
        ),
        (scaled(2), scaled(3), ("Normal", "Scaled", "decode: 3 pods")),
    ],
)
def test_a_decision_is_told_when_it_is_taken_and_not_again(
    before: ServiceStatus, now: ServiceStatus, expected: tuple[str, str, str]
) -> None:
    (told,) = decisions(before, now)
    assert (told.type, told.reason, told.note) == expected
    assert list(decisions(now, now)) == []


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (of(BLOCKED), of(replace(BLOCKED, message="nvidia.com/gpu: expected 3, got 1"))),
        (of(BLOCKED), of(replace(BLOCKED, observed_generation=2))),
        (of(), of(FITS, SETTLED)),
        (of(ROLLING), of(replace(SETTLED, reason="Suspended"))),
        (of(), of(condition("KVPathVerified", "True", "NotUsed"))),
        (of(), of(kv_generation="a", serving_kv_generation="a")),
        (of(serving_kv_generation="a"), of()),  # somebody deleted the InferenceService
        (of(), scaled(2)),
    ],
)
def test_what_is_no_decision_is_not_told(before: ServiceStatus, now: ServiceStatus) -> None:
    assert list(decisions(before, now)) == []


def test_an_event_is_named_by_what_it_tells_and_is_never_too_long() -> None:
    made = event(service(), Decision(reason="Scaled", note="x" * 2000), "operator-0")
    assert len(made["note"]) == MAX_NOTE
    assert (
        made["metadata"]["name"]
        == event(service(), Decision(reason="Scaled", note="x" * 2000), "b")["metadata"]["name"]
    )
    other = event(service(), Decision(reason="Scaled", note="y"), "operator-0")
    assert made["metadata"]["name"] != other["metadata"]["name"]
    assert repeated(made)["series"]["count"] == 2
    assert repeated({**made, **repeated(made)})["series"]["count"] == 3
