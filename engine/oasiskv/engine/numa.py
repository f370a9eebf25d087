"""CPUs of a memory node: memory that they touch first lies on it."""

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cpus_of_node(node: int | None, nodes: Path = NODES) -> frozenset[int]:
    """Return the CPUs of a memory node that this process may use.

    Args:
        node: Its number; None where it is not known.
        nodes: Where the kernel describes memory nodes.

    Returns:
        None of them where the node is not known, or this process may use none of its CPUs.
    """
    try:
        listed = parse_cpus((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    return listed & os.sched_getaffinity(0)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, such as `0-3,8`.

    Raises:
        ValueError: It is no such list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
