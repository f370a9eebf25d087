import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from oasiskv.operator import reconcile as module
from oasiskv.operator.api import Network, Placement, ProfileSpec
from oasiskv.operator.api_status import Condition, ServiceStatus
from oasiskv.operator.crds import MAX_NAME
from oasiskv.operator.facts import CERTIFICATE, INFERENCE_SERVICE, Facts, Node, Profile, RdmaReport, Ref, Workload
from oasiskv.operator.reconcile import Outcome, reconcile
from oasiskv.operator.render import RENDER_VERSION, render
from oasiskv.operator.testing import SPEC, Cluster, node, service

OTHER_KV = {**SPEC, "engine": {"blockSize": 32}}


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


def condition(outcome: Outcome, type_: str) -> tuple[str, str, str]:
    (found,) = (each for each in outcome.status.conditions if each.type == type_)
    return found.status, found.reason, found.message


def verify(cluster: Cluster, spec: Any = SPEC) -> None:
    """Say of the revision that is wanted that a block has crossed."""
    path = reconcile(service(spec), cluster.facts()).unverified
    assert path is not None
    cluster.verified = frozenset({path})


def kinds(cluster: Cluster, kind: str) -> list[str]:
    return sorted(ref.name for ref in cluster.objects if ref.kind == kind)


@pytest.mark.parametrize("change", [{"is_current": False}, {"total": 3}, {"ready": 1}, {"updated": 1}])
def test_what_is_not_all_new_and_ready_is_not_done(change: dict[str, Any]) -> None:
    done = Workload(desired=2, updated=2, ready=2, total=2)
    assert done.is_done
    assert not replace(done, **change).is_done


@pytest.mark.parametrize("change", [{"is_current": False}, {"total": 3}, {"ready": 1}, {"updated": 1}])
def test_a_role_that_is_not_done_is_not_ready(change: dict[str, Any], chance: random.Random) -> None:
    cluster = Cluster()
    kv = cluster.settle(service(), chance).status.kv_generation
    done = Workload(desired=2, updated=2, ready=2, total=2)
    outcome = reconcile(service(), replace(cluster.facts(), prefills={kv: replace(done, **change)}))
    assert condition(outcome, "PrefillReady")[0] == "False"
    assert condition(outcome, "Ready")[1] == condition(outcome, "PrefillReady")[1]


def test_ready_waits_until_a_block_has_crossed(chance: random.Random) -> None:
    cluster = Cluster()
    status, reason, _ = condition(cluster.settle(service(), chance), "Ready")
    assert (status, reason) == ("False", "KVPathUnverified")
    verify(cluster)
    assert condition(cluster.settle(service(), chance), "Ready")[:2] == ("True", "Serving")


