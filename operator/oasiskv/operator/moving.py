"""Moves a staging pod that is handed over off a node that is being emptied, before it is evicted."""

import copy
from dataclasses import replace
from typing import Any

from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.facts import Facts
from oasiskv.operator.names import REVISION, digest, labels, selector
from oasiskv.operator.render import Rendered


def seated(rendered: Rendered, spec: ServiceSpec, facts: Facts) -> Rendered:
    """Return the objects with the staging pod where it can stay.

    A pod on a node that takes no pods any more gets a successor of the same template, which the scheduler puts
    elsewhere, and is handed over to it as at a rollout. Which one is wanted follows from what there is: the one that
    serves, else another of this template, each unless its node is being emptied, else one more.

    Args:
        rendered: What the spec asks for.
        spec: The spec.
        facts: What there is.
    """
    if spec.staging.replacement != "HandOver":
        return rendered
    prefix, _, base = rendered.staging.rpartition("-")
    serving = f"{prefix}-{facts.staging_revisions.get(rendered.kv, base)}"
    there = [name for name in sorted(facts.stagings) if facts.staging_origins.get(name) == base]
    # Objects of earlier operators have no word of their origin; those are never moved ones.
    there += [rendered.staging] if rendered.staging in facts.stagings and rendered.staging not in there else []
    if not there:
        return rendered
    staying = [name for name in there if name not in facts.emptied]
    if serving in staying:
        wanted = serving
    elif staying:
        wanted = staying[0]
    else:
        wanted = f"{prefix}-{digest(base, serving)}"
    return _renamed(rendered, wanted)


def budget(name: str) -> dict[str, Any]:
    """Return the object by which an eviction of a staging pod waits until it has moved."""
    spec = {"maxUnavailable": 0, "selector": {"matchLabels": selector(name, "staging")}}
    metadata = {"name": f"{name}-staging", "labels": labels(name, "staging")}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


def _renamed(rendered: Rendered, name: str) -> Rendered:
    """Return the objects with another name and revision of staging."""
    if name == rendered.staging:
        return rendered
    revision, made = name.rpartition("-")[2], []
    for each in rendered.generation:
        if each["kind"] == "StatefulSet":
            each = copy.deepcopy(each)
            each["metadata"]["name"] = name
            spec = each["spec"]
            for place in (each["metadata"], spec["template"]["metadata"]):
                place["labels"][REVISION] = revision
            spec["selector"]["matchLabels"][REVISION] = revision
        elif each["kind"] == "Service" and REVISION in each["spec"]["selector"]:
            each = copy.deepcopy(each)
            each["spec"]["selector"][REVISION] = revision
        made.append(each)
    return replace(rendered, staging=name, generation=tuple(made))


def node_left(rendered: Rendered, facts: Facts) -> str:
    """Return the node that staging moves off; empty if it does not move."""
    revision = facts.staging_revisions.get(rendered.kv)
    serving = f"{rendered.staging.rpartition('-')[0]}-{revision}"
    return "" if revision is None or serving == rendered.staging else facts.emptied.get(serving, "")
