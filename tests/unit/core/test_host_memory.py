"""Sizes of host pools, and limits read from made-up control group trees."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.core.host_memory import HostPoolConfig, MemoryLimit, check_fits, host_memory_limit, size

GIB = 2**30
SHAPE: dict[str, Any] = {"num_layers": 36, "num_kv_heads": 8, "block_size": 16, "head_dim": 128, "dtype_bytes": 2}


def write_tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Write files below `root` and return its control group mount and its process file system."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "cgroup", root / "proc"


def limit_of(max_bytes: int | None, mem_total_bytes: int | None = None) -> MemoryLimit:
    return MemoryLimit(max_bytes=max_bytes, source="cgroup memory.max", mem_total_bytes=mem_total_bytes)


def test_a_unit_of_16_tokens_of_128_in_bf16_is_8_kib() -> None:
    config = HostPoolConfig(num_blocks=10, **SHAPE)
    assert config.unit_bytes == 8 * 1024
    assert config.block_bytes == 36 * 8 * 8 * 1024
    assert config.total_bytes == 10 * 36 * 8 * 8 * 1024


@pytest.mark.parametrize(("num_kv_heads", "scale_bytes"), [(1, 128), (8, 128), (16, 128), (17, 256)])
def test_fp8_units_take_half_of_bf16_and_their_scales_whole_lines(num_kv_heads: int, scale_bytes: int) -> None:
    config = HostPoolConfig(num_blocks=10, **(SHAPE | {"dtype_bytes": 1, "num_kv_heads": num_kv_heads}))
    assert config.unit_bytes == 4 * 1024
    assert config.part_bytes == num_kv_heads * 4 * 1024 + scale_bytes
    assert config.total_bytes == 10 * 36 * config.part_bytes


def test_fp8_units_that_are_no_whole_lines_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^block_size: expected fp8 units of a multiple of 128 bytes, got 16 tokens of 6"
    ):
        HostPoolConfig(**(SHAPE | {"num_blocks": 1, "dtype_bytes": 1, "head_dim": 3}))


@pytest.mark.parametrize("field", ["num_blocks", *SHAPE])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_field_that_is_no_positive_integer_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: expected a positive integer, got {value}$"):
        HostPoolConfig(**({"num_blocks": 1, **SHAPE} | {field: value}))


def test_an_element_of_three_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dtype_bytes: expected one of \(1, 2, 4\), got 3$"):
        HostPoolConfig(**({"num_blocks": 1, **SHAPE} | {"dtype_bytes": 3}))


def test_a_pool_beyond_the_address_space_is_refused() -> None:
    block_bytes = HostPoolConfig(num_blocks=1, **SHAPE).block_bytes
    assert HostPoolConfig(num_blocks=sys.maxsize // block_bytes, **SHAPE).total_bytes <= sys.maxsize
    with pytest.raises(ConfigError, match=r"^num_blocks: expected a pool of at most 9223372036854775807 bytes, got"):
        HostPoolConfig(num_blocks=sys.maxsize // block_bytes + 1, **SHAPE)


@pytest.mark.parametrize(("extra_bytes", "num_blocks"), [(0, 7), (1, 7), (-1, 6)])
def test_a_byte_budget_gives_the_most_blocks_that_fit(extra_bytes: int, num_blocks: int) -> None:
    block_bytes = HostPoolConfig(num_blocks=1, **SHAPE).block_bytes
    config = HostPoolConfig.from_bytes(7 * block_bytes + extra_bytes, **SHAPE)
    assert config == HostPoolConfig(num_blocks=num_blocks, **SHAPE)


@pytest.mark.parametrize("pool_bytes", [-1, 0, 36 * 8 * 8 * 1024 - 1])
def test_a_byte_budget_below_one_block_is_refused(pool_bytes: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^host_pool_bytes: expected at least one block of 2359296 bytes, got {pool_bytes}$"
    ):
        HostPoolConfig.from_bytes(pool_bytes, **SHAPE)


@pytest.mark.parametrize("tightest", ["", "/pod", "/pod/worker"])
def test_the_tightest_group_of_version_2_on_the_way_up_counts(tmp_path: Path, tightest: str) -> None:
    files = {f"cgroup{name}/memory.max": f"{9 * GIB}\n" for name in ("", "/pod", "/pod/worker", "/pod/other")}
    files["cgroup/pod/other/memory.max"] = f"{1 * GIB}\n"
    files[f"cgroup{tightest}/memory.max"] = f"{3 * GIB}\n"
    files["proc/self/cgroup"] = "0::/pod/worker\n"
    limit = host_memory_limit(*write_tree(tmp_path, files))
    assert (limit.max_bytes, limit.source) == (3 * GIB, "cgroup memory.max")


def test_a_group_of_version_2_without_limit_gives_none(tmp_path: Path) -> None:
    files = {"cgroup/pod/memory.max": "max\n", "proc/self/cgroup": "0::/pod\n", "proc/meminfo": "MemTotal: 100 kB\n"}
    assert host_memory_limit(*write_tree(tmp_path, files)) == MemoryLimit(
        max_bytes=None, source="no limit", mem_total_bytes=102_400
    )


@pytest.mark.parametrize("path", ["/", "/kubepods/pod7/outside/of/the/container", "/../../elsewhere"])
def test_a_container_reads_the_limit_at_the_root_of_its_mount(tmp_path: Path, path: str) -> None:
    files = {"cgroup/memory.max": f"{2 * GIB}\n", "memory.max": "1\n", "proc/self/cgroup": f"0::{path}\n"}
    assert host_memory_limit(*write_tree(tmp_path, files)).max_bytes == 2 * GIB


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_the_limit_of_version_1_counts_on_the_way_up(tmp_path: Path, controllers: str) -> None:
    files = {
        "proc/self/cgroup": f"9:name=systemd:/\n4:{controllers}:/job:7/step\n1:cpuset:/\n0::/\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/memory/job:7/memory.limit_in_bytes": f"{5 * GIB}\n",
        "cgroup/memory/job:7/step/memory.limit_in_bytes": "9223372036854710272\n",
    }
    limit = host_memory_limit(*write_tree(tmp_path, files))
    assert (limit.max_bytes, limit.source) == (5 * GIB, "cgroup memory.limit_in_bytes")


def test_a_group_of_version_1_without_limit_gives_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert host_memory_limit(*write_tree(tmp_path, files)).max_bytes is None


def test_version_2_beside_version_1_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a\n0::/b\n",
        "cgroup/memory/a/memory.limit_in_bytes": f"{5 * GIB}\n",
        "cgroup/unified/b/memory.max": f"{4 * GIB}\n",
    }
    assert host_memory_limit(*write_tree(tmp_path, files)).max_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("user_limit_bytes", "expected"),
    [(2 * GIB, (2 * GIB, "host_limit_bytes")), (4 * GIB, (3 * GIB, "cgroup memory.max"))],
)
def test_the_users_own_number_counts_where_it_is_tighter(
    tmp_path: Path, user_limit_bytes: int, expected: tuple[int, str]
) -> None:
    tree = write_tree(tmp_path, {"cgroup/memory.max": f"{3 * GIB}\n", "proc/self/cgroup": "0::/\n"})
    limit = host_memory_limit(*tree, user_limit_bytes=user_limit_bytes)
    assert (limit.max_bytes, limit.source) == expected


def test_a_host_without_control_groups_has_the_users_limit_or_none(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, {})
    assert host_memory_limit(*tree).max_bytes is None
    assert host_memory_limit(*tree, user_limit_bytes=7).max_bytes == 7


def test_this_host_can_be_read() -> None:
    limit = host_memory_limit()
    assert limit.max_bytes is None or limit.max_bytes > 0
    assert limit.mem_total_bytes is not None
    assert limit.mem_total_bytes > 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1 bytes"),
        (1024, "1.0 KiB"),
        (16 * 2**10, "16.0 KiB"),
        (900 * 2**10, "0.9 MiB"),
        (2**20, "1.0 MiB"),
        (1000 * GIB, "1000.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_written_in_a_unit_that_fits_them(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_pools_over_the_limit_are_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError) as error:
        check_fits(4 * GIB, limit_of(24 * GIB), num_processes=8, others={"weights": int(1.2 * GIB)})
    assert str(error.value) == (
        "host_pool_bytes: 8 processes x 4.0 GiB + 1.2 GiB weights = 33.2 GiB exceed the limit 24.0 GiB "
        "(cgroup memory.max)"
    )


def test_one_pool_over_the_limit_is_refused_without_a_sum() -> None:
    with pytest.raises(ConfigError) as error:
        check_fits(4 * GIB, limit_of(300 * 2**20))
    assert str(error.value) == "host_pool_bytes: 4.0 GiB exceed the limit 300.0 MiB (cgroup memory.max)"


@pytest.mark.parametrize("max_bytes", [None, 33 * GIB])
def test_pools_up_to_the_limit_fit(max_bytes: int | None, caplog: pytest.LogCaptureFixture) -> None:
    check_fits(4 * GIB, limit_of(max_bytes, mem_total_bytes=33 * GIB), num_processes=8, others={"weights": GIB})
    assert caplog.records == []


def test_more_than_the_machine_reports_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_fits(4 * GIB, limit_of(None, mem_total_bytes=31 * GIB), num_processes=8)
    assert [record.getMessage() for record in caplog.records] == [
        "host_pool_bytes: 8 processes x 4.0 GiB = 32.0 GiB exceed the 31.0 GiB of memory that the machine reports "
        "(MemTotal); going on, since some hosts add memory as it is touched"
    ]
