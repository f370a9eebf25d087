"""How many pods a role shall have by its load, where nobody else decides it. Nothing here reads a clock or a pod."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.api_scaling import DecodeScaling, Scaling
from oasiskv.operator.api_status import Scaled, ScalingStatus
from oasiskv.operator.facts import SCALED_OBJECT, Facts, Load, Workload

Limits = TypeVar("Limits", Scaling, DecodeScaling)

TOLERANCE = 0.1
"""Share by which a load may miss its target before the number of pods changes."""
LEAST_STEP = 4
"""Pods that may be added at a time, where twice as many are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What the operator decided about the roles whose number is its own to decide."""

    spec: ServiceSpec
    """With the numbers in it."""

    status: ScalingStatus
    """What to remember."""

    roles: frozenset[str]
    """Roles whose load has to be known."""


def is_kedas(spec: ServiceSpec, kinds: frozenset[str]) -> bool:
    """Return whether the number of prefill pods is left to KEDA."""
    scaling = spec.prefill.scaling
    return scaling is not None and scaling.prometheus is not None and SCALED_OBJECT in kinds


def is_kedas_decode(spec: ServiceSpec, kinds: frozenset[str]) -> bool:
    """Return whether the number of decode pods is what KEDA writes into the spec."""
    scaling = spec.decode.scaling
    return scaling is not None and scaling.prometheus is not None and SCALED_OBJECT in kinds


def with_numbers(spec: ServiceSpec, facts: Facts, prefill: Workload | None) -> Numbers:
    """Return a spec with the numbers of pods that its loads ask for.

    Args:
        spec: What is wanted.
        facts: What there is, the loads as far as they were asked for.
        prefill: The prefill pods of the KV generation that serves.
    """
    before, status, roles = facts.status.scaling, ScalingStatus(), set()
    if (of := spec.prefill.scaling) is not None and not is_kedas(spec, facts.kinds):
        now = _next(of, before.prefill, of.min_replicas, prefill, facts, "prefill", _prefills)
        spec = replace(spec, prefill=replace(spec.prefill, scaling=None, replicas=now.replicas))
        status = replace(status, prefill=now)
        roles.add("prefill")
    if spec.decode.scaling is not None and not is_kedas_decode(spec, facts.kinds):
        now = _next(spec.decode.scaling, before.decode, spec.decode.replicas, facts.decode, facts, "decode", _decodes)
        spec = replace(spec, decode=replace(spec.decode, replicas=now.replicas))
        status = replace(status, decode=now)
        roles.add("decode")
    return Numbers(spec=spec, status=status, roles=frozenset(roles) if not spec.suspend else frozenset())


def _prefills(of: Scaling, load: Load) -> int:
    return math.ceil(load.queued_tokens / of.queued_tokens)


def _decodes(of: DecodeScaling, load: Load) -> int:
    ratio = max(load.kv_share / of.kv_share, load.stall_share / of.stall_share)
    return load.num_pods if abs(ratio - 1) <= TOLERANCE else math.ceil(load.num_pods * ratio - 1e-9)


def _next(
    of: Limits,
    before: Scaled | None,
    start: int,
    workload: Workload | None,
    facts: Facts,
    role: str,
    wanted_by: Callable[[Limits, Load], int],
) -> Scaled:
    """Return the number of pods of a role and why: up at once, down one by one after a while of less load."""
    low, high = of.min_replicas, of.max_replicas
    if workload is not None and workload.desired:
        start = workload.desired  # as it was before the operator was to decide
    current = min(max(before.replicas if before is not None else start, low), high)
    since = before.lower_since if before is not None else ""
    load = facts.loads.get(role)
    if load is None or load.num_pods == 0:
        return Scaled(replicas=current, lower_since=since, message=before.message if before is not None else "")
    wanted = min(max(wanted_by(of, load), low), high)
    if wanted > current:
        step = min(wanted, max(2 * current, current + LEAST_STEP))
        return Scaled(replicas=step, message=f"{step} instead of {current}: {load.text(role)}")
    is_quiet = load.num_silent == 0 and workload is not None and workload.is_done
    if wanted == current or not is_quiet:
        # Pods that say nothing may be those that are loaded, and a rollout is no time to take pods away.
        return Scaled(replicas=current, message=before.message if before is not None else "")
    if since and _age_s(since, facts.now) >= of.scale_in_seconds:
        message = f"{current - 1} instead of {current}: {load.text(role)}"
        return Scaled(replicas=current - 1, lower_since=facts.now, message=message)
    return Scaled(
        replicas=current, lower_since=since or facts.now, message=before.message if before is not None else ""
    )


def _age_s(since: str, now: str) -> float:
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()
