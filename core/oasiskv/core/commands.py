"""What the scheduler's side tells every worker with each step."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that begins sparse: its KV was computed elsewhere and lies in staging."""

    lease: str
    """What the blocks are read under; a text that the workers' way to staging understands."""

    num_tokens: int
    """Tokens whose K and V are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommands:
    """Orders for one step, to be carried out in the order of the fields, before the step's forward pass."""

    released: tuple[str, ...] = ()
    """Requests whose blocks, engine's and host's, may belong to others from now on."""

    host_blocks: dict[str, list[int]] = field(default_factory=dict)
    """Host blocks given to a request since the last step; they follow those it has."""

    stage: dict[str, str] = field(default_factory=dict)
    """Requests whose KV goes to staging as it is stored, and at their switch what else a handover needs; with the lease
    that the blocks are written under."""

    store: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First block and end of the blocks to write through: all are final. Only requests of this step."""

    switch: dict[str, int] = field(default_factory=dict)
    """Requests that become sparse now, with the number of their complete blocks. Only requests of this step."""

    admit: dict[str, Admission] = field(default_factory=dict)
    """Requests that begin now, sparse, with KV from staging. Only requests of this step."""
