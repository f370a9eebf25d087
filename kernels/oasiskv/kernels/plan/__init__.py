"""What all layers of a step share."""

from oasiskv.kernels.plan.op import plan

__all__ = ["plan"]
