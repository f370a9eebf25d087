"""Every leaf of a spec takes effect or is refused: none is accepted and ignored."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from oasiskv.core.config import LookaheadConfig
from oasiskv.operator.api import Network, Placement, ProfileSpec, ServiceSpec
from oasiskv.operator.facts import (
    CERTIFICATE,
    CLAIM_TEMPLATE,
    INFERENCE_SERVICE,
    POD_MONITOR,
    SCALED_OBJECT,
    Facts,
    Profile,
)
from oasiskv.operator.kinds import Bounds, SettingsOf, camel, hints, optional
from oasiskv.operator.reconcile import Outcome, reconcile
from oasiskv.operator.schema import rows
from oasiskv.operator.testing import SPEC, node, service

RESOURCES = {"cpu": "8", "memory": "256Gi", "sharedMemory": "8Gi"}
ROLE = {
    "image": "role:1",
    "resources": RESOURCES,
    "rollout": {"maxSurge": 2, "maxUnavailable": 1},
    "drain": {"preStopSeconds": 10, "timeoutSeconds": 60},
    "maxRequests": 64,
}
PROMETHEUS = {"address": "http://prometheus:9090", "query": "up", "threshold": 2.0}
LOOKAHEAD = {
    "budgetBlocks": 256,
    "fetchRatio": 0.1,
    "minCap": 8,
    "cap": "auto",
    "maxCap": 16,
    "scoreAlpha": 0.5,
    "prediction": "lookahead",
    "summary": "minmax",
    "summaryDtype": "auto",
    "groupReduction": "sum",
    "sinkBlocks": 2,
    "hostPoolBytes": "32Gi",
    "hostDtype": "auto",
    "switch": "early",
    "chunks": "auto",
    "drafting": "always",
    "signal": "joined",
    "handoverMode": "capped",
}
FULL: dict[str, Any] = {
    **SPEC,
    "model": {**SPEC["model"], "uri": "hf://qwen/qwen3-8b", "name": "qwen", "dtype": "float16", "tokenSecret": "hub"},
    "engine": {"blockSize": 32, "lookahead": LOOKAHEAD, "arguments": {"max_model_len": 8192}},
    "prefill": {**ROLE, "replicas": 2},
    "decode": {**ROLE, "replicas": 2, "localPromptTokens": 100},
    "staging": {
        "memory": "64Gi",
        "cpu": "4",
        "drainSeconds": 30,
        "ssd": {"size": "1Ti", "storageClass": "nvme"},
        "directory": "redis://redis:6379/0",
    },
    "placement": {
        "gpuProducts": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"],
        "gpuResource": "nvidia.com/gpu",
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
        "topologyKey": "topology.kubernetes.io/rack",
        "priorityClass": "high",
        "runtimeClass": "nvidia",
    },
    "network": {
        "fabric": "RDMA",
        "rdma": {"resource": "rdma/roce_gdr", "count": 2, "gidIndex": 3},
        "networks": ["llm/rail0"],
        "memlock": "NRI",
    },
    "endpoint": {"timeoutSeconds": 60, "visibility": "ClusterLocal"},
    "telemetry": {"otlpEndpoint": "http://collector:4317", "samplingRatio": 0.5, "podMonitor": "Off"},
    "tls": {"secret": "certificates"},
    "networkPolicy": "Disabled",
    "suspend": False,
}
SCALING = {"minReplicas": 1, "maxReplicas": 3, "scaleInSeconds": 60}
SCALED = {
    **FULL,
    "prefill": {**ROLE, "scaling": {**SCALING, "queuedTokens": 100, "prometheus": PROMETHEUS}},
    "decode": {
        "replicas": 2,
        "scaling": {**SCALING, "kvShare": 0.5, "stallShare": 0.2, "prometheus": {"address": "http://prometheus:9090"}},
    },
    "tls": {"issuer": {"name": "ca", "kind": "Issuer", "group": "cert-manager.io"}},
}
ON_HOST = {
    **FULL,
    "prefill": {"replicas": 2},
    "staging": {**FULL["staging"], "image": "staging:1", "ssd": {"size": "1Ti", "hostPath": "/mnt/nvme"}},
}
HANDED_OVER = {
    **FULL,
    "prefill": {"replicas": 2},
    "staging": {"memory": "64Gi", "hugePages": "2Mi", "replacement": "HandOver"},
}
CLAIMED = {
    **FULL,
    "prefill": {"replicas": 2},
    "placement": {
        "claim": {"gpuClass": "gpu.nvidia.com", "rdmaClass": "roce", "same": "resource.kubernetes.io/pcieRoot"}
    },
}
BY_PROFILE = {key: value for key, value in FULL.items() if key != "network"} | {
    "profile": {"name": "h100", "update": "Pinned"}
}
TEXTS = {
    "image": "other:2",
    "uri": "pvc://models/other",
    "address": "http://other:9090",
    "otlpEndpoint": "http://other:4317",
    "hostPath": "/mnt/other",
    "directory": "rediss://other:6379",
    "hugePages": "1Gi",
    "gpuResource": "amd.com/gpu",
    "topologyKey": "topology.kubernetes.io/zone",
    "resource": "rdma/other",
    "same": "example.com/numaNode",
    "networks": "llm/rail1",
}
"""Other values of texts that are not names, by the last word of their path."""


def leaves(hint: Any, value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path of every leaf that a spec has, and another value that its schema takes."""
    if is_dataclass(hint):
        for field in fields(hint):
            name = camel(field.name)
            if name in value:
                yield from leaves(optional(hints(hint)[field.name])[0], value[name], (*path, name))  # type: ignore[arg-type]
        return
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        for index, each in enumerate(value):
            yield from leaves(get_args(hint)[0], each, (*path, index))
        return
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    if marks and isinstance(marks[0], SettingsOf):
        for name, known in marks[0].names().items():
            setting = optional(hints(LookaheadConfig)[known])[0]
            if known.endswith("_bytes"):
                yield (*path, name), "16Gi"
            else:
                yield (*path, name), another(setting, (), value[name], name)
        return
    yield path, another(get_args(hint)[0] if marks else hint, marks, value, path[-1])


