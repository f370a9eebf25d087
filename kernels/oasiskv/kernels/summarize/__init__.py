"""Summaries of blocks, written into summary pages."""

from oasiskv.kernels.summarize.op import summarize

__all__ = ["summarize"]
