"""What a layer hands to its background."""

from oasiskv.kernels.publish.op import publish

__all__ = ["publish"]
