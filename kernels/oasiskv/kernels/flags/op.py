"""Flags in device memory that order two graphs layer by layer, where an event would cost the host time per layer.

Three counts per layer say how often it was handed to the background (READY), selected (PICKED) and transferred (DONE).
Whoever owns a count raises it by one behind its work; whoever depends on it spins until it is ahead of its own. So no
step number has to reach a captured graph. A wait that is not satisfied in time gives up, makes every later wait give up
at once, and leaves its layer in host memory, so that a fault ends in an error and never in a device that hangs.
"""

from enum import IntEnum

import torch
import triton

from oasiskv.kernels.flags import kernel
from oasiskv.kernels.rows import Counter, Waited


class Flag(IntEnum):
    """Columns of the counts of a layer."""

    READY = 0
    """Passes whose query is published and whose attention is over."""
    PICKED = 1
    """Passes whose blocks are selected."""
    DONE = 2
    """Passes whose transfer is over."""


class Flags:
    """The counts of all layers and the launches that raise them and wait for them, each one warp on the current stream.

    Attributes:
        waited: `int64[num_layers, len(Waited)]` on the device.
    """

    def __init__(self, device: torch.device, num_layers: int, timeout_s: float) -> None:
        """Allocate the counts and load the kernels, so that no capture is the first to do so.

        Args:
            device: The GPU.
            num_layers: Layers.
            timeout_s: Longest wait.
        """
        self._counts = torch.zeros(num_layers, len(Flag), dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        # In host memory, so that the host sees it without asking the device: 1 + the layer that was waited for.
        self._told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._fetched = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._timeout_ns = int(timeout_s * 1e9)
        self.waited = torch.zeros(num_layers, len(Waited), dtype=torch.int64, device=device)
        counters = torch.zeros(num_layers, 1, len(Counter), dtype=torch.int64, device=device)
        self.await_done(0, counters)
        for load in (self.publish, self.await_ready, self.pick, self.await_picked, self.finish):
            load(0)

    def publish(self, layer: int) -> None:
        """Hand a layer of this pass to the background."""
        self._raise(layer, Flag.READY)

    def await_done(self, layer: int, counters: torch.Tensor) -> None:
        """Order the stream after the transfer of the layer's last pass.

        Args:
            layer: The layer.
            counters: `int64[num_layers, num_kv_heads, len(Counter)]`.
        """
        kernel.await_done[(1,)](
            self._counts,
            self._failed,
            self._told,
            layer,
            self._timeout_ns,
            self.waited,
            self._fetched,
            counters,
            counters.shape[1],
            COLUMN=Flag.DONE.value,
            OWN=Flag.READY.value,
            COLUMNS=len(Flag),
            COUNTERS=len(Counter),
            FETCHED=Counter.FETCHED.value,
            WAITED=len(Waited),
            SPAN=triton.next_power_of_2(counters.shape[1]),
            num_warps=1,
        )

    def await_ready(self, layer: int) -> None:
        """Order the stream after the layer's attention in the pass whose selection comes next."""
        self._await(layer, Flag.READY, Flag.PICKED)

    def pick(self, layer: int) -> None:
        """Hand the layer's selection to the transfer."""
        self._raise(layer, Flag.PICKED)

    def await_picked(self, layer: int) -> None:
        """Order the stream after the layer's selection in the pass whose transfer comes next."""
        self._await(layer, Flag.PICKED, Flag.DONE)

    def finish(self, layer: int) -> None:
        """Hand the layer to the next pass."""
        self._raise(layer, Flag.DONE)

    def failed_layer(self) -> int | None:
        """Return a layer that was waited for in vain; None if there is none. Asks nothing of the device."""
        told = int(self._told[0])
        return None if told == 0 else told - 1

    def _raise(self, layer: int, flag: Flag) -> None:
        kernel.raise_count[(1,)](self._counts, layer, COLUMN=flag.value, COLUMNS=len(Flag), num_warps=1)

    def _await(self, layer: int, count: Flag, own: Flag) -> None:
        kernel.await_count[(1,)](
            self._counts,
            self._failed,
            self._told,
            layer,
            self._timeout_ns,
            COLUMN=count.value,
            OWN=own.value,
            COLUMNS=len(Flag),
            num_warps=1,
        )
