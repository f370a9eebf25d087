"""Number formats: which numbers a cache, the queries beside it and the host's units of it may be."""

import torch

WIDE = (torch.float32, torch.float16, torch.bfloat16)
"""Whose numbers a cache holds as the model computed them."""

FP8 = torch.float8_e4m3fn
"""A cache of fp8: the engine's own numbers, with one scale for all K and one for all V of a layer, which the engine
keeps. Its host units are its bytes. Units of wide caches as fp8 are another thing: they have scales of their own, and
the dtype uint8."""


def wide_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return which dtypes queries may have beside keys of a dtype, or once they are published: any but fp8 for fp8."""
    return WIDE if dtype == FP8 else (dtype,)
