"""A block that became final joins the working set."""

from oasiskv.kernels.complete.op import complete

__all__ = ["complete"]
