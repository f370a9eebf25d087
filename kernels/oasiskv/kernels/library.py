"""The operations as torch custom ops, `torch.ops.oasiskv.*`, which torch.compile takes as opaque steps."""

from collections.abc import Callable

import torch

from oasiskv.kernels.rows import SummaryLayout

_LIBRARY = torch.library.Library("oasiskv", "DEF")  # type: ignore[no-untyped-call]


def register(schema: str, *, cpu: Callable[..., None], cuda: Callable[..., None]) -> Callable[..., None]:
    """Register an operation that writes its outputs in place, and return what to call.

    A library definition rather than `torch.library.custom_op`: the same for the compiler, cheaper to call.

    Args:
        schema: Name and arguments in torch's notation; `Tensor(a!)` for each that is written.
        cpu: Implementation for tensors in CPU memory.
        cuda: Implementation if any tensor is on a CUDA device (host memory beside it must be pinned).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"oasiskv::{name}", _write_nothing, lib=_LIBRARY)
    operation: Callable[..., None] = getattr(torch.ops.oasiskv, name).default
    return operation


def _write_nothing(*_: object, **__: object) -> None:
    """Stand in for an operation while shapes are traced: it returns nothing and changes no shape."""


def layout_of(cache: torch.Tensor, is_mid: bool, is_fp8: bool) -> SummaryLayout:
    """Return the layout of summaries in a cache; an op's schema carries no layout.

    Args:
        cache: `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`.
        is_mid: Whether the kind is `mid`.
        is_fp8: Whether rows are fp8.
    """
    return SummaryLayout(
        kind="mid" if is_mid else "minmax",
        block_size=cache.shape[2],
        head_dim=cache.shape[3] // 2,
        is_fp8=is_fp8,
        dtype_bytes=cache.element_size(),
    )
