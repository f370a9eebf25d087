"""Which blocks the next step needs."""

from oasiskv.kernels.predict.op import predict

__all__ = ["predict"]
