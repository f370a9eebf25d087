"""How publish runs on a GPU: one program per row."""

import torch
import triton
import triton.language as tl

from oasiskv.kernels.fp8.kernel import codes, number_of
from oasiskv.kernels.rows import Row


@triton.jit
def _publish(
    query,
    query_stride,
    query_rows,
    slots,
    rows,
    published_query,
    published_rows,
    NUMEL: tl.constexpr,
    SPAN: tl.constexpr,
    FIELDS: tl.constexpr,
    FIELD_SPAN: tl.constexpr,
):
    row = tl.program_id(0)
    field = tl.arange(0, FIELD_SPAN)
    values = tl.load(rows + row * FIELDS + field, mask=field < FIELDS)
    tl.store(published_rows + row * FIELDS + field, values, mask=field < FIELDS)
    source = tl.load(query_rows + row).to(tl.int64) * query_stride
    target = tl.load(slots + row).to(tl.int64) * NUMEL
    offset = tl.arange(0, SPAN)
    mask = offset < NUMEL
    content = tl.load(query + source + offset, mask=mask)
    if content.dtype == tl.uint8:
        content = number_of(content, published_query.dtype.element_ty, False)
    tl.store(published_query + target + offset, content, mask=mask)


def publish(
    query: torch.Tensor,
    query_rows: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    published_query: torch.Tensor,
    published_rows: torch.Tensor,
) -> None:
    """Launch it on the current stream; see `op.publish`."""
    if len(rows) == 0:
        return
    numel = query.shape[1] * query.shape[2]
    _publish[(len(rows),)](
        codes(query),
        query.stride(0),
        query_rows,
        slots,
        rows,
        published_query,
        published_rows,
        NUMEL=numel,
        SPAN=triton.next_power_of_2(numel),
        FIELDS=len(Row),
        FIELD_SPAN=triton.next_power_of_2(len(Row)),
        num_warps=4,
    )
