from dataclasses import fields, replace
from typing import Any

import pytest

from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.host_memory import HostPoolConfig

SHAPE = Fingerprint(model_hash="m", dtype="bfloat16", block_size=16, num_layers=3, num_kv_heads=4, head_dim=8)


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_a_difference_is_refused_by_the_name_of_its_field(name: str) -> None:
    others = {"model_hash": "n", "dtype": "float16", "layout": "LHTKV"}
    value: Any = others[name] if name in others else 2 * getattr(SHAPE, name)
    with pytest.raises(UnsupportedError, match=f"^{name}: expected"):
        SHAPE.require(replace(SHAPE, **{name: value}))


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"^dtype: .*; num_layers: "):
        SHAPE.require(replace(SHAPE, dtype="float32", num_layers=2))


def test_equal_fingerprints_agree() -> None:
    SHAPE.require(replace(SHAPE))


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_hash", ""), ("dtype", "int8"), ("block_size", 0), ("num_layers", -1), ("tp_size", 3), ("head_dim", True)],
)
def test_a_field_out_of_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="^(num_kv_heads|" + name + "): expected"):
        replace(SHAPE, **{name: value})


def test_parts_too_large_for_a_message_are_refused() -> None:
    with pytest.raises(ConfigError, match="parts of at most"):
        replace(SHAPE, block_size=2**20)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_the_parts_of_all_ranks_make_up_the_host_block(tp_size: int) -> None:
    rank = HostPoolConfig(
        num_blocks=1, num_layers=3, num_kv_heads=4 // tp_size, block_size=16, head_dim=8, dtype_bytes=2
    )
    shape = replace(SHAPE, tp_size=tp_size)
    assert shape.num_parts == 3 * tp_size
    assert shape.block_bytes == shape.num_parts * shape.part_bytes == tp_size * rank.block_bytes
