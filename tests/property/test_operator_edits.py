"""Random edits at any moment, over controllers of any pace: what serves goes on serving, and all settles in the end."""

import random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from oasiskv.operator.facts import Ref
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.testing import SPEC, Cluster, service

EDITS: tuple[dict[str, Any], ...] = (
    {},
    {"engine": {"blockSize": 32}},
    {"engine": {"blockSize": 64}},
    {"image": "other:1"},
    {"prefill": {"replicas": 3}},
    {"decode": {"replicas": 4}},
    {"engine": {"arguments": {"dtype": "half"}}},
    {"networkPolicy": "Disabled"},
    {"image": "other:2"},
)


def serving(cluster: Cluster, kv: str) -> set[Ref]:
    """Return what decode pods of a KV generation need: prefill, and the staging that has served them so far."""
    revision = cluster.facts().staging_revisions.get(kv, kv)
    return {Ref("StatefulSet", f"chat-staging-{revision}"), Ref("Deployment", f"chat-prefill-{kv}")}


@example(edits=[(1, 9), (4, 0), (1, 1), (0, 0)], seed=252, replacement="InPlace")
@example(edits=[(3, 3), (8, 2), (3, 0), (0, 5)], seed=1, replacement="HandOver")
@given(
    st.lists(st.tuples(st.integers(0, len(EDITS) - 1), st.integers(0, 12)), max_size=6),
    st.integers(0, 2**16),
    st.sampled_from(("InPlace", "HandOver")),
)
def test_what_serves_is_never_taken_away_and_everything_settles(
    edits: list[tuple[int, int]], seed: int, replacement: str
) -> None:
    chance, cluster, generation = random.Random(seed), Cluster(), 1
    base = dict(SPEC) if replacement == "InPlace" else {**SPEC, "staging": {"replacement": replacement}}
    cluster.settle(service(base), chance)
    spec: dict[str, Any] = dict(base)
    for edit, num_steps in edits:
        generation += 1
        spec = {**base, **EDITS[edit]}
        for _ in range(num_steps + 1):
            with_pods = {kv for kv, number in cluster.facts().decode_pods.items() if number}
            needed = {ref for kv in with_pods for ref in serving(cluster, kv)}
            cluster.reconcile(service(spec, generation=generation))
            assert needed <= cluster.objects.keys()
            in_use = {f"ConfigMap {name}" for name in cluster.facts().configs_in_use}
            assert in_use <= {f"{ref.kind} {ref.name}" for ref in cluster.objects}
            # Fewer replicas are there once they are written, so decode moves; then what it no longer needs goes, then
            # the ConfigMaps that this named.
            for _ in range(3):
                outcome = cluster.reconcile(service(spec, generation=generation))
            again = reconcile(service(spec, generation=generation), cluster.facts())
            assert (again.apply, again.delete) == (outcome.apply, ())
            cluster.step(chance)
            # Nodes may be emptied at any moment, also the one where staging went.
            cluster.emptied = {name: "n" for name in cluster.facts().stagings if chance.random() < 0.1}
    cluster.emptied = {}
    # A staging pod that moved stays where it went, under its name; another template has it begin anew.
    cluster.settle(service({**base, "image": "between:1"}, generation=generation + 1), chance)
    last = service(base, generation=generation + 2)
    status = cluster.settle(last, chance).status
    assert status.serving_kv_generation == status.kv_generation
    assert {each.type for each in status.conditions if each.status == "False"} == {
        "KVPathVerified",
        "Ready",
        "Progressing",
    }
    fresh = Cluster()
    fresh.settle(service(base), chance)
    assert {ref: made["spec"] for ref, made in cluster.objects.items() if "spec" in made} == {
        ref: made["spec"] for ref, made in fresh.objects.items() if "spec" in made
    }
    assert cluster.objects.keys() == fresh.objects.keys()
