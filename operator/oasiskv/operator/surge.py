"""Keeps rollouts within the GPUs that there are: no more pods above `replicas` are asked for than have room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oasiskv.operator.api import Resources, Rollout, ServiceSpec
from oasiskv.operator.placement import Hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How pods are replaced with the room that there is."""

    spec: ServiceSpec
    """What was asked for, with a surge that has room."""

    notes: tuple[str, ...] = ()
    """What is otherwise than was asked for, by role and in numbers."""

    stuck: frozenset[str] = frozenset()
    """Roles whose pods cannot be replaced: there is no room for one more, and none may be missing."""


def budgeted(
    spec: ServiceSpec,
    hosts: Hosts | None,
    wanted: Sequence[tuple[int, Resources]],
) -> Budget:
    """Return how the pods of a service are replaced.

    Args:
        spec: What is asked for.
        hosts: The nodes that suit; None where they may not be looked at.
        wanted: Number of all pods with a GPU but those of a surge, and what each of them gets.
    """
    # Where not even these have room, the scheduler decides who waits, and the reason is told already.
    if hosts is None or hosts.room(wanted).blocker:
        return Budget(spec=spec)
    notes, stuck, taken = [], set(), list(wanted)
    rollouts = {}
    for role, of in (("prefill", spec.prefill), ("decode", spec.decode)):
        rollout = of.rollout
        num_before = sum(number for number, _ in taken)
        surging = [*taken, (rollout.max_surge, of.resources)]
        num_free = max(0, hosts.room(surging).status.fitting_pods - num_before)
        rollouts[role] = rollout
        if num_free < rollout.max_surge:
            rollouts[role], note = _within(rollout, num_free)
            notes.append(f"{role}: expected room for maxSurge {rollout.max_surge}, got it for {num_free}; {note}")
            if num_free + rollout.max_unavailable == 0:
                stuck.add(role)
        taken.append((min(num_free, rollout.max_surge), of.resources))
    made = replace(
        spec,
        prefill=replace(spec.prefill, rollout=rollouts["prefill"]),
        decode=replace(spec.decode, rollout=rollouts["decode"]),
    )
    return Budget(spec=made, notes=tuple(notes), stuck=frozenset(stuck))


def _within(rollout: Rollout, num_free: int) -> tuple[Rollout, str]:
    if num_free:
        return replace(rollout, max_surge=num_free), "so many are begun first"
    if rollout.max_unavailable:
        return replace(rollout, max_surge=0), "pods are ended first"
    return replace(rollout, max_surge=1), "a change waits for it, since maxUnavailable is 0"
