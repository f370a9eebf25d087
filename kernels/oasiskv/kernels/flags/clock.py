"""A clock on the device for work inside graphs: how long transfers take, and how long a stream waits to join another.

Times are taken by kernels of one warp before and after, and added up in device memory, so that nothing asks the host.
"""

import torch

from oasiskv.kernels.flags import kernel
from oasiskv.kernels.rows import Waited

LEAST_WAIT_NS = 20_000
"""A join that takes less found everything done: so long take the kernels of the clock themselves."""


class Clock:
    """Times work on the current stream, each call a launch.

    Args:
        waited: In and out, `int64[num_layers, len(Waited)]` on the device; nobody else writes what the clock does there
            at the same time.
    """

    def __init__(self, waited: torch.Tensor) -> None:
        """Allocate, and load the kernels, so that no capture is the first to do so."""
        self._waited = waited
        self._wait_place = len(waited)
        self._began = torch.zeros(len(waited) + 1, dtype=torch.int64, device=waited.device)
        self._ended = torch.zeros(1, dtype=torch.int64, device=waited.device)
        self.begin(0)
        self.end(0)
        self.begin_wait()
        self.end_wait(0)
        waited.zero_()

    def begin(self, layer: int) -> None:
        """Note that a layer's transfer begins."""
        kernel.note[(1,)](self._began, layer, num_warps=1)

    def end(self, layer: int) -> None:
        """Count the time since a layer's `begin` as that of its transfer; time shared with another counts once."""
        kernel.add_busy[(1,)](
            self._began,
            layer,
            self._ended,
            self._waited,
            COLUMN=Waited.TRANSFER_NANOSECONDS.value,
            COLUMNS=len(Waited),
            num_warps=1,
        )

    def begin_wait(self) -> None:
        """Note that the stream waits from here on."""
        kernel.note[(1,)](self._began, self._wait_place, num_warps=1)

    def end_wait(self, layer: int) -> None:
        """Count the time since `begin_wait` as a wait of a layer, unless it is too short to be one."""
        kernel.add_wait[(1,)](
            self._began,
            self._wait_place,
            self._waited,
            layer,
            LEAST_WAIT_NS,
            PASSES=Waited.PASSES.value,
            NANOSECONDS=Waited.NANOSECONDS.value,
            COLUMNS=len(Waited),
            num_warps=1,
        )
