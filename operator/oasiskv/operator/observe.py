"""Makes `Facts` of objects as the API server returns them; the shell reads, this understands."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import ProfileSpec
from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.facts import Decode, Facts, Node, Profile, Ref, Taint, Workload
from oasiskv.operator.kinds import SUFFIXES, read
from oasiskv.operator.names import KV, ORIGIN, REVISION, ROLE, SERVICE

Object = Mapping[str, Any]
AnyWorkload = TypeVar("AnyWorkload", bound=Workload)
ENDED = ("Succeeded", "Failed")
BEGINS = ("ContainerCreating", "PodInitializing")
"""Reasons of containers that wait for nothing out of the ordinary."""
MAX_TROUBLE = 500
"""Most characters of what a container said before it ended."""
SIZES: Mapping[str, Fraction | int] = {
    **SUFFIXES,
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "E": 10**18,
    "Ei": 2**60,
}
"""By suffix, those too that no spec of ours may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What is kept of a pod, of whomever; a large cluster has many."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    """Those of this operator alone."""
    node: str
    """Where it runs; empty while it waits."""
    requests: Mapping[str, Fraction]
    """What it holds there, by resource; nothing once it has ended."""
    configs: tuple[str, ...]
    """ConfigMaps that it names; of pods of services alone."""
    ip: str
    """Of pods of services alone; empty as long as it has none."""
    is_ready: bool
    has_ended: bool
    last_words: str = ""
    """What its process said at its end; of pods of services alone."""
    trouble: str = ""
    """Why it does not come up; of pods of services alone, empty where nothing says that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Objects of the API server."""

    service: Object
    children: Sequence[Object] = ()
    """Those in the service's namespace that carry its label and name it as their owner."""
    decode: Object | None = None
    """The Deployment that KServe made of the InferenceService."""
    pods: Sequence[Pod] = ()
    """Those of the service."""
    nodes: Sequence[Node] | None = None
    """With what pods of anybody use; None where nodes may not be looked at."""
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
    status = _status(seen.service)
    own = [pod for pod in seen.pods if not pod.has_ended]
    prefills, stagings, revisions, origins = {}, {}, {}, {}
    inference, certificates = None, {}
    for child in seen.children:
        if child["kind"] == "Deployment":
            prefills[_label(child, KV)] = _workload(child)
        elif child["kind"] == "StatefulSet":
            stagings[child["metadata"]["name"]] = _workload(child)
            if origin := child["metadata"].get("annotations", {}).get(ORIGIN):
                origins[child["metadata"]["name"]] = origin
        elif child["kind"] == "Service" and REVISION in child["spec"].get("selector", {}):
            revisions[_label(child, KV)] = child["spec"]["selector"][REVISION]
        elif child["kind"] == "InferenceService":
            inference = child
        elif child["kind"] == "Certificate":
            certificates[_label(child, KV)] = _why_not_issued(child.get("status", {}))
    troubles = _troubles(own)
    prefills = {kv: _with(made, troubles.get(("prefill", kv))) for kv, made in prefills.items()}
    stagings = {name: _with(made, troubles.get(("staging", name))) for name, made in stagings.items()}
    decode = None if inference is None else _decode(inference, seen.decode)
    if decode is not None:
        decode = _with(decode, troubles.get(("decode", decode.kv_generation)))
    cordoned = {node.name for node in seen.nodes or () if node.is_cordoned}
    decode_pods: dict[str, int] = {}
    for pod in own:
        if pod.labels.get(ROLE) == "decode":
            kv = pod.labels.get(KV, "")
            decode_pods[kv] = decode_pods.get(kv, 0) + 1
    if seen.decode is not None and seen.decode["spec"].get("replicas", 1):
        # KServe has not moved it on yet, and what it makes new pods of counts as one.
        decode_pods.setdefault(_label(seen.decode["spec"]["template"], KV), 1)
    return Facts(
        now=now,
        kinds=seen.kinds,
        nodes=None if seen.nodes is None else _without(seen.nodes, own),
        profile=_profile(seen.profile),
        children={Ref(child["kind"], child["metadata"]["name"]): _label(child, KV) or None for child in seen.children},
        configs_in_use=frozenset(
            [
                *_configs([*seen.children, *([seen.decode] if seen.decode else [])]),
                *(config for pod in own for config in pod.configs),
            ]
        ),
        prefills=prefills,
        stagings=stagings,
        staging_revisions=revisions,
        staging_origins=origins,
        emptied={
            pod.name.rpartition("-")[0]: pod.node
            for pod in own
            if pod.labels.get(ROLE) == "staging" and pod.node in cordoned
        },
        certificates=certificates,
        decode=decode,
        decode_pods=decode_pods,
        verified=_verified(status),
        status=status,
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


def _troubles(pods: Iterable[Pod]) -> dict[tuple[str, str], str]:
    """Return what keeps pods from coming up, by role and KV generation, or by StatefulSet; of one pod each."""
    made: dict[tuple[str, str], str] = {}
    for pod in sorted(pods, key=lambda pod: pod.name):
        role = pod.labels.get(ROLE, "")
        which = pod.name.rpartition("-")[0] if role == "staging" else pod.labels.get(KV, "")
        if pod.trouble:
            made.setdefault((role, which), f"pod {pod.name}: {pod.trouble}")
    return made


def _with(workload: AnyWorkload, trouble: str | None) -> AnyWorkload:
    """Return a workload with what its pods say, which says more than that some are missing."""
    return workload if trouble is None else replace(workload, message=trouble)


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
    # It keeps the address of a route that it has lost.
    route: Object = next((each for each in status.get("conditions", ()) if each["type"] == "IngressReady"), {})
    is_routed = route.get("status", "True") == "True"
    return Decode(
        kv_generation=kv,
        url=status.get("url", "") if is_routed else "",
        no_route="" if is_routed else str(route.get("message") or route.get("reason", "")),
        desired=desired,
        updated=counts.updated if has_moved else 0,
        ready=counts.ready,
        total=counts.total,
        is_current=counts.is_current and has_moved and is_seen,
        message=counts.message or _complaint(status),
    )


def _why_not_issued(status: Object) -> str:
    ready: Object = next((each for each in status.get("conditions", ()) if each["type"] == "Ready"), {})
    return "" if ready.get("status") == "True" else str(ready.get("message") or "cert-manager has not made it yet")


def _complaint(status: Object) -> str:
    """Return the first message of a condition that says that something does not go."""
    for condition in status.get("conditions", ()):
        is_good = condition["type"] != "ReplicaFailure"
        if condition["status"] != ("True" if is_good else "False") and condition.get("message"):
            return str(condition["message"])
    return ""


def _verified(status: ServiceStatus) -> frozenset[tuple[str, str]]:
    prefill, separator, decode = status.verified_revision.partition(" ")
    return frozenset({(prefill, decode)} if separator else ())


def _without(nodes: Sequence[Node], own: Iterable[Pod]) -> tuple[Node, ...]:
    """Return nodes without what a service's own pods with a GPU use, since room is looked for anew for all of them."""
    used: dict[str, dict[str, Fraction]] = {}
    for pod in own:
        if pod.node and pod.labels.get(ROLE) in ("prefill", "decode"):
            add(used.setdefault(pod.node, {}), pod.requests)
    made = []
    for node in nodes:
        if less := used.get(node.name):
            left = {name: amount - less.get(name, 0) for name, amount in node.used.items()}
            node = replace(node, used=left)
        made.append(node)
    return tuple(made)


def add(total: dict[str, Fraction], amounts: Mapping[str, Fraction], sign: int = 1) -> None:
    """Add amounts of resources to a total, or take them off again."""
    for name, amount in amounts.items():
        total[name] = total.get(name, Fraction()) + sign * amount


def read_node(node: Object) -> Node:
    """Return what is kept of a node."""
    return Node(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels", {}),
        allocatable={key: amount(str(value)) for key, value in node["status"].get("allocatable", {}).items()},
        taints=tuple(
            Taint(key=taint["key"], value=taint.get("value", ""), effect=taint["effect"])
            for taint in node["spec"].get("taints", ())
        ),
        is_cordoned=node["spec"].get("unschedulable", False),
        is_ready=not node["spec"].get("unschedulable", False)
        and any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions", ())),
    )


def read_pod(pod: Object) -> Pod:
    """Return what is kept of a pod."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    labels = {key: value for key, value in metadata.get("labels", {}).items() if key in (SERVICE, ROLE, KV)}
    has_ended = status.get("phase") in ENDED
    return Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        labels=labels,
        node=spec.get("nodeName", ""),
        requests={} if has_ended else _requests(pod),
        configs=tuple(_configs([pod])) if SERVICE in labels else (),
        ip=status.get("podIP", "") if SERVICE in labels else "",
        is_ready=any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", ())),
        has_ended=has_ended,
        last_words=_last_words(status) if SERVICE in labels else "",
        trouble=_trouble(status) if SERVICE in labels and not has_ended else "",
    )


def _last_words(status: Object) -> str:
    ended = [each.get("state", {}).get("terminated") or {} for each in status.get("containerStatuses", ())]
    # Those of one that failed are the end of its log.
    return "; ".join(each["message"] for each in ended if each.get("message") and not each.get("exitCode"))


def _trouble(status: Object) -> str:
    """Return why a pod does not come up: no node for it, no image, or a container that ended."""
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason", ""))
    for container in [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]:
        if container.get("ready"):
            continue
        state = container.get("state", {})
        ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if ended.get("exitCode"):
            lines = str(ended.get("message", "")).strip().splitlines()
            why = lines[-1][-MAX_TROUBLE:] if lines else ended.get("reason", "it said nothing")
            return f"its container ended with code {ended['exitCode']}: {why}"
        waiting = state.get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in BEGINS:
            return f"{waiting['reason']}: {waiting['message']}" if waiting.get("message") else str(waiting["reason"])
    return ""


def _requests(pod: Object) -> dict[str, Fraction]:
    """Return what the scheduler reserves: the sum of the containers, or the largest of those that run before them."""
    before = pod["spec"].get("initContainers", ())
    # A sidecar begins with those that run before, and stays.
    stays = [*pod["spec"]["containers"], *(each for each in before if each.get("restartPolicy") == "Always")]
    total: dict[str, Fraction] = {}
    for container in stays:
        add(total, _asked(container))
    for container in before:
        for resource, number in _asked(container).items():
            total[resource] = max(total.get(resource, Fraction()), number)
    return total


def _asked(container: Object) -> dict[str, Fraction]:
    requests = container.get("resources", {}).get("requests", {})
    return {resource: amount(str(text)) for resource, text in requests.items()}


@lru_cache(4096)
def amount(text: str) -> Fraction:
    """Return the value of a quantity that somebody else wrote, in any form that Kubernetes has; 0 of what is none."""
    match = re.fullmatch(r"([+-]?[0-9]*\.?[0-9]*)(?:[eE]([+-]?[0-9]+)|([A-Za-z]*))", text)
    if match is None or (match[3] or "") not in SIZES or not any(map(str.isdigit, match[1])):
        return Fraction()
    return Fraction(match[1]) * (Fraction(10) ** int(match[2]) if match[2] else SIZES[match[3] or ""])


def _configs(objects: Iterable[Object]) -> Iterable[str]:
    for made in objects:
        spec = made.get("spec", {})
        pod = spec.get("predictor") or spec.get("template", {}).get("spec") or spec
        for volume in pod.get("volumes", ()):
            if "configMap" in volume:
                yield volume["configMap"]["name"]
        for claim in pod.get("resourceClaims", ()):
            if "resourceClaimTemplateName" in claim:
                yield claim["resourceClaimTemplateName"]


def _label(made: Object, key: str) -> str:
    return str(made["metadata"].get("labels", {}).get(key, ""))
