"""Names, labels and hashes of a service's objects; whoever computes them twice gets the same."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.crds import MAX_NAME
from oasiskv.operator.kinds import differing, write

SERVICE, ROLE, KV = "oasiskv.io/service", "oasiskv.io/role", "oasiskv.io/kv-generation"
REVISION = "oasiskv.io/staging-revision"
"""Of a staging pod that is handed over, and of the one that its Service leads to."""
ORIGIN = "oasiskv.io/staging-template"
"""Annotation of a StatefulSet of staging that is handed over: of which template it is, also where its pod moved."""
ROLES = ("prefill", "decode", "staging")
MAX_LABEL = 63


def digest(*values: object) -> str:
    """Return eight hexadecimal digits that stand for values of JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def kv_generation(spec: ServiceSpec) -> str:
    """Return what must be equal for two pods to exchange KV, and the volume that a StatefulSet cannot change."""
    model, lookahead, ssd = spec.model, spec.engine.lookahead, spec.staging.ssd
    # Who asks for a certificate is no peer of who shows none.
    tls = () if spec.tls is None else (write(spec.tls),)
    # Its staging pods have other names.
    replacement = () if spec.staging.replacement == "InPlace" else (spec.staging.replacement,)
    return digest(
        model.hash,
        model.dtype,
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        spec.engine.block_size,
        lookahead.get("budget_blocks"),
        lookahead.get("summary"),
        lookahead.get("summary_dtype"),
        ssd and (ssd.size, ssd.storage_class, ssd.host_path),
        *tls,
        *replacement,
    )


def spec_hash(spec: ServiceSpec) -> str:
    """Return what changes when somebody changed more of a spec than numbers of pods.

    A field that a later version adds does not change it, since the field then has its default.
    """
    prefill = replace(spec.prefill, replicas=None, scaling=None)
    decode = replace(spec.decode, replicas=1, scaling=None)
    return digest(differing(replace(spec, prefill=prefill, decode=decode, suspend=False)))


def selector(service: str, role: str, kv: str | None = None) -> dict[str, str]:
    """Return the labels that name pods of a role, of one KV generation or of all."""
    return {SERVICE: service, ROLE: role} | ({KV: kv} if kv else {})


def labels(service: str, role: str, kv: str | None = None) -> dict[str, str]:
    """Return all labels of an object of a role."""
    common = {"app.kubernetes.io/name": "oasiskv", "app.kubernetes.io/managed-by": "oasiskv-operator"}
    return common | {"app.kubernetes.io/instance": service} | selector(service, role, kv)


def selector_text(of: Mapping[str, str]) -> str:
    """Return labels as the scale subresource and kubectl write them."""
    return ",".join(f"{key}={value}" for key, value in sorted(of.items()))


def check_names(name: str, namespace: str) -> None:
    """Refuse a service of whose name some object could not be made.

    Raises:
        ConfigError: It is too long; the message says the longest that is not.
    """
    most = max(0, min(MAX_NAME, MAX_LABEL - len("-predictor-") - len(namespace)))
    if len(name) > most:
        raise ConfigError(f"name: expected at most {most} characters in namespace {namespace}, got {len(name)}")


def owner(service: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference by which the API server deletes an object with its service."""
    return {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "name": service["metadata"]["name"],
        "uid": service["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
