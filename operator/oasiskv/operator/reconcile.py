"""Decides what a service's objects and status shall be. Nothing here reads a clock or a cluster: see `facts`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import Network, Placement, ProfileSpec, Resources, ServiceSpec
from oasiskv.operator.api_status import Pin, ServiceStatus
from oasiskv.operator.conditions import Finding, conditions, findings, rdma_finding, roles, scaling_finding, with_ready
from oasiskv.operator.facts import INFERENCE_SERVICE, Facts, Ref
from oasiskv.operator.kinds import read
from oasiskv.operator.moving import budget as budget_of_staging
from oasiskv.operator.moving import seated
from oasiskv.operator.names import REVISION, check_names, kv_generation, owner, spec_hash
from oasiskv.operator.placement import Hosts, Room
from oasiskv.operator.render import RENDER_VERSION, Rendered, num_prefills, render
from oasiskv.operator.scaling import with_numbers
from oasiskv.operator.surge import Budget, budgeted

RENDERERS: Mapping[int, Callable[..., Rendered]] = {RENDER_VERSION: render}
"""By version. An older one stays for as long as a service may be pinned to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What to do."""

    apply: tuple[dict[str, Any], ...] = ()
    """Objects to write, in this order."""

    delete: tuple[Ref, ...] = ()
    """Objects to delete afterwards."""

    status: ServiceStatus
    """What to say."""

    unverified: tuple[str, str] | None = None
    """Revisions of prefill and decode between which a block has yet to cross; None where none needs to."""

    asks_rdma: bool = False
    """Whether pods have to say what they see of RDMA."""

    asks: frozenset[str] = frozenset()
    """Roles whose load has to be known."""


def reconcile(service: Mapping[str, Any], facts: Facts) -> Outcome:
    """Return what to do about a service; a spec that cannot be carried out leaves everything as it is.

    Args:
        service: The OasisKVService as the API server returns it.
        facts: The cluster.
    """
    metadata, generation = service["metadata"], service["metadata"]["generation"]
    try:
        check_names(metadata["name"], metadata["namespace"])
        spec = read(ServiceSpec, service.get("spec"), "spec")
        pin, profile_finding = _pin(spec, facts)
        placement, network = _where(spec, pin)
        if pin.render_version not in RENDERERS:
            raise ConfigError(
                f"status.pinned.renderVersion: expected at most {RENDER_VERSION}, got {pin.render_version}"
            )
        asked, live = spec, facts.decode.kv_generation if facts.decode is not None else None
        numbers = with_numbers(asked, facts, facts.prefills.get(live or ""))
        kvs = {kv for kv, number in facts.decode_pods.items() if number} | {live or kv_generation(asked)}
        wanted = _wanted(numbers.spec, len(kvs | {kv_generation(asked)}))
        hosts = None if facts.nodes is None else Hosts(facts.nodes, placement, network)
        budget = budgeted(numbers.spec, hosts, wanted)
        spec = budget.spec
        rendered = RENDERERS[pin.render_version](metadata, spec, placement, network, facts.kinds)
        rendered = seated(rendered, spec, facts)
    except _NoProfile as error:
        return _refused(metadata, facts, [Finding("Accepted", True, "Valid"), error.finding])
    except ConfigError as error:
        return _refused(metadata, facts, [Finding("Accepted", False, "InvalidSpec", str(error))])
    # A new KV generation comes up beside the one that serves. Until then, decode is left alone.
    is_switched = live in (None, rendered.kv) or _is_up(rendered, facts)
    generation_objects, before = _with_staging_that_serves(rendered, facts)
    made = [*rendered.common, *generation_objects]
    if facts.nodes is not None and spec.staging.replacement == "HandOver":
        # Who may not look at nodes would hold evictions up and never see that one waits.
        made.append(budget_of_staging(metadata["name"]))
    if is_switched and INFERENCE_SERVICE in facts.kinds:
        made += rendered.decode
    others = kvs - {rendered.kv}
    room = _room(rendered, budget, wanted, hosts, facts)
    found = findings(spec, rendered, facts, room, is_switched and live in (None, rendered.kv))
    found.insert(1, profile_finding)
    if (scaling := scaling_finding(asked, numbers.status, numbers.roles, facts)) is not None:
        found.append(scaling)
    if (rdma := rdma_finding(network, facts)) is not None:
        found.append(rdma)
    path = rendered.revisions["prefill"], rendered.revisions["decode"]
    status = ServiceStatus(
        observed_generation=generation,
        operator=facts.operator,
        url=facts.decode.url if facts.decode is not None else "",
        kv_generation=rendered.kv,
        serving_kv_generation=live or "",
        verified_revision=" ".join(path) if path in facts.verified else "",
        roles=roles(metadata["name"], facts),
        scaling=numbers.status,
        placement=room.status if room is not None else facts.status.placement,
        pinned=pin,
        conditions=conditions(with_ready(found, spec.suspend), facts.status.conditions, generation, facts.now),
    )
    owned = [_owned(service, each) for each in made]
    return Outcome(
        apply=tuple(owned),
        delete=_surplus(facts, owned, others, before),
        status=status,
        unverified=None if path in facts.verified or num_prefills(spec) == 0 else path,
        asks_rdma=network.rdma is not None,
        asks=numbers.roles,
    )


class _NoProfile(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def _pin(spec: ServiceSpec, facts: Facts) -> tuple[Pin, Finding]:
    """Return what the service is rendered with, and what there is to say about the profile."""
    key, profile = spec_hash(spec), facts.profile
    before = facts.status.pinned
    same = before if before is not None and before.spec_hash == key else None
    if spec.profile is None:
        return same or Pin(spec_hash=key, render_version=RENDER_VERSION), Finding("ProfileResolved", True, "NotUsed")
    if profile is None:
        message = (
            f"spec.profile.name: expected a profile in this namespace, got {spec.profile.name}, which is not there"
        )
        if same is None:
            raise _NoProfile(Finding("ProfileResolved", False, "NotFound", message))
        return same, Finding("ProfileResolved", False, "NotFound", f"{message}; what it said is still used")
    if same is not None and same.profile_generation != profile.generation and spec.profile.update == "Pinned":
        message = (
            f"generation {same.profile_generation} is used until the service changes, {profile.generation} is there"
        )
        return same, Finding("ProfileResolved", True, "Pinned", message)
    pin = Pin(
        spec_hash=key,
        # A profile that is taken by itself is no reason to take new rules too.
        render_version=RENDER_VERSION if same is None else same.render_version,
        profile_generation=profile.generation,
        profile=profile.spec,
    )
    return pin, Finding("ProfileResolved", True, "Current", f"generation {profile.generation} is used")


def _where(spec: ServiceSpec, pin: Pin) -> tuple[Placement, Network]:
    profile = pin.profile or ProfileSpec()
    return spec.placement or profile.placement, spec.network or profile.network


def _is_up(rendered: Rendered, facts: Facts) -> bool:
    staging, prefill = facts.stagings.get(rendered.staging), facts.prefills.get(rendered.kv)
    return staging is not None and staging.is_done and prefill is not None and prefill.is_done


def _with_staging_that_serves(rendered: Rendered, facts: Facts) -> tuple[Sequence[Mapping[str, Any]], Ref | None]:
    """Return the objects of a KV generation, and the staging that they hand over from; None where there is none.

    The Service leads to it until the next one is up. It is deleted in a later turn than that in which the Service moves
    on, and then finds its successor by its own name.
    """
    serving = facts.staging_revisions.get(rendered.kv)
    before = Ref("StatefulSet", f"{rendered.staging.rpartition('-')[0]}-{serving}")
    if serving is None or before.name == rendered.staging or before not in facts.children:
        return rendered.generation, None
    next_ = facts.stagings.get(rendered.staging)
    if next_ is not None and next_.is_done:
        return rendered.generation, before
    return [_leading_to(each, serving) for each in rendered.generation], before


def _leading_to(made: Mapping[str, Any], revision: str) -> Mapping[str, Any]:
    """Return a Service of staging with the revision that it leads to; anything else as it is."""
    if made["kind"] != "Service" or REVISION not in made["spec"]["selector"]:
        return made
    return {**made, "spec": {**made["spec"], "selector": {**made["spec"]["selector"], REVISION: revision}}}


def _wanted(spec: ServiceSpec, num_generations: int) -> list[tuple[int, Resources]]:
    """Return the pods with a GPU: prefill once per KV generation."""
    wanted = [(num_prefills(spec), spec.prefill.resources)] * num_generations
    return [*wanted, (0 if spec.suspend else spec.decode.replicas, spec.decode.resources)]


def _room(
    rendered: Rendered,
    budget: Budget,
    wanted: Sequence[tuple[int, Resources]],
    hosts: Hosts | None,
    facts: Facts,
) -> Room | None:
    if hosts is None:
        return None
    room = hosts.room(wanted)
    if not budget.notes:
        return room
    note = "; ".join(budget.notes)
    workloads = {"prefill": facts.prefills.get(rendered.kv), "decode": facts.decode}
    rolling = {role for role, each in workloads.items() if each is not None and each.updated < each.desired}
    is_stuck = bool(budget.stuck & rolling)
    return replace(room, reason="NoRoomToSurge", note=note, blocker=note if is_stuck else "")


def _owned(service: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"namespace": service["metadata"]["namespace"], "ownerReferences": [owner(service)]}
    return {**made, "metadata": {**made["metadata"], **metadata}}


def _surplus(facts: Facts, made: Iterable[Mapping[str, Any]], others: set[str], before: Ref | None) -> tuple[Ref, ...]:
    """Return what nothing needs: not this spec, not a KV generation that still serves, no staging before, no pod."""
    wanted = {Ref(each["kind"], each["metadata"]["name"]) for each in made} | {before}
    return tuple(
        ref
        for ref, kv in sorted(facts.children.items())
        if ref not in wanted
        and (kv is None or kv not in others)
        and not (ref.kind in ("ConfigMap", "ResourceClaimTemplate") and ref.name in facts.configs_in_use)
        # Decode is replaced in place and deleted with its service alone.
        and ref.kind != "InferenceService"
    )


def _refused(metadata: Mapping[str, Any], facts: Facts, found: list[Finding]) -> Outcome:
    status = replace(
        facts.status,
        observed_generation=metadata["generation"],
        operator=facts.operator,
        url=facts.decode.url if facts.decode is not None else "",
        roles=roles(metadata["name"], facts),
        conditions=conditions(with_ready(found, False), facts.status.conditions, metadata["generation"], facts.now),
    )
    return Outcome(status=status)
