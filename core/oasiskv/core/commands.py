"""What the scheduler's side tells every worker with each step."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that begins sparse: its KV was computed elsewhere and lies in staging."""

    lease: str
    """What the blocks are read under; a text that the workers' way to staging understands."""

    num_tokens: int
    """Tokens whose K and V are there."""

    block_ids: tuple[int, ...] = ()
    """Its block table: the engine block of every entry that it needs, 0 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Complete blocks at the beginning of a prompt that were computed before and lie in staging."""

    lease: str
    """What the blocks are read under."""

    num_blocks: int
    """Blocks that are there."""

    block_ids: tuple[int, ...] = ()
    """Engine blocks of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommands:
    """Orders for one step, to be carried out in the order of the fields, the last one during the step's pass."""

    released: tuple[str, ...] = ()
    """Requests whose blocks, engine's and host's, may belong to others from now on."""

    admit: dict[str, Admission] = field(default_factory=dict)
    """Requests whose KV begins to come from staging now. They run, sparse, in a step after all of it came."""

    load: dict[str, Prefix] = field(default_factory=dict)
    """Requests whose first blocks begin to come from staging now. They run in a step after all of them came; what they
    stage themselves begins after these blocks."""

    room: dict[str, tuple[int | None, list[int]]] = field(default_factory=dict)
    """Requests whose host blocks for what they fetch are others from now on: how many they keep of those that they
    have, None for all, and those that follow."""

    host_blocks: dict[str, list[int]] = field(default_factory=dict)
    """Host blocks given to a request since the last step; they follow those it has. Those of a request with KV from
    staging are for its blocks after that."""

    stage: dict[str, str] = field(default_factory=dict)
    """Requests whose KV goes to staging as it is stored, and at their switch what else a handover needs; with the lease
    that the blocks are written under."""

    store: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First block and end of the blocks to write through: all are final. Only requests of this step."""

    switch: dict[str, int] = field(default_factory=dict)
    """Requests that become sparse now, with the number of their complete blocks. Only requests of this step."""

    stream: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First block and end of the blocks that become final in this step's pass, of requests whose KV goes to staging.
    Each layer's part of them may go there once the layer is computed; a later `store` names them all the same."""
