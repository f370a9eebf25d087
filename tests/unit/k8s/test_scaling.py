"""Numbers of pods by load: up at once, down one by one and late, and never by what is not known."""

import random
import re
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from oasiskv.operator.facts import INFERENCE_SERVICE, SCALED_OBJECT, Facts, Load
from oasiskv.operator.reconcile import Outcome, reconcile
from oasiskv.operator.testing import SPEC, Cluster, service

START = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
PROMETHEUS = {"address": "http://prometheus:9090", "query": "up", "threshold": 2}
PREFILL = {"prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 10, "queuedTokens": 1000, "scaleInSeconds": 300}}}
DECODE: dict[str, dict[str, Any]] = {
    "decode": {
        "replicas": 4,
        "scaling": {"minReplicas": 2, "maxReplicas": 20, "kvShare": 0.8, "stallShare": 0.1, "scaleInSeconds": 300},
    }
}
ASKED = ("oasiskv_decode_kv_bytes", "oasiskv_decode_kv_capacity_bytes", "oasiskv_stall_seconds_total")
"""What `asks.Loads` looks at."""


class Scaled:
    """A service that scales, over a cluster that follows at once, and a clock."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.cluster, self.service, self.now_s = Cluster(), service({**SPEC, **spec}), 0.0
        self.cluster.settle(self.service, random.Random(0))

    def turn(self, **loads: Load) -> Outcome:
        """Take a turn a quarter of a minute after the last one, with those loads."""
        self.now_s += 15
        now = (START + timedelta(seconds=self.now_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        facts = replace(self.facts(), now=now, loads=loads)
        outcome = reconcile(self.service, facts)
        self.cluster.status = outcome.status
        return outcome

    def facts(self) -> Facts:
        return self.cluster.facts()


def prefills(outcome: Outcome) -> int:
    (made,) = (each for each in outcome.apply if each["kind"] == "Deployment")
    number: int = made["spec"]["replicas"]
    return number


def decodes(outcome: Outcome) -> int:
    (made,) = (each for each in outcome.apply if each["kind"] == "InferenceService")
    number: int = made["spec"]["predictor"]["minReplicas"]
    assert made["spec"]["predictor"]["maxReplicas"] == number
    return number


def reason(outcome: Outcome, kind: str = "ScalingActive") -> tuple[str, str]:
    (found,) = (each for each in outcome.status.conditions if each.type == kind)
    return found.status, found.reason


@pytest.mark.parametrize(("tokens", "number"), [(0, 1), (1000, 1), (1001, 2), (4999, 5), (10**9, 5)])
def test_prefill_has_a_pod_for_each_share_of_the_tokens_that_wait(tokens: float, number: int) -> None:
    scaled = Scaled(PREFILL)
    assert prefills(scaled.turn(prefill=Load(num_pods=1, queued_tokens=tokens))) == number


def test_a_flood_is_met_in_steps_up_to_the_most() -> None:
    scaled, flood = Scaled(PREFILL), Load(num_pods=1, queued_tokens=10**9)
    assert [prefills(scaled.turn(prefill=flood)) for _ in range(4)] == [5, 10, 10, 10]
    scaled, flood = Scaled(DECODE), Load(num_pods=30, kv_share=1.0, stall_share=1.0)
    numbers = []
    for _ in range(4):
        numbers.append(decodes(scaled.turn(decode=flood)))
        scaled.cluster.settle(scaled.service, random.Random(0))
    assert numbers == [8, 16, 20, 20]


@pytest.mark.parametrize(
    ("kv_share", "stall_share", "number"),
    [(0.8, 0.0, 4), (0.87, 0.0, 4), (0.9, 0.0, 5), (1.0, 0.0, 5), (0.5, 0.2, 8), (0.0, 0.1, 4), (1.0, 1.0, 8)],
)
def test_decode_grows_with_the_kv_that_it_holds_and_the_time_that_it_waits(
    kv_share: float, stall_share: float, number: int
) -> None:
    load = Load(num_pods=4, kv_share=kv_share, stall_share=stall_share)
    assert decodes(Scaled(DECODE).turn(decode=load)) == number


def test_fewer_pods_come_late_and_one_by_one() -> None:
    scaled, calm = Scaled(DECODE), Load(num_pods=4, kv_share=0.1)
    numbers = []
    for _ in range(85):
        numbers.append(decodes(scaled.turn(decode=calm)))
        scaled.cluster.settle(scaled.service, random.Random(0))
    assert numbers[0] == numbers[19] == 4
    assert numbers[20] == 3
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 2  # the fewest


def test_a_single_busy_moment_begins_the_wait_anew() -> None:
    scaled = Scaled(DECODE)
    calm, busy = Load(num_pods=4, kv_share=0.1), Load(num_pods=4, kv_share=0.8)
    numbers = [decodes(scaled.turn(decode=busy if index == 19 else calm)) for index in range(39)]
    assert set(numbers) == {4}


def test_pods_that_say_nothing_are_not_taken_for_idle() -> None:
    scaled = Scaled(DECODE)
    for load in (Load(num_pods=3, num_silent=1, kv_share=0.1), Load(num_pods=0, num_silent=4)):
        assert {decodes(scaled.turn(decode=load)) for _ in range(30)} == {4}
    assert reason(scaled.turn(decode=Load(num_pods=0, num_silent=4))) == ("False", "NoMetrics")


def test_nothing_is_taken_away_during_a_rollout() -> None:
    scaled = Scaled(DECODE)
    decode = scaled.cluster.facts().decode
    assert decode is not None
    calm = Load(num_pods=4, kv_share=0.1)
    facts = replace(scaled.cluster.facts(), decode=replace(decode, updated=1), loads={"decode": calm})
    for index in range(60):
        now = (START + timedelta(seconds=15 * index)).strftime("%Y-%m-%dT%H:%M:%SZ")
        outcome = reconcile(scaled.service, replace(facts, now=now))
        facts = replace(facts, status=outcome.status)
        assert decodes(outcome) == 4


def test_what_is_not_asked_for_changes_nothing() -> None:
    scaled = Scaled(DECODE)
    scaled.turn(decode=Load(num_pods=4, kv_share=1.0))
    before = scaled.cluster.status.scaling
    outcome = scaled.turn()
    assert (outcome.status.scaling, decodes(outcome)) == (before, 5)


def test_a_number_is_no_new_pin_and_no_new_pod_template() -> None:
    scaled = Scaled(DECODE)
    first, second = scaled.turn(), scaled.turn(decode=Load(num_pods=4, kv_share=1.0))
    assert (decodes(first), decodes(second)) == (4, 5)
    assert first.status.pinned == second.status.pinned
    assert first.unverified == second.unverified


def test_the_number_that_was_there_is_where_it_begins() -> None:
    cluster = Cluster()
    cluster.settle(service({**SPEC, "prefill": {"replicas": 6}}), random.Random(0))
    outcome = reconcile(service({**SPEC, **PREFILL}, generation=2), cluster.facts())
    assert prefills(outcome) == 6


def test_keda_decides_where_it_is_there_and_told_how() -> None:
    with_metric = {"prefill": {"scaling": {"maxReplicas": 3, "prometheus": PROMETHEUS}}}
    both = frozenset({INFERENCE_SERVICE, SCALED_OBJECT})
    for spec, kinds, is_kedas in (
        (with_metric, both, True),
        (with_metric, frozenset({INFERENCE_SERVICE}), False),
        (PREFILL, both, False),
    ):
        outcome = reconcile(service({**SPEC, **spec}), replace(Cluster().facts(), kinds=kinds))
        (deployment,) = (each for each in outcome.apply if each["kind"] == "Deployment")
        scalers = [each for each in outcome.apply if each["kind"] == "ScaledObject"]
        assert (len(scalers), "replicas" in deployment["spec"]) == (is_kedas, not is_kedas)
        assert outcome.asks == (frozenset() if is_kedas else frozenset({"prefill"}))
        assert reason(outcome) == ("True", "Keda" if is_kedas else "Operator")


def test_keda_decides_about_decode_where_it_is_there_and_told_where_metrics_are() -> None:
    prometheus = {"address": "http://prometheus:9090"}
    told = {"decode": {**DECODE["decode"], "scaling": {**DECODE["decode"]["scaling"], "prometheus": prometheus}}}
    both = frozenset({INFERENCE_SERVICE, SCALED_OBJECT})
    for spec, kinds, is_kedas in (
        (told, both, True),
        (told, frozenset({INFERENCE_SERVICE}), False),
        (DECODE, both, False),
    ):
        # KEDA writes the number into the spec, and the operator takes it from there.
        given = service({**SPEC, "decode": {**spec["decode"], "replicas": 7}})
        outcome = reconcile(given, replace(Cluster().facts(), kinds=kinds))
        scalers = [each for each in outcome.apply if each["kind"] == "ScaledObject"]
        assert (len(scalers), outcome.asks == frozenset(), decodes(outcome)) == (is_kedas, is_kedas, 7)
        assert reason(outcome) == ("True", "Keda" if is_kedas else "Operator")
        if is_kedas:
            assert scalers[0]["spec"]["scaleTargetRef"]["name"] == "chat"
            stopped = reconcile({**given, "spec": {**given["spec"], "suspend": True}}, Facts(now="", kinds=kinds))
            assert not [each for each in stopped.apply if each["kind"] == "ScaledObject"]


def test_what_keda_asks_for_is_what_the_operator_would_count() -> None:
    prometheus = {"address": "http://prometheus:9090"}
    told = {"decode": {**DECODE["decode"], "scaling": {**DECODE["decode"]["scaling"], "prometheus": prometheus}}}
    both = frozenset({INFERENCE_SERVICE, SCALED_OBJECT})
    outcome = reconcile(service({**SPEC, **told}), replace(Cluster().facts(), kinds=both))
    (scaler,) = (each for each in outcome.apply if each["kind"] == "ScaledObject")
    triggers = {each["metadata"]["query"]: each["metadata"]["threshold"] for each in scaler["spec"]["triggers"]}
    assert sorted(triggers.values()) == ["0.1", "0.8"]
    for query in triggers:
        for name in re.findall(r"oasiskv_\w+", query):
            assert name in ASKED, query
        assert 'namespace="llm",pod=~"chat-predictor-.+"' in query


def test_staging_is_never_scaled() -> None:
    outcome = Scaled({**PREFILL, **DECODE}).turn(
        prefill=Load(num_pods=1, queued_tokens=10**9), decode=Load(num_pods=4, kv_share=1.0)
    )
    assert [each["spec"]["replicas"] for each in outcome.apply if each["kind"] == "StatefulSet"] == [1]
    assert outcome.delete == ()


def test_a_suspended_service_asks_nobody() -> None:
    outcome = Scaled({**PREFILL, "suspend": True}).turn()
    assert (outcome.asks, reason(outcome)) == (frozenset(), ("False", "Suspended"))
