"""Selection traces: which blocks each (step, layer, KV head) of one request selects, in a file of a fixed format.

The file is a NumPy archive (`.npz`, compressed, nothing pickled) with two members:

- `about`: `uint8[n]`, UTF-8 JSON: `format`, `version`, and the fields of `SelectionTrace` but `blocks`.
- `blocks`: `<u2[num_steps + 1, num_layers, num_kv_heads, budget_blocks]`.
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import ConfigError

FORMAT = "oasiskv-trace"
VERSION = 1
MAX_TRACE_BYTES = 512 * 2**20
"""Most bytes of a trace in memory."""

MAX_ABOUT_BYTES = 2**16
FIELDS = ("num_tokens", "block_size", "num_sinks", "source")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelectionTrace:
    """What one request selected, step by step."""

    num_tokens: int
    """Tokens of the prompt: those whose K and V were there when the request became sparse."""

    block_size: int
    """Tokens per block."""

    num_sinks: int
    """First blocks that every selection names."""

    source: str
    """Where it comes from: a model and what it read, or a generator and its seed."""

    blocks: NDArray[np.uint16]
    """`[num_steps + 1, num_layers, num_kv_heads, budget_blocks]`: the first working set, in no order, then what each
    decode step predicts for the next one, best first."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A value is out of its range, or a selection is none; the message begins with the field's name.
        """
        for name, least in (("num_tokens", 1), ("block_size", 1), ("num_sinks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected an integer of at least {least}, got {value!r}")
        if not isinstance(self.source, str) or not self.source:
            raise ConfigError(f"source: expected a text that is not empty, got {self.source!r}")
        blocks = self.blocks
        if blocks.dtype != np.dtype("<u2") or blocks.ndim != 4 or blocks.shape[0] < 2 or 0 in blocks.shape:
            raise ConfigError(
                f"blocks: expected uint16[steps + 1, layers, heads, budget], got {blocks.dtype}{blocks.shape}"
            )
        if blocks.nbytes > MAX_TRACE_BYTES:
            raise ConfigError(f"blocks: expected at most {MAX_TRACE_BYTES} bytes, got {blocks.nbytes}")
        for step, chosen in enumerate(blocks):
            ordered = np.sort(chosen, axis=-1)
            num_complete = self.num_complete(step)
            has_sinks = (ordered[..., : self.num_sinks] == np.arange(self.num_sinks)).all()
            if (ordered[..., 1:] == ordered[..., :-1]).any() or int(ordered.max()) >= num_complete or not has_sinks:
                raise ConfigError(
                    f"blocks: expected distinct blocks below {num_complete} with the first {self.num_sinks} among "
                    f"them, got others in step {step}"
                )

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return len(self.blocks) - 1

    @property
    def num_layers(self) -> int:
        """Layers."""
        return int(self.blocks.shape[1])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.blocks.shape[2])

    @property
    def budget_blocks(self) -> int:
        """Blocks that a selection names."""
        return int(self.blocks.shape[3])

    @property
    def num_prompt_blocks(self) -> int:
        """Complete blocks of the prompt."""
        return self.num_tokens // self.block_size

    def num_complete(self, step: int) -> int:
        """Return how many blocks are complete when a step selects; step 0 is the first working set."""
        return (self.num_tokens + max(0, step - 1)) // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """What a trace is like; means over layers, and where it says so over steps and KV heads."""

    num_steps: int
    num_layers: int
    num_kv_heads: int
    budget_blocks: int
    num_prompt_blocks: int
    first_union: float
    """Blocks that some head of a layer selects first: what a partial handover brings."""
    union: float
    """Blocks that some head of a layer selects in a step."""
    drift: float
    """Blocks of a head's selection that the step before did not select."""
    reuse: float
    """Share of a head's selection that the step before selected too."""
    touched: float
    """Blocks of the prompt that some head of a layer selects in any step."""
    touched_share: float
    """The same as a share of the prompt's blocks."""


def trace_stats(trace: SelectionTrace) -> TraceStats:
    """Count what a trace selects."""
    width = trace.num_complete(trace.num_steps)
    touched = np.zeros((trace.num_layers, width), bool)
    before: NDArray[np.bool_] | None = None
    unions, drifts = list[float](), list[float]()
    for chosen in _masks(trace, width):
        by_layer = chosen.any(1)
        unions.append(float(by_layer.sum(-1).mean()))
        touched |= by_layer
        if before is not None:
            drifts.append(float((chosen & ~before).sum(-1).mean()))
        before = chosen
    drift = float(np.mean(drifts))
    num_touched = float(touched[:, : trace.num_prompt_blocks].sum(-1).mean())
    return TraceStats(
        num_steps=trace.num_steps,
        num_layers=trace.num_layers,
        num_kv_heads=trace.num_kv_heads,
        budget_blocks=trace.budget_blocks,
        num_prompt_blocks=trace.num_prompt_blocks,
        first_union=unions[0],
        union=float(np.mean(unions)),
        drift=drift,
        reuse=1 - drift / trace.budget_blocks,
        touched=num_touched,
        touched_share=num_touched / trace.num_prompt_blocks,
    )


def save_trace(trace: SelectionTrace, path: Path) -> None:
    """Write a trace; a file that was there is replaced when the new one is whole.

    Raises:
        OSError: It cannot be written.
    """
    about = {"format": FORMAT, "version": VERSION} | {name: getattr(trace, name) for name in FIELDS}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.tmp")
    with fresh.open("wb") as file:
        np.savez_compressed(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), blocks=trace.blocks)
    fresh.replace(path)


def load_trace(path: Path) -> SelectionTrace:
    """Read a trace.

    Raises:
        ConfigError: It is no trace, of another version, too large, or says what cannot be.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        if sizes.get("about.npy", MAX_ABOUT_BYTES + 1) > MAX_ABOUT_BYTES:
            raise ConfigError(f"trace: expected a file of the format {FORMAT}, got {path}")
        with np.load(path, allow_pickle=False) as members:
            about = json.loads(members["about"].tobytes())
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise ConfigError(f"trace: expected a file of the format {FORMAT}, got {path}")
            if about.get("version") != VERSION:
                raise ConfigError(f"trace: expected version {VERSION} in {path}, got {about.get('version')!r}")
            if sizes.get("blocks.npy", 0) > MAX_TRACE_BYTES + MAX_ABOUT_BYTES:
                raise ConfigError(f"trace: expected at most {MAX_TRACE_BYTES} bytes, got {sizes['blocks.npy']}")
            blocks = members["blocks"]
        fields = {name: about[name] for name in FIELDS}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as cause:
        raise ConfigError(f"trace: expected a file of the format {FORMAT}, got {path} ({cause})") from cause
    return SelectionTrace(blocks=blocks, **fields)


def _masks(trace: SelectionTrace, width: int) -> Iterator[NDArray[np.bool_]]:
    """Yield `bool[num_layers, num_kv_heads, width]` of every selection: which blocks it names."""
    for chosen in trace.blocks:
        mask = np.zeros((*chosen.shape[:2], width), bool)
        np.put_along_axis(mask, chosen.astype(np.intp), True, -1)
        yield mask
