import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from oasiskv.operator.facts import Facts, Node
from oasiskv.operator.reconcile import Outcome, reconcile
from oasiskv.operator.testing import SPEC, Cluster, node, service


def spec(surge: tuple[int, int], unavailable: tuple[int, int]) -> dict[str, Any]:
    """Return a service of one prefill and two decode pods, with budgets of prefill and of decode."""
    rollouts = [{"maxSurge": most, "maxUnavailable": least} for most, least in zip(surge, unavailable, strict=True)]
    return {**SPEC, "prefill": {"rollout": rollouts[0]}, "decode": {"replicas": 2, "rollout": rollouts[1]}}


def host(num_gpus: int) -> Node:
    return node(used={"nvidia.com/gpu": Fraction(8 - num_gpus)})


def budgets(outcome: Outcome) -> list[tuple[int, int]]:
    """Return the surge and what may be missing, of prefill and of decode."""
    found = {made["kind"]: made.get("spec") or {} for made in outcome.apply}
    strategies = (found["Deployment"]["strategy"], found["InferenceService"]["predictor"]["deploymentStrategy"])
    return [(each["rollingUpdate"]["maxSurge"], each["rollingUpdate"]["maxUnavailable"]) for each in strategies]


def feasible(outcome: Outcome) -> tuple[str, str, str]:
    (found,) = (each for each in outcome.status.conditions if each.type == "PlacementFeasible")
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("num_free", "surge", "unavailable", "expected"),
    [
        (6, (1, 2), (0, 0), [(1, 0), (2, 0)]),
        (5, (1, 2), (0, 0), [(1, 0), (1, 0)]),
        (5, (3, 1), (0, 1), [(2, 0), (0, 1)]),
        (4, (1, 2), (0, 1), [(1, 0), (0, 1)]),
        (3, (1, 2), (1, 2), [(0, 1), (0, 2)]),
        # Prefill may not be short, so it waits with the least that it can ask for.
        (3, (2, 2), (0, 1), [(1, 0), (0, 1)]),
        # Not even the pods themselves have room.
        (2, (2, 2), (1, 1), [(2, 1), (2, 1)]),
    ],
)
def test_a_rollout_asks_for_no_more_gpus_than_there_are(
    num_free: int, surge: tuple[int, int], unavailable: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    outcome = Cluster(nodes=(host(num_free),)).reconcile(service(spec(surge, unavailable)))
    assert budgets(outcome) == expected


def test_what_is_otherwise_than_asked_for_is_said_in_numbers() -> None:
    for num_free, says in {
        6: "",
        5: "decode: expected room for maxSurge 2, got it for 1; so many are begun first",
        4: "decode: expected room for maxSurge 2, got it for 0; pods are ended first",
    }.items():
        outcome = Cluster(nodes=(host(num_free),)).reconcile(service(spec((1, 2), (0, 1))))
        assert feasible(outcome) == ("True", "NoRoomToSurge" if says else "Fits", says)


def test_a_rollout_that_waits_for_a_gpu_says_so_until_there_is_one() -> None:
    chance, cluster = random.Random(0), Cluster(nodes=(host(3),))
    made = spec((1, 1), (0, 0))
    # All run, so nothing is wrong yet.
    assert feasible(cluster.settle(service(made), chance))[:2] == ("True", "NoRoomToSurge")
    changed = service({**made, "image": "new:1"}, generation=2)
    cluster.reconcile(changed)
    status, reason, message = feasible(cluster.reconcile(changed))
    assert (status, reason) == ("False", "NoRoomToSurge")
    assert "prefill: expected room for maxSurge 1, got it for 0; a change waits for it" in message
    cluster.nodes = (host(5),)
    assert feasible(cluster.reconcile(changed)) == ("True", "Fits", "")


def test_a_changed_budget_is_no_new_pod_template_and_no_new_pin() -> None:
    chance, cluster = random.Random(0), Cluster(nodes=(host(8),))
    made = service(spec((2, 2), (1, 1)))
    before = cluster.settle(made, chance)
    cluster.nodes = (host(3),)
    after = cluster.reconcile(made)
    assert (budgets(before), budgets(after)) == ([(2, 1), (2, 1)], [(0, 1), (0, 1)])
    assert after.status.pinned == before.status.pinned
    templates = [
        [each["spec"]["template"] for each in outcome.apply if each["kind"] in ("Deployment", "StatefulSet")]
        for outcome in (before, after)
    ]
    assert templates[0] == templates[1]


def test_nodes_that_may_not_be_looked_at_change_no_budget() -> None:
    outcome = reconcile(service(spec((3, 4), (0, 1))), replace(Facts(now="2026-01-01T00:00:00Z"), nodes=None))
    assert budgets(outcome) == [(3, 0), (4, 1)]
