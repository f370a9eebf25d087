"""The objects of a service, as server-side apply writes them; the same spec always gives the same objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator import settings
from oasiskv.operator.api import GROUP, VERSION, Network, Placement, Rollout, ServiceSpec
from oasiskv.operator.facts import CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, POD_MONITOR
from oasiskv.operator.kinds import quantity
from oasiskv.operator.names import KV, ORIGIN, REVISION, SERVICE, digest, kv_generation, labels, selector
from oasiskv.operator.pods import Site, claim_template, engine_pod, staging_pod
from oasiskv.operator.scaling import is_kedas, is_kedas_decode

RENDER_VERSION = 1
"""Of the rules in this file and in `pods`. Whoever changes what they make of an old spec adds a version beside them."""

DECODE = "kserve-container"
"""Name of decode's container, which KServe looks for."""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """All objects of a service."""

    kv: str
    """KV generation."""

    revisions: Mapping[str, str]
    """What each role's pods run with, in one word; of prefill and decode."""

    staging: str
    """Name of the StatefulSet of staging."""

    generation: tuple[Object, ...]
    """Staging and prefill: those that exist once per KV generation."""

    decode: tuple[Object, ...]
    """Decode, which is switched from one generation to the next."""

    common: tuple[Object, ...]
    """The rest."""


def render(
    metadata: Mapping[str, Any], spec: ServiceSpec, placement: Placement, network: Network, kinds: frozenset[str]
) -> Rendered:
    """Return the objects of a service, without owner.

    Args:
        metadata: Name and namespace of the service.
        spec: What it says.
        placement: Where pods run, the profile's word included.
        network: How KV moves, the profile's word included.
        kinds: Kinds of others that the API server knows.

    Raises:
        ConfigError: The services would refuse their settings, or memory is too small for them.
    """
    _check_memory(spec)
    if placement.claim is not None and network.rdma is None:
        raise ConfigError("placement.claim: expected it with network.rdma, got another fabric")
    if placement.claim is not None and CLAIM_TEMPLATE not in kinds:
        raise ConfigError(f"placement.claim: expected an API server that knows {CLAIM_TEMPLATE}, got one that does not")
    name, namespace, kv = metadata["name"], metadata["namespace"], kv_generation(spec)
    site = Site(service=name, spec=spec, placement=placement, network=network, kv=kv)
    staging, prefill = f"{name}-staging-{kv}", f"{name}-prefill-{kv}"
    peers = settings.Peers(prefill=f"{prefill}.{namespace}.svc", staging=f"{staging}.{namespace}.svc")
    revisions = {
        # A role's own: a change of one must leave the other's pods alone.
        "prefill": digest(
            kv, settings.prefill_config(spec, peers, ""), engine_pod(site, "prefill", "prefill", "")["containers"]
        ),
        "decode": digest(
            kv, settings.decode_config(spec, peers, ""), engine_pod(site, "decode", DECODE, "")["containers"]
        ),
    }
    texts = {
        "staging": settings.staging_config(spec, network, peers),
        "prefill": settings.prefill_config(spec, peers, revisions["prefill"]),
        "decode": settings.decode_config(spec, peers, revisions["decode"]),
    }
    maps = {role: _config_map(site, role, text) for role, text in texts.items()}
    config = {role: made["metadata"]["name"] for role, made in maps.items()}
    headless = _headless(site, "staging", staging, settings.STAGING_PORT)
    stateful = _stateful_set(site, staging, config["staging"])
    if spec.staging.replacement == "HandOver":
        _tell_apart(name, stateful, headless)
    deployment = _deployment(site, prefill, config["prefill"], kinds)
    service = _inference_service(site, config["decode"])
    generation = [
        *_certificate(site, [peers.staging, peers.prefill, f"{name}-predictor.{namespace}.svc"], kinds),
        maps["staging"],
        headless,
        stateful,
        maps["prefill"],
        _headless(site, "prefill", prefill, settings.PREFILL_PORT),
        deployment,
    ]
    if is_kedas(spec, kinds) and not spec.suspend:
        generation.append(_scaled_object(site, prefill))
    return Rendered(
        kv=kv,
        revisions=revisions,
        staging=stateful["metadata"]["name"],
        generation=tuple(generation),
        decode=(maps["decode"], service),
        common=tuple(_common(site, namespace, kinds)),
    )


def num_prefills(spec: ServiceSpec) -> int:
    """Return how many prefill pods there are at least."""
    if spec.suspend:
        return 0
    if spec.prefill.scaling is not None:
        return spec.prefill.scaling.min_replicas
    return 1 if spec.prefill.replicas is None else spec.prefill.replicas


