"""Ordering of two graphs by counts in device memory; needs a GPU."""

from oasiskv.kernels.flags.op import Flags

__all__ = ["Flags"]
