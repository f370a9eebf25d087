"""What summarize means, in plain torch."""

import torch

from oasiskv.kernels.formats import FP8
from oasiskv.kernels.fp8.reference import LARGEST, LEAST_EXPONENT, NAN, power_of_two
from oasiskv.kernels.rows import SummaryLayout


def summary_rows(keys: torch.Tensor, layout: SummaryLayout) -> torch.Tensor:
    """Summarize blocks of keys.

    Args:
        keys: `[..., block_size, head_dim]`.
        layout: Kind of summary.

    Returns:
        `[..., width]` in the dtype of `keys`: `[max | min]`, or `(max + min) / 2` computed in float32.
    """
    numbers = keys.float() if keys.dtype == FP8 else keys
    upper, lower = numbers.amax(-2), numbers.amin(-2)
    if layout.kind == "minmax":
        return torch.cat([upper, lower], -1).to(keys.dtype)
    return ((upper.float() + lower.float()) / 2).to(keys.dtype)


def fp8_rows(keys: torch.Tensor, layout: SummaryLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Summarize blocks of keys as fp8.

    A row has a scale, the least power of two with which its largest number is at most 448. The largest key is rounded
    up and the least one down, to the next number of that scale: off by at most 1/8 of itself, or 2 ** -9 of the scale
    where that is more. A midpoint is rounded to nearest: half of that. What is not finite becomes NaN and decides no
    scale: such a block has no bound.

    Args:
        keys: `[..., block_size, head_dim]`.
        layout: Kind of summary.

    Returns:
        Bytes of the numbers, `uint8[..., width]`, and exponents of the scales, `uint8[...]`, as in a float32.
    """
    rows = summary_rows(keys.float(), layout)
    size = torch.where(rows.isfinite(), rows.abs(), 0.0)
    fraction, exponent = torch.frexp(size.amax(-1))  # largest = fraction * 2 ** exponent, fraction from 0.5 to 1
    exponent = exponent - 9 + (fraction > LARGEST / 512).int()
    exponent = torch.where(fraction > 0, exponent.clamp(min=LEAST_EXPONENT), LEAST_EXPONENT)
    scaled = torch.where(rows.isfinite(), rows, 0.0) * power_of_two(-exponent)[..., None]
    numbers = scaled.to(torch.float8_e4m3fn)
    codes = numbers.view(torch.uint8).int()
    if layout.kind == "minmax":
        is_upper = torch.arange(layout.width, device=keys.device) < layout.head_dim
        # A number far below its scale may become 0 when it is scaled, but its bound must not.
        found, is_zero = numbers.float(), numbers.float() == 0
        is_inside = torch.where(is_upper, found < scaled, found > scaled)
        is_inside |= is_zero & torch.where(is_upper, rows > 0, rows < 0)
        # Away from zero is the next code, towards it the one before.
        codes += torch.where(is_inside, torch.where((codes < 128) == is_upper, 1, -1), 0)
    codes = torch.where(rows.isfinite(), codes, NAN)
    return codes.to(torch.uint8), (exponent + 127).to(torch.uint8)


def widen_rows(numbers: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Turn what `fp8_rows` returned into `float32[..., width]`."""
    return numbers.view(torch.float8_e4m3fn).float() * power_of_two(exponents.int() - 127)[..., None]


def _places(pages: torch.Tensor, layout: SummaryLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all pages, `[num_pages, num_kv_heads, rows_per_page, width]`, and the exponents of fp8 rows.

    Both share the memory of the pages; of rows in the dtype of the cache the exponents are empty.
    """
    heads = pages.view(*pages.shape[:2], -1)
    if layout.is_fp8:
        heads = heads.view(torch.uint8)
    first = layout.rows_per_page * layout.width
    exponents = heads[..., first : first + layout.rows_per_page * layout.is_fp8]
    return heads[..., :first].view(*pages.shape[:2], layout.rows_per_page, layout.width), exponents


def read_rows(pages: torch.Tensor, page_ids: torch.Tensor, num_blocks: int, layout: SummaryLayout) -> torch.Tensor:
    """Return the summaries of a request's first blocks, those of fp8 with their scales.

    Args:
        pages: Where summary pages lie, `[n, num_kv_heads, block_size, 2 * head_dim]`.
        page_ids: Those of the request, in order.
        num_blocks: Its blocks.
        layout: Kind and place of summaries.

    Returns:
        `float32[num_kv_heads, num_blocks, width]`.
    """
    held = page_ids[: layout.num_pages(num_blocks)].long()
    rows, exponents = (part[held].transpose(0, 1).flatten(1, 2)[:, :num_blocks] for part in _places(pages, layout))
    if not layout.is_fp8:
        return rows.float()
    return widen_rows(rows, exponents)


def summarize(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    first_block: int,
    layout: SummaryLayout,
) -> None:
    """Write the summaries of consecutive blocks of one request; see `op.summarize`."""
    keys = kv_cache[block_ids.long(), :, :, : layout.head_dim]  # [n, H, B, D]
    index = torch.arange(first_block, first_block + len(block_ids), device=keys.device)
    page, row = page_ids[index // layout.rows_per_page].long(), index % layout.rows_per_page
    rows, exponents = _places(pages, layout)
    if layout.is_fp8:
        rows[page, :, row], exponents[page, :, row] = fp8_rows(keys, layout)
    else:
        rows[page, :, row] = summary_rows(keys, layout)