def _check_memory(spec: ServiceSpec) -> None:
    pool = spec.engine.lookahead.get("host_pool_bytes", 0)
    for role, resources in (("prefill", spec.prefill.resources), ("decode", spec.decode.resources)):
        memory, shared = quantity(resources.memory), quantity(resources.shared_memory)
        if memory <= pool + shared:
            raise ConfigError(
                f"spec.{role}.resources.memory: expected more than the host pool of {pool} and shared memory of"
                f" {shared} bytes, got {memory}"
            )


def _object(site: Site, api: str, kind: str, name: str, role: str | None, kv: bool, spec: Object) -> Object:
    known = labels(site.service, role or "service", site.kv if kv else None)
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": known}, "spec": spec}


def _certificate(site: Site, hosts: list[str], kinds: frozenset[str]) -> list[Object]:
    """Return the Certificate of a KV generation's pods, which all of its roles show."""
    tls, name = site.spec.tls, site.tls_secret
    if tls is None or tls.issuer is None or name is None or CERTIFICATE not in kinds:
        return []
    spec = {
        "secretName": name,
        "dnsNames": hosts,
        "usages": ["server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": {"name": tls.issuer.name, "kind": tls.issuer.kind, "group": tls.issuer.group},
    }
    return [_object(site, "cert-manager.io/v1", "Certificate", name, None, True, spec)]


def _config_map(site: Site, role: str, text: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{site.service}-{role}-{digest(text)}", "labels": labels(site.service, role)},
        "immutable": True,
        "data": {"oasiskv.toml": text},
    }


def _headless(site: Site, role: str, name: str, port: int) -> Object:
    spec = {
        "clusterIP": "None",
        "selector": selector(site.service, role, site.kv),
        "ports": [{"name": "grpc", "port": port, "targetPort": "grpc", "protocol": "TCP"}],
    }
    return _object(site, "v1", "Service", name, role, True, spec)


def _strategy(rollout: Rollout) -> Object:
    numbers = {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable}
    return {"type": "RollingUpdate", "rollingUpdate": numbers}


def _template(site: Site, role: str, pod: Object) -> Object:
    metadata: Object = {"labels": site.labels(role)}
    if annotations := site.annotations(pod["containers"][0]["name"]):
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": pod}


def _stateful_set(site: Site, name: str, config_map: str) -> Object:
    ssd = site.spec.staging.ssd
    spec: Object = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector(site.service, "staging", site.kv)},
        "template": _template(site, "staging", staging_pod(site, config_map)),
    }
    if ssd is not None and ssd.storage_class is not None:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": ssd.storage_class,
            "resources": {"requests": {"storage": ssd.size}},
        }
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "disk"}, "spec": claim}]
        # What it holds can be computed again.
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    return _object(site, "apps/v1", "StatefulSet", name, "staging", True, spec)


def _tell_apart(service: str, stateful: Object, headless: Object) -> None:
    """Give staging a name and label of its template, so that the next template's comes up beside it."""
    revision = digest(stateful["spec"])
    stateful["metadata"]["name"] = f"{service}-staging-{revision}"
    stateful["metadata"]["annotations"] = {ORIGIN: revision}
    for place in (
        stateful["metadata"]["labels"],
        stateful["spec"]["selector"]["matchLabels"],
        stateful["spec"]["template"]["metadata"]["labels"],
        headless["spec"]["selector"],
    ):
        place[REVISION] = revision


def _deployment(site: Site, name: str, config_map: str, kinds: frozenset[str]) -> Object:
    prefill = site.spec.prefill
    spec: Object = {
        "selector": {"matchLabels": selector(site.service, "prefill", site.kv)},
        "strategy": _strategy(prefill.rollout),
        "progressDeadlineSeconds": 3600,  # a large model takes a while to load
        "template": _template(site, "prefill", engine_pod(site, "prefill", "prefill", config_map)),
    }
    # With a ScaledObject the number is KEDA's; two owners would fight.
    if not is_kedas(site.spec, kinds) or site.spec.suspend:
        spec["replicas"] = num_prefills(site.spec)
    return _object(site, "apps/v1", "Deployment", name, "prefill", True, spec)


def _inference_service(site: Site, config_map: str) -> Object:
    spec = site.spec
    predictor = {
        "minReplicas": spec.decode.replicas,
        "maxReplicas": spec.decode.replicas,
        "timeout": spec.endpoint.timeout_seconds,
        "deploymentStrategy": _strategy(spec.decode.rollout),
        "labels": site.labels("decode"),
        **engine_pod(site, "decode", DECODE, config_map),
    }
    if annotations := site.annotations(DECODE):
        predictor["annotations"] = annotations
    group = INFERENCE_SERVICE.partition(".")[2]
    made = _object(site, f"{group}/v1beta1", "InferenceService", site.service, "decode", True, {"predictor": predictor})
    # Standard and none are not KServe's defaults: it would want Knative, and scale by processor use.
    annotations = {f"{group}/deploymentMode": "Standard", f"{group}/autoscalerClass": "none"}
    if spec.suspend:
        annotations[f"{group}/stop"] = "true"
    made["metadata"]["annotations"] = annotations
    if spec.endpoint.visibility == "ClusterLocal":
        made["metadata"]["labels"]["networking.kserve.io/visibility"] = "cluster-local"
    return made