def test_a_block_that_crossed_for_another_revision_does_not_count(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    verify(cluster)
    after = cluster.settle(service({**SPEC, "image": "other:1"}, generation=2), chance)
    assert condition(after, "Ready")[:2] == ("False", "KVPathUnverified")


def test_a_change_of_one_role_leaves_the_others_revision_and_pods_alone(chance: random.Random) -> None:
    before = reconcile(service(), Cluster().facts())
    changed = {**SPEC, "decode": {"replicas": 2, "image": "other:1"}}
    after = reconcile(service(changed), Cluster().facts())
    assert before.unverified is not None
    assert after.unverified is not None
    assert before.unverified[0] == after.unverified[0]
    assert before.unverified[1] != after.unverified[1]
    (old,), (new,) = ([each for each in of.apply if each["kind"] == "Deployment"] for of in (before, after))
    assert old == new


@pytest.mark.parametrize(("url", "ready"), [("", 2), ("http://chat.llm", 0)])
def test_ready_waits_for_a_route_although_decode_is_there(url: str, ready: int, chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    verify(cluster)
    facts = cluster.facts()
    assert facts.decode is not None
    # Only what is looked at differs: the pods' own word is that of `DecodeReady`.
    outcome = reconcile(service(), replace(facts, decode=replace(facts.decode, url=url, ready=ready)))
    assert condition(outcome, "EndpointReady")[:2] == ("False", "NoRoute")
    assert condition(outcome, "DecodeReady")[0] == ("True" if ready else "False")
    assert condition(outcome, "Ready")[0] == "False"
    assert condition(reconcile(service(), facts), "EndpointReady")[:2] == ("True", "Routable")


def test_what_a_pod_says_of_why_nothing_crossed_is_passed_on(chance: random.Random) -> None:
    facts = replace(Cluster().facts(), unverified="UnsupportedError: other model")
    assert condition(reconcile(service(), facts), "KVPathVerified")[2].endswith(": UnsupportedError: other model")


def test_without_prefill_pods_nothing_has_to_cross() -> None:
    outcome = reconcile(service({**SPEC, "prefill": {"replicas": 0}}), Cluster().facts())
    assert (outcome.unverified, condition(outcome, "KVPathVerified")[1]) == (None, "NotUsed")


def test_reconciling_twice_writes_nothing(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    before = cluster.num_writes
    cluster.reconcile(service())
    assert cluster.num_writes == before


def test_a_condition_keeps_its_time_until_its_status_changes(chance: random.Random) -> None:
    cluster = Cluster()
    first = cluster.reconcile(service()).status.conditions
    last = cluster.settle(service(), chance).status.conditions
    times = {each.type: each.last_transition_time for each in first}
    for each in last:
        changed = each.status != next(old.status for old in first if old.type == each.type)
        assert (each.last_transition_time != times[each.type]) is changed


def test_a_spec_that_cannot_be_leaves_everything_as_it_is(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    objects, pinned = dict(cluster.objects), cluster.status.pinned
    outcome = cluster.reconcile(service({**SPEC, "engine": {"arguments": {"dtype": "half"}}}, generation=2))
    assert condition(outcome, "Accepted")[:2] == ("False", "InvalidSpec")
    assert "arguments.dtype: expected it to be left to the service" in condition(outcome, "Ready")[2]
    assert (cluster.objects, cluster.status.pinned) == (objects, pinned)
    assert outcome.status.observed_generation == 2
    assert outcome.status.roles.decode.ready == 2


@pytest.mark.parametrize("namespace_length", [1, 16, 17, 18, 30, 63])
def test_every_name_is_refused_or_fits_everywhere(namespace_length: int) -> None:
    most = max(0, min(MAX_NAME, 52 - namespace_length))
    for length in range(1, 64):
        of = service(name="a" * length)
        of["metadata"]["namespace"] = "n" * namespace_length
        outcome = reconcile(of, Facts(now="2026-01-01T00:00:00Z"))
        assert bool(outcome.apply) is (length <= most)
        for made in outcome.apply:
            name = made["metadata"]["name"]
            assert len(name) + (len("-0123456789") if made["kind"] == "StatefulSet" else 0) <= 63
            assert all(len(value) <= 63 for value in made["metadata"]["labels"].values())
    assert f"name: expected at most {most} characters" in condition(outcome, "Accepted")[2]


def test_decode_serves_the_old_kv_generation_until_the_new_one_is_up(chance: random.Random) -> None:
    cluster = Cluster()
    old = cluster.settle(service(), chance).status.kv_generation
    outcome = cluster.reconcile(service(OTHER_KV, generation=2))
    assert outcome.status.serving_kv_generation == old != outcome.status.kv_generation
    assert not [made for made in outcome.apply if made["kind"] == "InferenceService"]
    assert outcome.delete == ()
    assert condition(outcome, "DecodeReady")[1] == "WaitsForStagingAndPrefill"
    assert condition(outcome, "Progressing")[0] == "True"
    after = cluster.settle(service(OTHER_KV, generation=2), chance).status
    assert after.serving_kv_generation == after.kv_generation
    assert kinds(cluster, "StatefulSet") == [f"chat-staging-{after.kv_generation}"]
    assert kinds(cluster, "Deployment") == [f"chat-prefill-{after.kv_generation}"]
    assert len(kinds(cluster, "ConfigMap")) == 3


def test_going_back_returns_to_the_pods_that_still_live(chance: random.Random) -> None:
    cluster = Cluster()
    old = cluster.settle(service(), chance).status.kv_generation
    while cluster.status.serving_kv_generation == old:  # until decode is told to move on
        cluster.reconcile(service(OTHER_KV, generation=2))
        cluster.step(chance)
    outcome = cluster.reconcile(service(generation=3))
    assert Ref("StatefulSet", f"chat-staging-{old}") not in outcome.delete
    decode = next(made for made in outcome.apply if made["kind"] == "InferenceService")
    assert decode["metadata"]["labels"]["oasiskv.io/kv-generation"] == old


HANDED_OVER = {**SPEC, "staging": {"replacement": "HandOver"}}


def leads_to(cluster: Cluster) -> str:
    """Return the StatefulSet of the one revision that staging's Service leads to."""
    (revision,) = cluster.facts().staging_revisions.values()
    return f"chat-staging-{revision}"


def test_staging_is_replaced_in_the_order_in_which_nothing_is_lost(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(HANDED_OVER), chance)
    (old,) = kinds(cluster, "StatefulSet")
    assert leads_to(cluster) == old
    changed = service({**HANDED_OVER, "staging": {**HANDED_OVER["staging"], "image": "new:1"}}, generation=2)
    prefill = kinds(cluster, "Deployment")
    outcome = cluster.reconcile(changed)
    (new,) = set(kinds(cluster, "StatefulSet")) - {old}
    while condition(outcome, "StagingReady")[0] != "True":  # the old one serves until the new one is up
        assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (old, sorted([old, new]))
        cluster.step(chance)
        outcome = cluster.reconcile(changed)
    # First everybody is led to the new one, and the old one is there to be read; then it is told to end.
    assert (leads_to(cluster), kinds(cluster, "StatefulSet"), outcome.delete) == (new, sorted([old, new]), ())
    assert Ref("StatefulSet", old) in cluster.reconcile(changed).delete
    assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (new, [new])
    assert kinds(cluster, "Deployment") == prefill


def test_staging_goes_back_to_the_one_that_serves_and_skips_what_never_did(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(HANDED_OVER), chance)
    (old,) = kinds(cluster, "StatefulSet")
    for generation, image in ((2, "b:1"), (3, "c:1")):
        cluster.reconcile(
            service({**HANDED_OVER, "staging": {"replacement": "HandOver", "image": image}}, generation=generation)
        )
        assert (leads_to(cluster), len(kinds(cluster, "StatefulSet"))) == (old, 2)
    cluster.reconcile(service(HANDED_OVER, generation=4))
    assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (old, [old])


def test_a_staging_that_somebody_took_away_is_not_waited_for(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(HANDED_OVER), chance)
    (old,) = kinds(cluster, "StatefulSet")
    del cluster.objects[Ref("StatefulSet", old)], cluster.made[Ref("StatefulSet", old)]
    cluster.reconcile(service({**HANDED_OVER, "image": "new:1"}, generation=2))
    (new,) = kinds(cluster, "StatefulSet")
    assert leads_to(cluster) == new != old


def test_staging_moves_off_a_node_that_is_emptied_and_stays_where_it_went(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(HANDED_OVER), chance)
    (old,) = kinds(cluster, "StatefulSet")
    before = cluster.objects[Ref("StatefulSet", old)]["spec"]["template"]["spec"]
    cluster.emptied = {old: "h100-1"}
    outcome = cluster.reconcile(service(HANDED_OVER))
    (new,) = set(kinds(cluster, "StatefulSet")) - {old}
    while condition(outcome, "StagingReady")[0] != "True":
        status, reason, message = condition(outcome, "StagingReady")
        assert (status, reason) == ("False", "MovesOffNode")
        assert message.startswith("moves off node h100-1, which takes no more pods: ")
        assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (old, sorted([old, new]))
        cluster.step(chance)
        outcome = cluster.reconcile(service(HANDED_OVER))
    assert (leads_to(cluster), kinds(cluster, "StatefulSet"), outcome.delete) == (new, sorted([old, new]), ())
    assert Ref("StatefulSet", old) in cluster.reconcile(service(HANDED_OVER)).delete
    cluster.emptied = {}
    cluster.settle(service(HANDED_OVER), chance)
    assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (new, [new])
    assert cluster.objects[Ref("StatefulSet", new)]["spec"]["template"]["spec"] == before
    # And on, as often as it has to; a change of the spec takes it back to what a new service would have.
    cluster.emptied = {new: "h100-2"}
    cluster.reconcile(service(HANDED_OVER))
    assert len(kinds(cluster, "StatefulSet")) == 2
    cluster.emptied = {}
    changed = {**HANDED_OVER, "staging": {**HANDED_OVER["staging"], "image": "new:1"}}
    cluster.settle(service(changed, generation=2), chance)
    fresh = Cluster()
    fresh.settle(service(changed), chance)
    assert kinds(cluster, "StatefulSet") == kinds(fresh, "StatefulSet")


def test_staging_stays_when_its_node_takes_pods_again_before_the_next_one_is_up(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(HANDED_OVER), chance)
    (old,) = kinds(cluster, "StatefulSet")
    cluster.emptied = {old: "h100-1"}
    cluster.reconcile(service(HANDED_OVER))
    (new,) = set(kinds(cluster, "StatefulSet")) - {old}
    # Where the next one came to a node that is emptied too, there is no third one.
    cluster.emptied = {old: "h100-1", new: "h100-2"}
    cluster.reconcile(service(HANDED_OVER))
    assert kinds(cluster, "StatefulSet") == sorted([old, new])
    cluster.emptied = {}
    cluster.reconcile(service(HANDED_OVER))
    assert (leads_to(cluster), kinds(cluster, "StatefulSet")) == (old, [old])


def test_an_eviction_of_staging_waits_only_where_somebody_moves_it(chance: random.Random) -> None:
    def budgets(spec: Any, nodes: tuple[Node, ...] | None) -> list[str]:
        outcome = reconcile(service(spec), replace(Cluster().facts(), nodes=nodes))
        return [made["metadata"]["name"] for made in outcome.apply if made["kind"] == "PodDisruptionBudget"]

    assert budgets(HANDED_OVER, (node(),)) == ["chat-prefill", "chat-decode", "chat-staging"]
    assert budgets(HANDED_OVER, None) == budgets(SPEC, (node(),)) == ["chat-prefill", "chat-decode"]
    # In place there is nobody to move to.
    cluster = Cluster()
    cluster.settle(service(), chance)
    (old,) = kinds(cluster, "StatefulSet")
    cluster.emptied = {old: "h100-1"}
    cluster.reconcile(service())
    assert kinds(cluster, "StatefulSet") == [old]


def test_room_counts_the_prefill_pods_of_both_kv_generations(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    assert cluster.status.placement.wanted_pods == 3
    assert cluster.reconcile(service(OTHER_KV, generation=2)).status.placement.wanted_pods == 4


def test_a_cluster_without_room_says_so_and_objects_are_made_all_the_same() -> None:
    outcome = Cluster(nodes=(node(labels={}),)).reconcile(service())
    assert condition(outcome, "PlacementFeasible")[:2] == ("False", "NoNodeMatches")
    assert "got 0 of 1 nodes" in condition(outcome, "PlacementFeasible")[2]
    assert outcome.apply


def test_nodes_that_may_not_be_looked_at_are_no_reason_to_wait(chance: random.Random) -> None:
    cluster = Cluster()
    cluster.nodes = None  # type: ignore[assignment]
    outcome = cluster.settle(service(), chance)
    assert condition(outcome, "PlacementFeasible")[:2] == ("Unknown", "NodesNotVisible")
    assert condition(outcome, "DecodeReady")[0] == "True"


def test_without_kserve_the_rest_is_made_and_decode_follows_when_it_is_there(chance: random.Random) -> None:
    cluster = Cluster(kinds=frozenset())
    outcome = cluster.settle(service(), chance)
    assert condition(outcome, "DecodeReady")[:2] == ("False", "KServeMissing")
    assert condition(outcome, "StagingReady")[0] == "True"
    cluster.kinds = frozenset({INFERENCE_SERVICE})
    assert condition(cluster.settle(service(), chance), "DecodeReady")[0] == "True"


def test_ready_waits_for_the_certificate_and_says_what_cert_manager_says(chance: random.Random) -> None:
    made = service({**SPEC, "tls": {"issuer": {"name": "ca"}}})
    cluster = Cluster()
    assert condition(cluster.settle(made, chance), "CertificatesReady")[:2] == ("False", "CertManagerMissing")
    cluster.kinds |= {CERTIFICATE}
    outcome = cluster.settle(made, chance)
    assert kinds(cluster, "Certificate") == [f"chat-tls-{outcome.status.kv_generation}"]
    assert condition(outcome, "CertificatesReady")[:2] == ("False", "NotIssued")
    for why, status in (("issuer ca not found", "False"), ("", "True")):
        facts = replace(cluster.facts(), certificates={outcome.status.kv_generation: why})
        assert condition(reconcile(made, facts), "CertificatesReady")[::2] == (status, why)
    assert condition(reconcile(made, cluster.facts()), "Ready")[1] == "NotIssued"
    named = cluster.reconcile(service({**SPEC, "tls": {"secret": "mine"}}, generation=2))
    assert condition(named, "CertificatesReady")[:2] == ("True", "Named")
    assert condition(cluster.reconcile(service(generation=3)), "CertificatesReady")[:2] == ("True", "NotUsed")


def test_an_operator_with_new_rules_changes_no_pod_until_the_spec_does(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    before = dict(cluster.objects)

    def newer(*arguments: Any) -> Any:
        metadata, spec, _, network, known = arguments
        return render(metadata, spec, Placement(priority_class="high"), network, known)

    monkeypatch.setattr(module, "RENDER_VERSION", RENDER_VERSION + 1)
    monkeypatch.setattr(module, "RENDERERS", {RENDER_VERSION: render, RENDER_VERSION + 1: newer})
    cluster.settle(service(), chance)
    assert cluster.objects == before
    cluster.settle(service({**SPEC, "decode": {"replicas": 3}, "suspend": False}, generation=2), chance)
    assert (
        cluster.objects[Ref("Deployment", kinds(cluster, "Deployment")[0])]
        == before[Ref("Deployment", kinds(cluster, "Deployment")[0])]
    )
    cluster.settle(service({**SPEC, "image": "other:1"}, generation=3), chance)
    pod = cluster.objects[Ref("Deployment", kinds(cluster, "Deployment")[0])]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "high"


def test_an_older_operator_leaves_what_a_newer_one_rendered_alone(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    cluster.settle(service(), chance)
    monkeypatch.setattr(module, "RENDERERS", {})
    outcome = cluster.reconcile(service())
    assert (outcome.apply, outcome.delete) == ((), ())
    assert "renderVersion: expected at most" in condition(outcome, "Accepted")[2]


class TestProfile:
    spec: ClassVar[dict[str, Any]] = {key: value for key, value in SPEC.items() if key not in ("placement", "network")}

    def profile(self, generation: int) -> Profile:
        placement = Placement(node_selector={"pool": str(generation)}, gpu_products=())
        return Profile(generation=generation, spec=ProfileSpec(placement=placement, network=Network()))

    def pools(self, cluster: Cluster) -> set[str]:
        templates = [
            made["spec"]["template"]["spec"]
            for ref, made in cluster.objects.items()
            if ref in cluster.made and "template" in made["spec"]
        ]
        return {template["nodeSelector"]["pool"] for template in templates}

    def test_a_profile_that_is_not_there_is_waited_for(self, chance: random.Random) -> None:
        cluster = Cluster()
        spec = {**self.spec, "profile": {"name": "h100"}}
        outcome = cluster.settle(service(spec), chance)
        assert condition(outcome, "ProfileResolved")[:2] == ("False", "NotFound")
        assert cluster.objects == {}
        cluster.profile = self.profile(1)
        assert condition(cluster.settle(service(spec), chance), "ProfileResolved")[:2] == ("True", "Current")
        assert self.pools(cluster) == {"1"}

    @pytest.mark.parametrize(("update", "pool"), [("Pinned", "1"), ("Auto", "2")])
    def test_a_changed_profile_rolls_only_services_that_want_it(
        self, update: str, pool: str, chance: random.Random
    ) -> None:
        cluster = Cluster()
        cluster.profile = self.profile(1)
        spec = {**self.spec, "profile": {"name": "h100", "update": update}}
        cluster.settle(service(spec), chance)
        cluster.profile = self.profile(2)
        cluster.settle(service(spec), chance)
        assert self.pools(cluster) == {pool}
        cluster.settle(service({**spec, "image": "other:1"}, generation=2), chance)
        assert self.pools(cluster) == {"2"}

    def test_a_profile_that_is_taken_by_itself_brings_no_new_rules(
        self, chance: random.Random, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster = Cluster()
        cluster.profile = self.profile(1)
        spec = {**self.spec, "profile": {"name": "h100", "update": "Auto"}}
        cluster.settle(service(spec), chance)
        monkeypatch.setattr(module, "RENDER_VERSION", RENDER_VERSION + 1)
        cluster.profile = self.profile(2)
        cluster.settle(service(spec), chance)
        assert cluster.status.pinned is not None
        assert (cluster.status.pinned.render_version, self.pools(cluster)) == (RENDER_VERSION, {"2"})

    def test_a_profile_that_was_deleted_is_still_used(self, chance: random.Random) -> None:
        cluster = Cluster()
        cluster.profile = self.profile(1)
        spec = {**self.spec, "profile": {"name": "h100"}}
        cluster.settle(service(spec), chance)
        cluster.profile = None
        outcome = cluster.settle(service(spec), chance)
        assert condition(outcome, "ProfileResolved")[:2] == ("False", "NotFound")
        assert self.pools(cluster) == {"1"}

    def test_a_section_of_the_service_replaces_that_of_the_profile(self, chance: random.Random) -> None:
        cluster = Cluster()
        cluster.profile = self.profile(1)
        spec = {**self.spec, "profile": {"name": "h100"}, "placement": {"nodeSelector": {"pool": "own"}}}
        cluster.settle(service(spec), chance)
        assert self.pools(cluster) == {"own"}


def test_what_pods_see_of_rdma_is_a_condition_that_holds_until_they_say_otherwise() -> None:
    facts = Cluster().facts()

    def said(report: RdmaReport | None, before: ServiceStatus = facts.status) -> tuple[Condition, ServiceStatus]:
        status = reconcile(service(), replace(facts, rdma=report, status=before)).status
        (found,) = (each for each in status.conditions if each.type == "RDMAReady")
        return found, status

    assert (said(None)[0].status, said(None)[0].reason) == ("Unknown", "NotAsked")
    bad, status = said(RdmaReport(num_pods=2, problem="pod a: memlock: expected 9, got 1"))
    assert (bad.status, bad.reason, bad.message) == ("False", "PodsCannotUseIt", "pod a: memlock: expected 9, got 1")
    assert said(None, status)[0] == bad
    slow, status = said(RdmaReport(num_pods=2, note="pod a: far", ways="1 PIX, 1 SYS"), status)
    assert (slow.status, slow.reason, slow.message) == ("True", "Slow", "pod a: far; GPU and port: 1 PIX, 1 SYS")
    good, _ = said(RdmaReport(num_pods=2, ways="2 PIX"), status)
    assert (good.reason, good.message) == ("Usable", "2 pods can use a port; GPU and port: 2 PIX")
    # Where KV moves by something else nobody is asked.
    other = reconcile(service({**SPEC, "network": {"fabric": "TCP"}}), facts)
    assert not other.asks_rdma
    assert "RDMAReady" not in {each.type for each in other.status.conditions}
