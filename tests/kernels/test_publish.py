from importlib import import_module

import pytest
import torch

from oasiskv.core.errors import ConfigError
from oasiskv.kernels.publish import publish
from oasiskv.kernels.publish import reference as reference_module
from oasiskv.kernels.rows import Row
from oasiskv.kernels.testing import generator


def step(device: str, dtype: torch.dtype, num_rows: int) -> dict[str, torch.Tensor]:
    """Arguments of one publication: queries are columns of a wider projection, as in a model."""
    random = generator(num_rows)
    projection = torch.randn(2 * num_rows + 1, 3, 5, 24, generator=random).to(device, dtype)
    return {
        "query": projection[:, 0],
        "query_rows": torch.randint(0, 2 * num_rows + 1, (num_rows,), generator=random).int().to(device),
        "slots": torch.randperm(num_rows + 2, generator=random)[:num_rows].int().to(device),
        "rows": torch.randint(-1, 99, (num_rows, len(Row)), generator=random).int().to(device),
        "published_query": torch.full((num_rows + 2, 5, 24), float("nan"), device=device, dtype=dtype),
        "published_rows": torch.full((num_rows + 3, len(Row)), -7, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_publish_copies_each_row_s_query_to_its_slot_and_the_rows_in_order(
    num_rows: int, device: str, dtype: torch.dtype, implementation: str
) -> None:
    arguments = step(device, dtype, num_rows)
    run = reference_module if implementation == "reference" else import_module("oasiskv.kernels.publish.kernel")
    run.publish(**arguments)
    written = set()
    for row, (source, slot) in enumerate(
        zip(arguments["query_rows"].tolist(), arguments["slots"].tolist(), strict=True)
    ):
        assert torch.equal(arguments["published_query"][slot], arguments["query"][source])
        assert torch.equal(arguments["published_rows"][row], arguments["rows"][row])
        written.add(slot)
    untouched = [slot for slot in range(num_rows + 2) if slot not in written]
    assert arguments["published_query"][untouched].isnan().all()
    assert (arguments["published_rows"][num_rows:] == -7).all()


def test_publish_refuses_too_few_published_rows(device: str) -> None:
    arguments = step(device, torch.float32, 4)
    arguments["published_rows"] = arguments["published_rows"][:3]
    with pytest.raises(ConfigError, match=r"^published_rows: expected at least 4"):
        publish(**arguments)


def test_publish_refuses_heads_that_do_not_touch(device: str) -> None:
    arguments = step(device, torch.float32, 4)
    arguments["query"] = arguments["query"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ConfigError, match=r"^query: expected"):
        publish(**arguments)
