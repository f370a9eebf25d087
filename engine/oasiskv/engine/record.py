"""Takes a selection trace from a `Runtime` that decodes."""

import numpy as np
import torch

from oasiskv.core.errors import ConfigError, InvalidRequestError
from oasiskv.core.trace import SelectionTrace
from oasiskv.engine.runtime import Runtime
from oasiskv.kernels.rows import Row


class Recorder:
    """Takes down what the only request of a runtime selects; stands in the place of its `predict`.

    Args:
        runtime: The runtime; it has at most one sparse request at a time.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Take the place of the runtime's `predict`."""
        self._runtime = runtime
        self._predict = runtime.predict
        self._chosen: list[list[torch.Tensor]] = [[] for _ in range(runtime.shape.num_layers)]
        runtime.predict = self  # type: ignore[method-assign]

    def __call__(self, layer: int, rows: torch.Tensor, blocks: torch.Tensor, scores: torch.Tensor) -> None:
        """Predict, and keep what was predicted, best first; before the first step also the first working set."""
        self._predict(layer, rows, blocks, scores)
        live = torch.nonzero(rows[:, Row.REQUEST] >= 0).flatten().tolist()
        if not live:
            return
        if len(live) > 1:
            raise InvalidRequestError(f"requests: expected one at a time in a trace, got {len(live)}")
        chosen = self._chosen[layer]
        if not chosen:
            chosen.append(self._runtime.sets.resident[layer, rows[live[0], Row.REQUEST].long()].clone())
        ordered, by_block = blocks[live[0]].sort(-1)
        best = scores[live[0]].gather(-1, by_block).sort(dim=-1, descending=True, stable=True).indices
        chosen.append(ordered.gather(-1, best))

    def trace(self, num_tokens: int, source: str) -> SelectionTrace:
        """Return what was taken down so far.

        Args:
            num_tokens: Tokens of the prompt.
            source: Which model read what.

        Raises:
            ConfigError: The request was never sparse.
        """
        self._runtime.fence()
        num_steps = min(len(chosen) for chosen in self._chosen)
        if num_steps < 2:
            raise ConfigError("tokens: expected a prompt long enough to become sparse, got one that never was")
        blocks = torch.stack([torch.stack(chosen[:num_steps]) for chosen in self._chosen], 1)
        return SelectionTrace(
            num_tokens=num_tokens,
            block_size=self._runtime.shape.block_size,
            num_sinks=self._runtime.config.sink_blocks,
            source=source,
            blocks=blocks.cpu().numpy().astype(np.uint16),
        )
