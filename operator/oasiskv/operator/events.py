"""What the operator decided, as Events for people: told from how a status differs from the one before.

A decision is told once, since the status is what remembers it: neither another turn nor a restart tells it again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from oasiskv.operator.api_status import Condition, ServiceStatus
from oasiskv.operator.names import digest

CONTROLLER = "oasiskv.io/operator"
MAX_NOTE = 1024
"""Characters that the API server takes."""
BAD = ("Accepted", "ProfileResolved", "Applied", "CertificatesReady", "PlacementFeasible", "RDMAReady")
"""Conditions of which it is told when they become False, and when they no longer are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing to tell."""

    reason: str
    note: str
    type: Literal["Normal", "Warning"] = "Normal"


def decisions(before: ServiceStatus, now: ServiceStatus) -> Iterator[Decision]:
    """Yield what happened from one status to the next."""
    old, new = _by_type(before), _by_type(now)
    for kind in BAD:
        yield from _blocked(kind, old.get(kind), new.get(kind))
    if now.kv_generation != before.kv_generation and before.kv_generation:
        yield Decision(
            reason="NewKVGeneration", note=f"KV generation {now.kv_generation} comes up beside {before.kv_generation}"
        )
    if "" not in (before.serving_kv_generation, now.serving_kv_generation) and (
        now.serving_kv_generation != before.serving_kv_generation
    ):
        note = f"decode moves from KV generation {before.serving_kv_generation} to {now.serving_kv_generation}"
        yield Decision(reason="SwitchedKVGeneration", note=note)
    if (moving := new.get("Progressing")) is not None:
        was = _status(old.get("Progressing"))
        if moving.status == "True" and was != "True":
            yield Decision(reason="RolloutStarted", note=f"pods are made or replaced: {moving.reason}")
        elif moving.status == "False" and was == "True" and moving.reason == "Settled":
            yield Decision(reason="RolloutDone", note="all pods are of the newest revision and ready")
    staging = new.get("StagingReady")
    if staging is not None and staging.reason == "MovesOffNode" and _reason(old.get("StagingReady")) != staging.reason:
        yield Decision(reason="MovesOffNode", note=f"staging {staging.message}")
    path = new.get("KVPathVerified")
    if path is not None and path.reason == "BlockCrossed" and now.verified_revision != before.verified_revision:
        yield Decision(reason="KVPathVerified", note=f"a checksummed block has crossed {path.message}")
    for role in ("prefill", "decode"):
        scaled, earlier = getattr(now.scaling, role), getattr(before.scaling, role)
        if scaled is not None and earlier is not None and scaled.replicas != earlier.replicas:
            yield Decision(reason="Scaled", note=f"{role}: {scaled.message}")


def cut_off(pod: str, words: str) -> Decision:
    """Return what is told of a pod that ended before its work did."""
    return Decision(reason="RequestsCutOff", note=f"pod {pod}: {words}", type="Warning")


def reverted(kind: str, name: str) -> Decision:
    """Return what is told of an object that somebody else changed; how often is the count of the Event."""
    note = f"{kind} {name}: somebody else changed it, and it is written again as the service says"
    return Decision(reason="EditReverted", note=note, type="Warning")


def left(namespace: str, operator: str, other: str) -> Decision:
    """Return what is told of a service that another operator looks after."""
    note = f"operator {operator} leaves services of namespace {namespace} to operator {other}, which was there first"
    return Decision(reason="LeftToAnotherOperator", note=note, type="Warning")


def event(service: Mapping[str, Any], decision: Decision, instance: str) -> dict[str, Any]:
    """Return the Event of a decision about a service; the same decision again has the same name.

    Args:
        service: The OasisKVService.
        decision: What to tell.
        instance: Name of this operator.
    """
    metadata = service["metadata"]
    name = f"{metadata['name']}.{digest(metadata['uid'], decision.type, decision.reason, decision.note)}"
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "type": decision.type,
        "reason": decision.reason,
        "note": decision.note[:MAX_NOTE],
        "action": "Reconcile",
        "regarding": {
            "apiVersion": service["apiVersion"],
            "kind": service["kind"],
            **{key: metadata[key] for key in ("name", "namespace", "uid")},
        },
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "eventTime": _now(),
    }


def repeated(live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change of an Event that is told once more."""
    count = (live.get("series") or {}).get("count", 1)
    return {"series": {"count": count + 1, "lastObservedTime": _now()}}


def _blocked(kind: str, old: Condition | None, new: Condition | None) -> Iterator[Decision]:
    if new is None:
        return
    is_bad, was_bad = new.status == "False", _status(old) == "False"
    # The message has numbers that may change by the minute. Another reason is news, and so is another refused edit.
    is_news = old is None or old.reason != new.reason
    is_news |= kind == "Accepted" and old is not None and old.observed_generation != new.observed_generation
    if is_bad and (not was_bad or is_news):
        yield Decision(reason=new.reason, note=f"{kind}: {new.message or new.reason}", type="Warning")
    elif was_bad and new.status == "True":
        yield Decision(reason=new.reason, note=f"{kind} holds again")


def _by_type(status: ServiceStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in status.conditions}


def _status(condition: Condition | None) -> str:
    return "" if condition is None else condition.status


def _reason(condition: Condition | None) -> str:
    return "" if condition is None else condition.reason


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
