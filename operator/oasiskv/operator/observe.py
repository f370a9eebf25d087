"""Makes `Facts` of objects as the API server returns them; the shell reads, this understands."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import ProfileSpec
from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.facts import Decode, Facts, Node, Profile, Ref, Taint, Workload
from oasiskv.operator.kinds import quantity, read
from oasiskv.operator.names import KV, ROLE, SERVICE

Object = Mapping[str, Any]
VERIFIED = "oasiskv.io/verified-revision"
"""Annotation of an InferenceService: the revision for which a block has crossed."""
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Objects of the API server."""

    service: Object
    children: Sequence[Object] = ()
    """Those in the service's namespace that carry its label and name it as their owner."""
    decode: Object | None = None
    """The Deployment that KServe made of the InferenceService."""
    pods: Sequence[Object] = ()
    """All pods that the operator may see, of others too."""
    nodes: Sequence[Object] | None = None
    """None where nodes may not be looked at."""
    profile: Object | None = None
    kinds: frozenset[str] = field(default_factory=frozenset)


def observe(seen: Seen, now: str) -> Facts:
    """Return what a reconcile looks at.

    Args:
        seen: What the API server returned.
        now: Time, in RFC 3339.

    Raises:
        ConfigError: The profile is none that this operator knows how to read.
    """
    name, namespace = seen.service["metadata"]["name"], seen.service["metadata"]["namespace"]
    own = [pod for pod in seen.pods if _is_of(pod, name, namespace) and not _has_ended(pod)]
    by_kind: dict[str, dict[str, Workload]] = {"Deployment": {}, "StatefulSet": {}}
    inference = None
    for child in seen.children:
        if child["kind"] in by_kind:
            by_kind[child["kind"]][_label(child, KV)] = _workload(child)
        elif child["kind"] == "InferenceService":
            inference = child
    decode_pods: dict[str, int] = {}
    for pod in own:
        if _label(pod, ROLE) == "decode":
            decode_pods[_label(pod, KV)] = decode_pods.get(_label(pod, KV), 0) + 1
    return Facts(
        now=now,
        kinds=seen.kinds,
        nodes=None if seen.nodes is None else _nodes(seen.nodes, seen.pods, name, namespace),
        profile=_profile(seen.profile),
        children={Ref(child["kind"], child["metadata"]["name"]): _label(child, KV) or None for child in seen.children},
        configs_in_use=frozenset(_configs([*seen.children, *([seen.decode] if seen.decode else []), *own])),
        prefills=by_kind["Deployment"],
        stagings=by_kind["StatefulSet"],
        decode=None if inference is None else _decode(inference, seen.decode),
        decode_pods=decode_pods,
        verified=_verified(inference),
        status=_status(seen.service),
    )


def _status(service: Object) -> ServiceStatus:
    try:
        return read(ServiceStatus, service.get("status") or {}, "status")
    except ConfigError:
        # Written by another version, or by hand: everything in it but the pin can be found again, and a wrong pin is
        # worse than a new one.
        return ServiceStatus()


def _profile(profile: Object | None) -> Profile | None:
    if profile is None:
        return None
    return Profile(generation=profile["metadata"]["generation"], spec=read(ProfileSpec, profile["spec"], "spec"))


def _workload(made: Object) -> Workload:
    spec, status = made["spec"], made.get("status", {})
    desired = spec.get("replicas", 1)
    return Workload(
        desired=desired,
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        total=status.get("replicas", 0),
        is_current=status.get("observedGeneration", 0) >= made["metadata"]["generation"],
        message=_complaint(status),
    )


def _decode(inference: Object, deployment: Object | None) -> Decode:
    """Return the InferenceService with the counts of its Deployment, which lags behind until KServe wrote it."""
    kv, status = _label(inference, KV), inference.get("status", {})
    is_stopped = inference["metadata"].get("annotations", {}).get("serving.kserve.io/stop") == "true"
    desired = 0 if is_stopped else inference["spec"]["predictor"]["minReplicas"]
    counts = Workload(desired=0) if deployment is None else _workload(deployment)
    template = {} if deployment is None else deployment["spec"]["template"]
    has_moved = deployment is None if is_stopped else bool(template) and _label(template, KV) == kv
    is_seen = status.get("observedGeneration", 0) >= inference["metadata"]["generation"]
    return Decode(
        kv_generation=kv,
        url=status.get("url", ""),
        desired=desired,
        updated=counts.updated if has_moved else 0,
        ready=counts.ready,
        total=counts.total,
        is_current=counts.is_current and has_moved and is_seen,
        message=counts.message or _complaint(status),
    )


def _complaint(status: Object) -> str:
    """Return the first message of a condition that says that something does not go."""
    for condition in status.get("conditions", ()):
        is_good = condition["type"] != "ReplicaFailure"
        if condition["status"] != ("True" if is_good else "False") and condition.get("message"):
            return str(condition["message"])
    return ""


def _verified(inference: Object | None) -> frozenset[str]:
    if inference is None:
        return frozenset()
    revision = inference["metadata"].get("annotations", {}).get(VERIFIED)
    return frozenset({revision}) if revision else frozenset()


def _nodes(nodes: Sequence[Object], pods: Iterable[Object], name: str, namespace: str) -> tuple[Node, ...]:
    used: dict[str, dict[str, Fraction]] = {}
    for pod in pods:
        place = pod["spec"].get("nodeName")
        is_own_engine = _is_of(pod, name, namespace) and _label(pod, ROLE) in ("prefill", "decode")
        if place is None or is_own_engine or _has_ended(pod):
            continue
        here = used.setdefault(place, {})
        for resource, amount in _requests(pod).items():
            here[resource] = here.get(resource, Fraction()) + amount
    return tuple(
        Node(
            name=node["metadata"]["name"],
            labels=node["metadata"].get("labels", {}),
            allocatable={key: quantity(str(value)) for key, value in node["status"].get("allocatable", {}).items()},
            used=used.get(node["metadata"]["name"], {}),
            taints=tuple(
                Taint(key=taint["key"], value=taint.get("value", ""), effect=taint["effect"])
                for taint in node["spec"].get("taints", ())
            ),
            is_ready=not node["spec"].get("unschedulable", False)
            and any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"]),
        )
        for node in nodes
    )


def _requests(pod: Object) -> dict[str, Fraction]:
    """Return what the scheduler reserves: the sum of the containers, or the largest of those that run before them."""
    total: dict[str, Fraction] = {}
    for container in pod["spec"]["containers"]:
        for resource, text in container.get("resources", {}).get("requests", {}).items():
            total[resource] = total.get(resource, Fraction()) + quantity(str(text))
    for container in pod["spec"].get("initContainers", ()):
        for resource, text in container.get("resources", {}).get("requests", {}).items():
            total[resource] = max(total.get(resource, Fraction()), quantity(str(text)))
    return total


def _configs(objects: Iterable[Object]) -> Iterable[str]:
    for made in objects:
        spec = made.get("spec", {})
        pod = spec.get("predictor") or spec.get("template", {}).get("spec") or spec
        for volume in pod.get("volumes", ()):
            if "configMap" in volume:
                yield volume["configMap"]["name"]


def _is_of(pod: Object, name: str, namespace: str) -> bool:
    return bool(pod["metadata"]["namespace"] == namespace and _label(pod, SERVICE) == name)


def _has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ENDED


def _label(made: Object, key: str) -> str:
    return str(made["metadata"].get("labels", {}).get(key, ""))
