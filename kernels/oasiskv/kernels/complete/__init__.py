"""A block that became final joins the working set, and host memory."""

from oasiskv.kernels.complete.op import complete, keep

__all__ = ["complete", "keep"]
