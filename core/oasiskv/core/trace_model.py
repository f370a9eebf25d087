"""Makes selection traces that no model made: blocks get random scores that move, and every KV head takes the best.

A block's score in a layer and step is a sum of independent parts: what it always has, a part that all heads share and
that wanders over many steps, noise of the step, and a smaller own part of each head. Now and then a head also names
some block for one step alone. The settings in `FITS` were found by trial, so that published figures come out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import ConfigError
from oasiskv.core.trace import SelectionTrace

BLOCK_SIZE = 16
NUM_KV_HEADS = 8
BUDGET_BLOCKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A length of prompt, and how scores move there; widths are standard deviations."""

    num_tokens: int
    """Tokens of the prompt."""
    lasting: float = 0.5
    """Width of the part that never changes and that all heads share."""
    wandering: float = 0.8
    """Width of the part that wanders and that all heads share."""
    wander_steps: float = 1000.0
    """Steps after which the wandering part has forgotten most of where it was."""
    noise: float
    """Width of a step's noise that all heads share."""
    head: float
    """Width of a head's own lasting part."""
    head_noise: float
    """Width of a head's own noise."""
    flashes: float
    """Blocks that a head names for one step alone, on average."""
    flash_height: float = 0.015
    """How far above the least score that is selected they come, at most."""
    published: tuple[tuple[str, float], ...] = ()
    """Fields of `TraceStats` and what the publication says of them, for a budget of 128 of 16 tokens, 8 KV heads and
    2,048 steps."""


# arXiv 2608.08097: bytes per request of its Fig. 14, divided by the 2.25 MiB that a block of Qwen3-8B has in 36 layers,
# and the union at 32K and the drift of a step, which it states.
FITS = {
    "24k": Fit(
        num_tokens=24 * 1024,
        noise=0.11,
        head=0.27,
        head_noise=0.06,
        flashes=0.05,
        published=(("first_union", 237), ("touched", 237 + 924)),
    ),
    "32k": Fit(
        num_tokens=32 * 1024,
        noise=0.09,
        head=0.185,
        head_noise=0.06,
        flashes=0.065,
        published=(("first_union", 211), ("drift", 17), ("touched", 211 + 1151)),
    ),
}


def generate_trace(name: str, *, num_layers: int, num_steps: int, seed: int) -> SelectionTrace:
    """Make a trace.

    Args:
        name: One of `FITS`.
        num_layers: Layers, each made on its own.
        num_steps: Decode steps.
        seed: Of all random numbers; the same seed makes the same trace.

    Raises:
        ConfigError: There is no such fit, or a number is below 1.
    """
    if name not in FITS:
        raise ConfigError(f"fit: expected one of {', '.join(FITS)}, got {name!r}")
    for what, value in (("layers", num_layers), ("steps", num_steps)):
        if value < 1:
            raise ConfigError(f"{what}: expected at least 1, got {value}")
    fit = FITS[name]
    blocks = np.zeros((num_steps + 1, num_layers, NUM_KV_HEADS, BUDGET_BLOCKS), np.uint16)
    for layer, source in enumerate(np.random.SeedSequence(seed).spawn(num_layers)):
        _fill(blocks[:, layer], fit, np.random.default_rng(source))
    return SelectionTrace(
        num_tokens=fit.num_tokens,
        block_size=BLOCK_SIZE,
        num_sinks=1,
        source=f"generated to fit {name}, seed {seed}",
        blocks=blocks,
    )


def _fill(blocks: NDArray[np.uint16], fit: Fit, random: np.random.Generator) -> None:
    """Select for one layer.

    Args:
        blocks: Out, `uint16[num_steps + 1, num_kv_heads, budget_blocks]`.
        fit: How scores move.
        random: Where all numbers come from.
    """
    num_steps, num_heads, budget = blocks.shape
    most = (fit.num_tokens + num_steps) // BLOCK_SIZE + 1

    def draw(width: float, *size: int) -> NDArray[np.float32]:
        return np.float32(width) * random.standard_normal(size, dtype=np.float32)

    lasting = draw(fit.lasting, most) + draw(fit.head, num_heads, most)
    wandering = draw(fit.wandering, most)
    keeps = np.float32(np.exp(-1 / fit.wander_steps))
    fresh = fit.wandering * float(np.sqrt(1 - keeps**2))
    for step in range(num_steps):
        num_complete = (fit.num_tokens + max(0, step - 1)) // BLOCK_SIZE
        wandering = keeps * wandering + draw(fresh, most)
        scores = lasting + wandering + draw(fit.noise, most) + draw(fit.head_noise, num_heads, most)
        scores = scores[:, :num_complete]
        least = np.partition(scores, -budget, axis=1)[:, -budget]
        for head in range(num_heads):
            count = random.poisson(fit.flashes)
            named = random.integers(0, num_complete, count)
            height = least[head] + np.float32(fit.flash_height) * random.random(count, dtype=np.float32)
            scores[head, named] = np.maximum(scores[head, named], height)
        scores[:, 0] = np.inf  # the sink block
        best = np.argpartition(-scores, budget, axis=1)[:, :budget]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        blocks[step] = np.take_along_axis(best, order, 1)
