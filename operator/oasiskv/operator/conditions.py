"""What a service's status says, from what the cluster reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oasiskv.operator.api import Network, ServiceSpec
from oasiskv.operator.api_status import Condition, RoleStatus, RoleStatuses, ScalingStatus
from oasiskv.operator.facts import CERTIFICATE, INFERENCE_SERVICE, Decode, Facts, Workload
from oasiskv.operator.moving import node_left
from oasiskv.operator.names import selector, selector_text
from oasiskv.operator.placement import Room
from oasiskv.operator.render import Rendered

MUST = (
    "Accepted",
    "ProfileResolved",
    "Applied",
    "CertificatesReady",
    "StagingReady",
    "PrefillReady",
    "DecodeReady",
    "KVPathVerified",
    "EndpointReady",
)
"""What Ready needs, in the order in which the first that fails is named."""

STATUSES: Mapping[bool | None, Literal["True", "False", "Unknown"]] = {True: "True", False: "False", None: "Unknown"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition without its times."""

    type: str
    status: bool | None
    """None for unknown."""
    reason: str
    message: str = ""


def findings(
    spec: ServiceSpec, rendered: Rendered, facts: Facts, room: Room | None, is_switched: bool
) -> list[Finding]:
    """Return what holds of a service that was accepted.

    Args:
        spec: What is wanted.
        rendered: Its objects.
        facts: What there is.
        room: Room in the cluster; None where nodes may not be looked at.
        is_switched: Whether decode is told to serve the KV generation that is wanted.
    """
    made = [Finding("Accepted", True, "Valid")]
    made.append(_applied(facts))
    made.append(_certificates(spec, rendered.kv, facts))
    if room is None:
        made.append(Finding("PlacementFeasible", None, "NodesNotVisible", "the operator may not look at nodes"))
    else:
        made.append(Finding("PlacementFeasible", not room.blocker, room.reason, room.blocker or room.note))
    staging = _of("StagingReady", facts.stagings.get(rendered.staging))
    if not staging.status and (node := node_left(rendered, facts)):
        message = f"moves off node {node}, which takes no more pods: {staging.message}"
        staging = Finding("StagingReady", False, "MovesOffNode", message)
    made.append(staging)
    made.append(_of("PrefillReady", facts.prefills.get(rendered.kv)))
    if INFERENCE_SERVICE not in facts.kinds:
        message = f"expected the API server to know {INFERENCE_SERVICE}, got none: KServe is not installed"
        made.append(Finding("DecodeReady", False, "KServeMissing", message))
    elif not is_switched:
        message = f"serves KV generation {facts.decode and facts.decode.kv_generation} until {rendered.kv} is up"
        made.append(Finding("DecodeReady", False, "WaitsForStagingAndPrefill", message))
    else:
        made.append(_of("DecodeReady", facts.decode))
    if spec.prefill.replicas == 0:
        made.append(Finding("KVPathVerified", True, "NotUsed", "decode computes all prompts itself"))
    elif (path := (rendered.revisions["prefill"], rendered.revisions["decode"])) in facts.verified:
        made.append(Finding("KVPathVerified", True, "BlockCrossed", f"from prefill {path[0]} to decode {path[1]}"))
    else:
        message = f"no block has crossed from prefill {path[0]} through staging to decode {path[1]}"
        message += f": {facts.unverified}" if facts.unverified else ""
        made.append(Finding("KVPathVerified", False, "KVPathUnverified", message))
    made.append(_endpoint(facts.decode))
    return made


def _applied(facts: Facts) -> Finding:
    if facts.refused:
        return Finding("Applied", False, "Refused", facts.refused)
    if facts.contested:
        return Finding("Applied", False, "Contested", facts.contested)
    return Finding("Applied", True, "Written")


def _endpoint(decode: Decode | None) -> Finding:
    if decode is None:
        return Finding("EndpointReady", False, "NoRoute", "there is no InferenceService yet")
    if not decode.url:
        return Finding("EndpointReady", False, "NoRoute", decode.no_route or "KServe has made no route yet")
    if not decode.ready:
        return Finding("EndpointReady", False, "NoRoute", "no decode pod is ready")
    return Finding("EndpointReady", True, "Routable", decode.url)


def _certificates(spec: ServiceSpec, kv: str, facts: Facts) -> Finding:
    if spec.tls is None:
        return Finding("CertificatesReady", True, "NotUsed")
    if spec.tls.secret is not None:
        # The operator may not read Secrets; pods wait for one that is not there, and their events say so.
        return Finding("CertificatesReady", True, "Named", f"pods mount Secret {spec.tls.secret}")
    if CERTIFICATE not in facts.kinds:
        message = f"expected the API server to know {CERTIFICATE}, got none: cert-manager is not installed"
        return Finding("CertificatesReady", False, "CertManagerMissing", message)
    if why := facts.certificates.get(kv, "its object is not there yet"):
        return Finding("CertificatesReady", False, "NotIssued", why)
    return Finding("CertificatesReady", True, "Issued")