def _scaled_object(site: Site, name: str) -> Object:
    scaling = site.spec.prefill.scaling
    assert scaling is not None
    assert scaling.prometheus is not None
    prometheus = scaling.prometheus
    answers = {
        "serverAddress": prometheus.address,
        "query": prometheus.query,
        "threshold": str(prometheus.threshold),
    }
    spec = {
        "scaleTargetRef": {"name": name},
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "triggers": [{"type": "prometheus", "metadata": answers}],
    }
    return _object(site, "keda.sh/v1alpha1", "ScaledObject", name, "prefill", True, spec)


def _decode_scaler(site: Site, namespace: str) -> Object:
    """Return the ScaledObject of decode, whose target is the service's own scale subresource: KServe's has none."""
    scaling = site.spec.decode.scaling
    assert scaling is not None
    assert scaling.prometheus is not None
    pods = f'{{namespace="{namespace}",pod=~"{site.service}-predictor-.+"}}'
    capacity = f"(oasiskv_decode_kv_capacity_bytes{pods} > 0)"
    # KEDA divides by the threshold for the number of pods, so these are sums over pods.
    queries = {
        f"sum(max by (pod) (oasiskv_decode_kv_bytes{pods} / {capacity}))": scaling.kv_share,
        f"sum(rate(oasiskv_stall_seconds_total{pods}[2m]))": scaling.stall_share,
    }
    address, one_s = scaling.prometheus.address, max(1, min(1800, scaling.scale_in_seconds))
    behavior = {
        "scaleDown": {
            "stabilizationWindowSeconds": scaling.scale_in_seconds,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": one_s}],
        }
    }
    spec = {
        "scaleTargetRef": {"apiVersion": f"{GROUP}/{VERSION}", "kind": "OasisKVService", "name": site.service},
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [
            {
                "type": "prometheus",
                "metadata": {"serverAddress": address, "query": query, "threshold": str(threshold)},
            }
            for query, threshold in queries.items()
        ],
    }
    return _object(site, "keda.sh/v1alpha1", "ScaledObject", f"{site.service}-decode", "decode", False, spec)


def _common(site: Site, namespace: str, kinds: frozenset[str]) -> list[Object]:
    name = site.service
    made = [claim_template(site)] if site.placement.claim is not None else []
    made += [
        _object(
            site,
            "policy/v1",
            "PodDisruptionBudget",
            f"{name}-{role}",
            role,
            False,
            {"maxUnavailable": 1, "selector": {"matchLabels": selector(name, role)}},
        )
        for role in ("prefill", "decode")
    ]
    if is_kedas_decode(site.spec, kinds) and not site.spec.suspend:
        made.append(_decode_scaler(site, namespace))
    if site.spec.network_policy == "Enabled":
        made += _network_policies(site)
    if site.spec.telemetry.pod_monitor == "Auto" and POD_MONITOR in kinds:
        spec = {"selector": {"matchLabels": {SERVICE: name}}, "podMetricsEndpoints": [{"port": "metrics"}]}
        made.append(_object(site, "monitoring.coreos.com/v1", "PodMonitor", name, None, False, spec))
    return made


def _network_policies(site: Site) -> list[Object]:
    name = site.service
    peers = {
        "podSelector": {"matchLabels": {SERVICE: name}},
        "policyTypes": ["Ingress"],
        # All ports: those that UCX listens on are chosen when it starts.
        "ingress": [{"from": [{"podSelector": {"matchLabels": {SERVICE: name}}}]}],
    }
    clients = {
        "podSelector": {"matchLabels": selector(name, "decode")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": port, "protocol": "TCP"} for port in ("http1", "grpc-oip", "grpc-decode")]}],
    }
    metrics = {
        "podSelector": {"matchLabels": {SERVICE: name}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": "metrics", "protocol": "TCP"}]}],
    }
    policies = {"peers": peers, "clients": clients, "metrics": metrics}
    return [
        _object(site, "networking.k8s.io/v1", "NetworkPolicy", f"{name}-{suffix}", None, False, spec)
        for suffix, spec in policies.items()
    ]


def generation_of(made: Mapping[str, Any]) -> str | None:
    """Return the KV generation in the labels of an object; None where it has none."""
    value: str | None = made["metadata"]["labels"].get(KV)
    return value
