"""Units between host memory and the engine's blocks, both ways."""

from oasiskv.kernels.transfer.op import store, transfer

__all__ = ["store", "transfer"]
