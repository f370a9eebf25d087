"""Units as fp8: how numbers are narrowed and widened, and blocks of the engine rounded to what the host holds."""

from oasiskv.kernels.fp8.op import round_blocks

__all__ = ["round_blocks"]
