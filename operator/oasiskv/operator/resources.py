"""The kinds that the operator reads and writes, and their paths at the API server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oasiskv.operator.api import GROUP, VERSION
from oasiskv.operator.facts import CERTIFICATE, CLAIM_TEMPLATE, INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT
from oasiskv.operator.names import SERVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind at the API server."""

    kind: str
    api: str
    """Group and version; the version alone for the oldest kinds."""
    plural: str
    selector: str = ""
    """Labels of the objects that the operator looks at."""
    optional: str = ""
    """Name of a kind that not every API server knows."""

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the path of an object, or of all objects of a namespace, or of all."""
        parts = ["apis" if "/" in self.api else "api", self.api]
        parts += ["namespaces", namespace] if namespace is not None else []
        parts += [each for each in (self.plural, name, subresource) if each]
        return "/" + "/".join(parts)


SERVICES = Resource(kind="OasisKVService", api=f"{GROUP}/{VERSION}", plural="oasiskvservices")
PROFILES = Resource(kind="OasisKVProfile", api=f"{GROUP}/{VERSION}", plural="oasiskvprofiles")
PODS = Resource(kind="Pod", api="v1", plural="pods")
NODES = Resource(kind="Node", api="v1", plural="nodes")
EVENTS = Resource(kind="Event", api="events.k8s.io/v1", plural="events")
LEASES = Resource(kind="Lease", api="coordination.k8s.io/v1", plural="leases")

CHILDREN: Mapping[str, Resource] = {
    each.kind: each
    for each in (
        Resource(kind="ConfigMap", api="v1", plural="configmaps", selector=SERVICE),
        Resource(kind="Service", api="v1", plural="services", selector=SERVICE),
        Resource(kind="StatefulSet", api="apps/v1", plural="statefulsets", selector=SERVICE),
        Resource(kind="Deployment", api="apps/v1", plural="deployments", selector=SERVICE),
        Resource(kind="PodDisruptionBudget", api="policy/v1", plural="poddisruptionbudgets", selector=SERVICE),
        Resource(kind="NetworkPolicy", api="networking.k8s.io/v1", plural="networkpolicies", selector=SERVICE),
        Resource(
            kind="InferenceService",
            api="serving.kserve.io/v1beta1",
            plural="inferenceservices",
            selector=SERVICE,
            optional=INFERENCE_SERVICE,
        ),
        Resource(
            kind="ResourceClaimTemplate",
            api="resource.k8s.io/v1",
            plural="resourceclaimtemplates",
            selector=SERVICE,
            optional=CLAIM_TEMPLATE,
        ),
        Resource(
            kind="ScaledObject",
            api="keda.sh/v1alpha1",
            plural="scaledobjects",
            selector=SERVICE,
            optional=SCALED_OBJECT,
        ),
        Resource(
            kind="Certificate",
            api="cert-manager.io/v1",
            plural="certificates",
            selector=SERVICE,
            optional=CERTIFICATE,
        ),
        Resource(
            kind="PodMonitor",
            api="monitoring.coreos.com/v1",
            plural="podmonitors",
            selector=SERVICE,
            optional=POD_MONITOR,
        ),
    )
}
"""By kind: what the operator writes."""


def owner_uid(made: Mapping[str, Any]) -> str | None:
    """Return the uid of the object that controls this one."""
    for reference in made["metadata"].get("ownerReferences", ()):
        if reference.get("controller"):
            return str(reference["uid"])
    return None