def another(hint: Any, marks: tuple[Any, ...], value: Any, name: Any) -> Any:
    match get_origin(hint) or hint:
        case kind if kind is Literal:
            return next(each for each in get_args(hint) if each != value)
        case kind if kind is Union:  # a word or a whole number
            return 7
        case kind if kind is bool:
            return not value
        case kind if kind is int:
            (bounds,) = [mark for mark in marks if isinstance(mark, Bounds)] or [Bounds(0, 2**31)]
            return value + 1 if value < bounds.most else value - 1
        case kind if kind is float:
            return value / 2
        case kind if kind is tuple:
            return [*value[:-1], TEXTS.get(name, "another")]
        case kind if kind is str:
            return TEXTS.get(
                name, "48Gi" if value[0].isdigit() and value.endswith("i") else "3" if value[0].isdigit() else "another"
            )
        case _:
            return {**value, next(iter(value)): 4096 if name == "arguments" else "another"}


def changed(spec: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(dict(spec))
    here: Any = made
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    return made


def outcome(spec: Mapping[str, Any]) -> Outcome:
    profile = Profile(generation=1, spec=ProfileSpec(placement=Placement(), network=Network()))
    named = spec.get("profile", {}).get("name")
    facts = Facts(
        now="2026-01-01T00:00:00Z",
        kinds=frozenset({CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT}),
        nodes=(node(),),
        profile=profile if named == "h100" else None,
    )
    return reconcile(service(spec), facts)


def name(path: tuple[Any, ...]) -> str:
    return "spec" + "".join("[]" if isinstance(step, int) else f".{step}" for step in path)


BASES = {
    "full": FULL,
    "scaled": SCALED,
    "on host": ON_HOST,
    "handed over": HANDED_OVER,
    "claimed": CLAIMED,
    "by profile": BY_PROFILE,
}
CASES = {(base, path): value for base, spec in BASES.items() for path, value in leaves(ServiceSpec, spec)}
ELSEWHERE = {"spec.profile.update"} | {
    f"spec.{role}.scaling.{setting}"
    for role, settings in {
        "prefill": ("queuedTokens", "scaleInSeconds"),
    }.items()
    for setting in settings
}
"""Take effect when the profile or a load changes: tests/unit/k8s/test_reconcile.py and test_scaling.py."""


def test_the_cases_are_every_leaf_there_is() -> None:
    every = {row[0] for row in rows(ServiceSpec, "spec")} - {"spec.engine.lookahead"}
    assert {name(path) for _, path in CASES} == every


@pytest.mark.parametrize("base", BASES)
def test_the_specs_that_are_changed_are_accepted(base: str) -> None:
    assert outcome(BASES[base]).apply


@pytest.mark.parametrize(
    ("base", "path"),
    [case for case in CASES if name(case[1]) not in ELSEWHERE],
    ids=lambda it: it if isinstance(it, str) else name(it),
)
def test_a_leaf_takes_effect_or_is_refused(base: str, path: tuple[Any, ...]) -> None:
    before, after = outcome(BASES[base]), outcome(changed(BASES[base], path, CASES[base, path]))
    refused = [
        each
        for each in after.status.conditions
        if each.type in ("Accepted", "ProfileResolved") and each.status == "False"
    ]
    if refused:
        assert path[-1] in refused[0].message or "expected" in refused[0].message
    else:
        assert after.apply != before.apply
