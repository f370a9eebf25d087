"""How much host memory the KV cache takes and how much there is; `oasiskv.engine.host_pool` then takes it."""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Self

from oasiskv.core.errors import ConfigError

logger = logging.getLogger(__name__)

DTYPE_BYTES = (1, 2, 4)

FP8_SCALE_BYTES = 8
"""What an fp8 unit takes beside its numbers: two float32 scales, of K and of V."""

FP8_ALIGNMENT = 128
"""Bytes of a line of the device's memory: fp8 units and the scales behind them start at multiples of it."""


def fp8_part_bytes(num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """Return the bytes of a block's fp8 units in one layer: the numbers of all heads, then the scales of all heads."""
    scales_bytes = -(-num_kv_heads * FP8_SCALE_BYTES // FP8_ALIGNMENT) * FP8_ALIGNMENT
    return num_kv_heads * block_size * 2 * head_dim + scales_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoolConfig:
    """The shape of one worker's host pool: `[num_blocks, num_layers, num_kv_heads, block_size, 2 * head_dim]`.

    One of fp8 units is `[num_blocks, num_layers, part_bytes]`, since scales lie behind the units of each layer.
    """

    num_blocks: int
    """Host blocks, the same number on all workers of an engine."""

    num_layers: int
    """Layers whose KV cache this worker holds."""

    num_kv_heads: int
    """KV heads of this worker."""

    block_size: int
    """Tokens per block."""

    head_dim: int
    """Width of K, and of V, per token and KV head."""

    dtype_bytes: int
    """Bytes per element: 1 for fp8, 2 for bf16 and fp16, 4 for fp32."""

    is_fp8_cache: bool = False
    """Whether the engine's own cache is fp8: units are then its bytes, and its engine keeps their scales."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range, or the pool would be larger than an address space.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "is_fp8_cache":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"{field.name}: expected a positive integer, got {value!r}")
        if self.dtype_bytes not in DTYPE_BYTES:
            raise ConfigError(f"dtype_bytes: expected one of {DTYPE_BYTES}, got {self.dtype_bytes}")
        if self.is_fp8_cache and self.dtype_bytes != 1:
            raise ConfigError(f"dtype_bytes: expected 1 with an fp8 cache, got {self.dtype_bytes}")
        if self.is_fp8 and self.unit_bytes % FP8_ALIGNMENT:
            raise ConfigError(
                f"block_size: expected fp8 units of a multiple of {FP8_ALIGNMENT} bytes, "
                f"got {self.block_size} tokens of {2 * self.head_dim} bytes"
            )
        if self.total_bytes > sys.maxsize:
            raise ConfigError(
                f"num_blocks: expected a pool of at most {sys.maxsize} bytes, "
                f"got {self.num_blocks} blocks of {self.block_bytes} bytes"
            )

    @classmethod
    def from_bytes(
        cls, pool_bytes: int, *, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype_bytes: int
    ) -> Self:
        """Return the largest pool of whole blocks within `pool_bytes`.

        Workers whose layers or heads differ get different numbers of blocks: the engine uses the smallest of them.

        Raises:
            ConfigError: Not even one block fits, or a field is out of its range.
        """
        block = cls(
            num_blocks=1,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
        )
        if pool_bytes < block.block_bytes:
            raise ConfigError(
                f"host_pool_bytes: expected at least one block of {block.block_bytes} bytes, got {pool_bytes}"
            )
        return replace(block, num_blocks=pool_bytes // block.block_bytes)

    @property
    def is_fp8(self) -> bool:
        """Whether units are stored as fp8 with scales of their own."""
        return self.dtype_bytes == 1 and not self.is_fp8_cache

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit's numbers: one layer, block and KV head."""
        return self.block_size * 2 * self.head_dim * self.dtype_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer of a host block, the scales of fp8 units included."""
        if self.is_fp8:
            return fp8_part_bytes(self.num_kv_heads, self.block_size, self.head_dim)
        return self.num_kv_heads * self.unit_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one host block, which are contiguous."""
        return self.num_layers * self.part_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The most memory that the processes of this control group may take together."""

    max_bytes: int | None
    """The limit; None where nothing sets one."""

    source: str
    """What sets it, for messages."""

    mem_total_bytes: int | None
    """What the kernel says the machine has. On some hosts memory is added as it is touched, so this is no limit."""


def host_memory_limit(
    cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc"), user_limit_bytes: int | None = None
) -> MemoryLimit:
    """Return the tightest of the control group's limits on this process (v2, v1) and the user's own number.

    Args:
        cgroup_root: Where control groups are mounted.
        proc: Where the process file system is mounted.
        user_limit_bytes: The setting `host_limit_bytes`; None sets no limit of its own.
    """
    found = list(_cgroup_limits(cgroup_root, proc))
    if user_limit_bytes is not None:
        found.append((user_limit_bytes, "host_limit_bytes"))
    max_bytes, source = min(found, default=(None, "no limit"))
    return MemoryLimit(max_bytes=max_bytes, source=source, mem_total_bytes=_mem_total_bytes(proc))


def check_fits(
    host_pool_bytes: int, limit: MemoryLimit, *, num_processes: int = 1, others: Mapping[str, int] | None = None
) -> None:
    """Check that the host pools, and what else is known to be needed, stay within the limit.

    More than `MemTotal` alone is only logged as a warning.

    Args:
        host_pool_bytes: Bytes of the pool of one worker process.
        limit: What the processes may take together.
        num_processes: Worker processes under this limit, each with a pool.
        others: Bytes of everything else under this limit, by name.

    Raises:
        ConfigError: The sum is over the limit; the message shows it.
    """
    parts = [f"{num_processes} processes x {size(host_pool_bytes)}" if num_processes > 1 else size(host_pool_bytes)]
    total_bytes = num_processes * host_pool_bytes
    for name, num_bytes in (others or {}).items():
        parts.append(f"{size(num_bytes)} {name}")
        total_bytes += num_bytes
    needed = " + ".join(parts)
    if len(parts) > 1 or num_processes > 1:
        needed += f" = {size(total_bytes)}"
    if limit.max_bytes is not None and total_bytes > limit.max_bytes:
        raise ConfigError(f"host_pool_bytes: {needed} exceed the limit {size(limit.max_bytes)} ({limit.source})")
    if limit.mem_total_bytes is not None and total_bytes > limit.mem_total_bytes:
        logger.warning(
            "host_pool_bytes: %s exceed the %s of memory that the machine reports (MemTotal); "
            "going on, since some hosts add memory as it is touched",
            needed,
            size(limit.mem_total_bytes),
        )


def size(num_bytes: int) -> str:
    """Write bytes for people: in MiB or GiB, or in what fits numbers that are far from these."""
    for unit_bytes, unit, least in ((2**40, "TiB", 10), (2**30, "GiB", 1), (2**20, "MiB", 0.1), (2**10, "KiB", 1)):
        if num_bytes >= least * unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} bytes"


def _cgroup_limits(cgroup_root: Path, proc: Path) -> Iterator[tuple[int, str]]:
    """Yield each memory limit on this process: that of its own group and of every group above it."""
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # The second is the hybrid layout: version 2 beside the controllers of version 1.
            places, file_name = [cgroup_root, cgroup_root / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            places, file_name = [cgroup_root / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group as the root of the mount, and often a path that exists only outside of it; a
        # missing file is passed over, so both views are read right. ".." leads out of what can be seen.
        group = PurePosixPath(path.lstrip("/"))
        groups = [PurePosixPath()] if ".." in group.parts else [group, *group.parents]
        for place in places:
            for name in groups:
                text = (_read(place / name / file_name) or "max").strip()
                # Version 1 says "no limit" with the largest multiple of the page size.
                if text != "max" and int(text) < 2**62:
                    yield int(text), f"cgroup {file_name}"


def _mem_total_bytes(proc: Path) -> int | None:
    for line in (_read(proc / "meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
