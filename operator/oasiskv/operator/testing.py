"""A service as people write it, nodes, and a cluster whose controllers take their time, for tests."""

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.facts import INFERENCE_SERVICE, Decode, Facts, Node, Profile, Ref, Workload
from oasiskv.operator.names import KV, ORIGIN, REVISION
from oasiskv.operator.reconcile import Outcome, reconcile

PRODUCT = "NVIDIA-H100-80GB-HBM3"
SPEC: Mapping[str, Any] = {
    "image": "oasiskv/engine:0.4.0",
    "pullSecrets": ["registry"],
    "model": {"uri": "pvc://models/qwen3-8b", "hash": "abc", "numLayers": 36, "numKvHeads": 8, "headDim": 128},
    "engine": {"lookahead": {"budgetBlocks": 128, "hostPoolBytes": "64Gi"}, "arguments": {"max_model_len": 40960}},
    "decode": {"replicas": 2},
    "staging": {"ssd": {"size": "1Ti", "storageClass": "nvme"}},
    "placement": {"tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
    "network": {"fabric": "RDMA", "rdma": {"resource": "rdma/roce_gdr"}, "networks": ["llm/roce-rail0"]},
    "telemetry": {"otlpEndpoint": "http://otel-collector:4317"},
}


def service(spec: Mapping[str, Any] = SPEC, *, name: str = "chat", generation: int = 1) -> dict[str, Any]:
    """Return an OasisKVService as the API server would."""
    metadata = {"name": name, "namespace": "llm", "uid": "5f0c", "generation": generation}
    return {
        "apiVersion": "oasiskv.io/v1alpha1",
        "kind": "OasisKVService",
        "metadata": metadata,
        "spec": copy.deepcopy(dict(spec)),
    }


def node(name: str = "h100-1", **changes: Any) -> Node:
    """Return an H100 host as the scheduler sees it."""
    allocatable = {"cpu": 192, "memory": 2 * 2**40, "nvidia.com/gpu": 8, "rdma/roce_gdr": 64}
    values: dict[str, Any] = {
        "name": name,
        "labels": {"nvidia.com/gpu.product": PRODUCT, "topology.kubernetes.io/zone": "zone-a"},
        "allocatable": {key: Fraction(value) for key, value in allocatable.items()},
    }
    return Node(**(values | changes))


@dataclass(slots=True)
class _Made:
    """An object with pods: the number of each template that there are, and of those how many are ready."""

    kv: str
    template: str
    desired: int
    pods: dict[tuple[str, str], int] = field(default_factory=dict)
    """By KV generation and template."""
    num_ready: dict[tuple[str, str], int] = field(default_factory=dict)


class Cluster:
    """Applies outcomes, and moves pods one by one as Deployments with a surge of 1 do.

    Args:
        nodes: What `Facts` says of them.
        kinds: Kinds of others that it knows.
    """

    def __init__(
        self, nodes: tuple[Node, ...] = (node(),), kinds: frozenset[str] = frozenset({INFERENCE_SERVICE})
    ) -> None:
        self.nodes, self.kinds = nodes, kinds
        self.profile: Profile | None = None
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.made: dict[Ref, _Made] = {}
        self.status = ServiceStatus()
        self.num_writes = 0
        self.verified: frozenset[tuple[str, str]] = frozenset()
        self.emptied: dict[str, str] = {}

    def facts(self) -> Facts:
        """Return what a reconcile would see."""
        prefills, stagings, decode = {}, {}, None
        decode_pods: dict[str, int] = {}
        for ref, made in self.made.items():
            counts: dict[str, Any] = {
                "desired": made.desired,
                "total": sum(made.pods.values()),
                "ready": sum(made.num_ready.values()),
                "updated": made.pods.get((made.kv, made.template), 0),
            }
            match ref.kind:
                case "Deployment":
                    prefills[made.kv] = Workload(**counts)
                case "StatefulSet":
                    stagings[ref.name] = Workload(**counts)
                case _:
                    url = "http://chat.llm" if counts["ready"] else ""
                    decode = Decode(**counts, kv_generation=made.kv, url=url)
                    for (kv, _), number in made.pods.items():
                        decode_pods[kv] = decode_pods.get(kv, 0) + number
        return Facts(
            now=f"2026-01-01T00:00:{self.num_writes % 60:02}Z",
            kinds=self.kinds,
            nodes=self.nodes,
            profile=self.profile,
            children={ref: made["metadata"]["labels"].get(KV) for ref, made in self.objects.items()},
            configs_in_use=frozenset(_configs(self.objects.values())),
            prefills=prefills,
            stagings=stagings,
            staging_revisions={
                made["metadata"]["labels"][KV]: made["spec"]["selector"][REVISION]
                for ref, made in self.objects.items()
                if ref.kind == "Service" and REVISION in made["spec"]["selector"]
            },
            staging_origins={
                ref.name: made["metadata"]["annotations"][ORIGIN]
                for ref, made in self.objects.items()
                if ref.kind == "StatefulSet" and "annotations" in made["metadata"]
            },
            emptied=self.emptied,
            decode=decode,
            decode_pods=decode_pods,
            verified=self.verified,
            status=self.status,
        )

    def reconcile(self, of: Mapping[str, Any]) -> Outcome:
        """Reconcile once and carry the outcome out."""
        outcome = reconcile(of, self.facts())
        for made in outcome.apply:
            ref = Ref(made["kind"], made["metadata"]["name"])
            if self.objects.get(ref) != made:
                self.num_writes += 1
                self.objects[ref] = made
                self._template(ref, made)
        for ref in outcome.delete:
            self.num_writes += 1
            del self.objects[ref]
            self.made.pop(ref, None)
        self.num_writes += outcome.status != self.status
        self.status = outcome.status
        return outcome

    def step(self, chance: random.Random) -> None:
        """Let the controller of one object do one thing: make a pod, have one become ready, or end an old one."""
        if not self.made:
            return
        made = self.made[chance.choice(sorted(self.made))]
        new = made.kv, made.template
        total, num_ready = sum(made.pods.values()), sum(made.num_ready.values())
        old = next((key for key, number in made.pods.items() if number and key != new), None)
        if made.pods.get(new, 0) > made.num_ready.get(new, 0):
            made.num_ready[new] = made.num_ready.get(new, 0) + 1
        elif made.pods.get(new, 0) < made.desired and total < made.desired + 1:
            made.pods[new] = made.pods.get(new, 0) + 1
        elif old is not None and num_ready > made.desired - (made.desired == 0):
            made.pods[old] -= 1
            made.num_ready[old] = min(made.num_ready.get(old, 0), made.pods[old])
        elif total > made.desired:
            key = old or new
            made.pods[key] -= 1
            made.num_ready[key] = min(made.num_ready.get(key, 0), made.pods[key])

    def settle(self, of: Mapping[str, Any], chance: random.Random) -> Outcome:
        """Reconcile and step until nothing changes any more."""
        num_quiet = 0
        while num_quiet < 3:
            before = self.num_writes, copy.deepcopy(self.made)
            outcome = self.reconcile(of)
            for _ in range(40):
                self.step(chance)
            num_quiet = num_quiet + 1 if before == (self.num_writes, self.made) else 0
        return outcome

    def _template(self, ref: Ref, made: Mapping[str, Any]) -> None:
        spec = made.get("spec", {})
        if ref.kind == "InferenceService":
            is_stopped = any(key.endswith("/stop") for key in made["metadata"]["annotations"])
            predictor = {key: value for key, value in spec["predictor"].items() if not key.endswith("Replicas")}
            desired, template = 0 if is_stopped else spec["predictor"]["minReplicas"], repr(predictor)
        elif ref.kind in ("Deployment", "StatefulSet"):
            desired, template = spec.get("replicas", 1), repr(spec["template"])
        else:
            return
        known = self.made.setdefault(ref, _Made(kv="", template="", desired=0))
        known.kv, known.template, known.desired = made["metadata"]["labels"][KV], template, desired


def _configs(objects: Any) -> list[str]:
    found = []
    for made in objects:
        spec = made.get("spec", {})
        pod = spec.get("predictor") or spec.get("template", {}).get("spec", {})
        found += [volume["configMap"]["name"] for volume in pod.get("volumes", ()) if "configMap" in volume]
    return found
