"""The status of an OasisKVService; the same rules as for `api`."""

from dataclasses import dataclass, field
from typing import Literal

from oasiskv.operator.api import ProfileSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that is true, false or unknown of a service."""

    type: str
    """What."""

    status: Literal["True", "False", "Unknown"]
    """Whether."""

    reason: str
    """Why, in one word for programs."""

    message: str
    """Why, for people, with numbers."""

    last_transition_time: str
    """When `status` last changed."""

    observed_generation: int
    """Generation of the service that this is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """How many pods a role has."""

    desired: int = 0
    """That it shall have."""

    current: int = 0
    """That are there."""

    updated: int = 0
    """Of the newest revision."""

    ready: int = 0
    """That serve."""

    summary: str = ""
    """Ready of desired, for the columns."""

    selector: str = ""
    """Labels of its pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatuses:
    """The pods of each role, of all KV generations together."""

    prefill: RoleStatus = field(default_factory=RoleStatus)
    """Compute prompts."""

    decode: RoleStatus = field(default_factory=RoleStatus)
    """Generate answers."""

    staging: RoleStatus = field(default_factory=RoleStatus)
    """Hold KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """How many pods a role has by its load."""

    replicas: int
    """How many."""

    lower_since: str = ""
    """Since when fewer would do; empty if they would not."""

    message: str = ""
    """Why the number was last changed, with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """The roles whose number of pods the operator decides by their load."""

    prefill: Scaled | None = None
    """None where the spec or KEDA says it."""

    decode: Scaled | None = None
    """None where the spec says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What the service is rendered with, so that no upgrade of the operator changes its pods."""

    spec_hash: str
    """Of the spec for which this was chosen: what differs from defaults, but for numbers of pods."""

    render_version: int
    """Of the operator's rules."""

    profile_generation: int = 0
    """Of the profile; 0 without one."""

    profile: ProfileSpec | None = None
    """What the profile said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """What the cluster has room for."""

    matching_nodes: int = 0
    """Nodes whose labels, taints and resources fit pods with a GPU."""

    wanted_pods: int = 0
    """Pods with a GPU, of all KV generations together."""

    fitting_pods: int = 0
    """How many of them have room, those that run included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """What the operator found and did."""

    observed_generation: int = 0
    """Generation of the service that this is about."""

    operator: str = ""
    """Which operator looks after it: namespace and name of that one's lease."""

    url: str = ""
    """Where clients reach it."""

    kv_generation: str = ""
    """That the service asks for."""

    serving_kv_generation: str = ""
    """That decode was last told to serve; differs while the next one comes up."""

    verified_revision: str = ""
    """Revisions of prefill and of decode between which a checksummed block has crossed, through staging."""

    roles: RoleStatuses = field(default_factory=RoleStatuses)
    """Pods by role."""

    scaling: ScalingStatus = field(default_factory=ScalingStatus)
    """Numbers of pods by load."""

    placement: PlacementStatus = field(default_factory=PlacementStatus)
    """Room in the cluster."""

    pinned: Pin | None = None
    """What the pods are rendered with."""

    conditions: tuple[Condition, ...] = ()
    """What holds."""
