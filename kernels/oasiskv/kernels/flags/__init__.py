"""Ordering of two graphs by counts in device memory, and a clock for their work; needs a GPU."""

from oasiskv.kernels.flags.clock import Clock
from oasiskv.kernels.flags.op import Flags

__all__ = ["Clock", "Flags"]
