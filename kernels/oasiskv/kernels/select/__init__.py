"""What to fetch and where to put it."""

from oasiskv.kernels.select.op import select

__all__ = ["select"]