def scaling_finding(spec: ServiceSpec, scaled: ScalingStatus, roles: frozenset[str], facts: Facts) -> Finding | None:
    """Return who decides how many pods there are; None if the spec does.

    Args:
        spec: What is wanted.
        scaled: What the operator decided.
        roles: Roles of which it has to know the load.
        facts: What there is.
    """
    if spec.prefill.scaling is None and spec.decode.scaling is None:
        return None
    if not roles:
        return Finding("ScalingActive", not spec.suspend, "Suspended" if spec.suspend else "Keda")
    silent = sorted(role for role in roles if role in facts.loads and facts.loads[role].num_pods == 0)
    if silent:
        message = f"{' and '.join(silent)}: expected pods to say their load, got no answer; their number stays"
        return Finding("ScalingActive", False, "NoMetrics", message)
    said = [each.message for each in (scaled.prefill, scaled.decode) if each is not None and each.message]
    return Finding("ScalingActive", True, "Operator", "; ".join(said))


def rdma_finding(network: Network, facts: Facts) -> Finding | None:
    """Return what pods say of RDMA; None where KV moves by something else."""
    if network.rdma is None:
        return None
    report = facts.rdma
    if report is None:
        # Pods are not asked in each turn. What they said last holds until they are.
        before = next((each for each in facts.status.conditions if each.type == "RDMAReady"), None)
        if before is None:
            return Finding("RDMAReady", None, "NotAsked", "no pod has said yet what it sees of RDMA")
        return Finding("RDMAReady", {"True": True, "False": False}.get(before.status), before.reason, before.message)
    if report.problem:
        return Finding("RDMAReady", False, "PodsCannotUseIt", report.problem)
    near = f"; GPU and port: {report.ways}" if report.ways else ""
    if report.note:
        return Finding("RDMAReady", True, "Slow", f"{report.note}{near}")
    return Finding("RDMAReady", True, "Usable", f"{report.num_pods} pods can use a port{near}")


def with_ready(found: Sequence[Finding], is_suspended: bool) -> list[Finding]:
    """Return findings with Progressing and Ready, which follow from the others."""
    by_type = {finding.type: finding for finding in found}
    missing = [name for name in MUST if name not in by_type or not by_type[name].status]
    waiting = [name for name in missing if name.endswith("Ready")]
    is_accepted = "Accepted" not in missing
    progressing = Finding(
        "Progressing",
        is_accepted and bool(waiting) and not is_suspended,
        "Suspended" if is_suspended else waiting[0] if is_accepted and waiting else "Settled",
    )
    if is_suspended and is_accepted:
        ready = Finding("Ready", False, "Suspended", "spec.suspend stops the pods with GPUs")
    elif missing:
        first = by_type.get(missing[0], Finding(missing[0], None, "NotLookedAt"))
        ready = Finding("Ready", False, first.reason, f"{first.type}: {first.message or first.reason}")
    else:
        ready = Finding("Ready", True, "Serving")
    return [*found, progressing, ready]


def conditions(
    found: Sequence[Finding], before: Sequence[Condition], generation: int, now: str
) -> tuple[Condition, ...]:
    """Return findings as conditions; one whose status did not change keeps its time."""
    times = {(each.type, each.status): each.last_transition_time for each in before}
    made = []
    for finding in found:
        status = STATUSES[finding.status]
        made.append(
            Condition(
                type=finding.type,
                status=status,
                reason=finding.reason,
                message=finding.message,
                last_transition_time=times.get((finding.type, status), now),
                observed_generation=generation,
            )
        )
    return tuple(made)


def roles(name: str, facts: Facts) -> RoleStatuses:
    """Return the pods of each role, of all KV generations together."""
    decode = [facts.decode] if facts.decode is not None else []
    return RoleStatuses(
        prefill=_role(name, "prefill", list(facts.prefills.values())),
        decode=_role(name, "decode", decode),
        staging=_role(name, "staging", list(facts.stagings.values())),
    )


def _role(name: str, role: str, workloads: Sequence[Workload]) -> RoleStatus:
    made = RoleStatus(selector=selector_text(selector(name, role)))
    for each in workloads:
        made = replace(
            made,
            desired=made.desired + each.desired,
            current=made.current + each.total,
            updated=made.updated + each.updated,
            ready=made.ready + each.ready,
        )
    return replace(made, summary=f"{made.ready}/{made.desired}")


def _of(type_: str, workload: Workload | None) -> Finding:
    if workload is None:
        return Finding(type_, False, "NotMade", "its object is not there yet")
    if workload.is_done:
        return Finding(type_, True, "PodsReady", f"{workload.ready} of {workload.desired} pods are ready")
    counts = f"{workload.ready} of {workload.desired} pods are ready, {workload.updated} of them new"
    if workload.ready < workload.desired:
        return Finding(type_, False, "PodsNotReady", f"{counts}{': ' if workload.message else ''}{workload.message}")
    return Finding(type_, False, "RollingOut", counts)
