"""Small values from the host to the device, without a wait for either."""

from collections.abc import Sequence

import torch


def upload(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the values as `int32` on the device, behind what its current stream has to do.

    A copy from memory that is not pinned would first wait for the whole stream, and so keep the host from running
    ahead of the device.
    """
    host = torch.tensor(values, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
