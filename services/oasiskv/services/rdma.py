"""What this process sees of RDMA: whether a port can be used, why not, and how near it is to the GPU."""

import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
PORTS = "sys/class/infiniband"
GID_INDEX = "UCX_IB_GID_INDEX"
"""Variable by which UCX is told which GID of a RoCE port to use."""
MIN_LOCKED_BYTES = 64 * 2**20
"""Of the largest transfer's buffer, which RDMA cannot do without."""
MIN_MTU = 4200
"""Of a RoCE port's network device, so that a packet holds 4096 bytes of KV and its headers."""
NEAR = ("PIX", "PHB", "NODE", "SYS")
"""How GPU and port are joined, nearest first: by a PCIe switch, a root complex, a memory node, or across nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """What was found."""

    problem: str = ""
    """`what: expected X, got Y`: the first thing that keeps RDMA from being used; empty if nothing does."""
    note: str = ""
    """What makes it slow; empty if nothing does."""
    port: str = ""
    """The usable port that is nearest to the GPU, as `mlx5_0:1`."""
    gpu: str = ""
    """PCI address of the GPU; empty where there is none, or it is not known."""
    closeness: str = ""
    """One of `NEAR`; empty where it is not known."""


def look(*, memory_bytes: int = 0, limit_bytes: int | None = None, root: Path = ROOT) -> Rdma:
    """Return what there is now; reads a few small files.

    Args:
        memory_bytes: Bytes that are registered at once; at least those of a transfer count.
        limit_bytes: Most bytes that may be locked; None for this process's limit, -1 for no limit.
        root: Where `/proc`, `/sys` and `/dev` are.
    """
    gpu = _gpu(root)
    usable, problems = [], []
    for port in sorted((root / PORTS).glob("*/ports/*")):
        if problem := _problem(port, root):
            problems.append(problem)
        else:
            usable.append((port, _closeness(gpu, port.parent.parent / "device", root)))
    if not usable:
        return Rdma(problem=next(iter(problems), f"port: expected one in /{PORTS}, got none"), gpu=gpu)
    port, closeness = min(usable, key=lambda each: NEAR.index(each[1]) if each[1] else 0)
    found = Rdma(port=_name(port), gpu=gpu, closeness=closeness, note=_note(port, gpu, closeness))
    wanted = max(memory_bytes, MIN_LOCKED_BYTES)
    if limit_bytes is None:
        limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if 0 <= limit_bytes < wanted and not _may_lock(root):
        problem = f"memlock: expected a limit of at least {wanted} bytes, got {limit_bytes}"
        return Rdma(**asdict(found) | {"problem": problem})
    return found


def facts(found: Rdma, path: str, reason: str) -> dict[str, Any]:
    """Return what `/readyz` tells.

    Args:
        found: What the process sees.
        path: How bytes move: `one-sided`, `mapped`, `stream`, or empty as long as that is open.
        reason: Why that.
    """
    problem = found.problem
    if not problem and path == "stream":
        problem = f"registration: expected one-sided transfers, got a stream, since {reason}"
    return {**asdict(found), "problem": problem, "path": path}


def _problem(port: Path, root: Path) -> str:
    """Return why a port cannot be used."""
    name, device = _name(port), port.parent.parent
    if "ACTIVE" not in (state := _read(port / "state")):
        return f"port: expected {name} to be active, got {state or 'no state'}"
    for verbs in sorted((device / "device/infiniband_verbs").glob("uverbs*")):
        path = root / "dev/infiniband" / verbs.name
        if not os.access(path, os.R_OK | os.W_OK):
            got = "one that it may not" if path.exists() else "none"
            return f"device: expected /dev/infiniband/{verbs.name} of {name} to be there to open, got {got}"
    if _read(port / "link_layer") == "InfiniBand":
        return ""
    index = os.environ.get(GID_INDEX, "")
    if index:
        if not _read(port / "gids" / index).replace(":", "").strip("0"):
            return f"gid: expected one at index {index} of {name}, got none"
        if "v2" not in (kind := _read(port / "gid_attrs/types" / index)):
            return f"gid: expected RoCE v2 at index {index} of {name}, got {kind or 'none'}"
    elif not any("v2" in _read(each) for each in (port / "gid_attrs/types").glob("*")):
        return f"gid: expected one of RoCE v2 at {name}, got none"
    return ""


def _note(port: Path, gpu: str, closeness: str) -> str:
    if closeness == "SYS":
        return f"nic: expected one on the memory node of GPU {gpu}, got {_name(port)} on another as the nearest"
    if _read(port / "link_layer") != "InfiniBand":
        for net in sorted((port.parent.parent / "device/net").glob("*")):
            if (mtu := _read(net / "mtu")).isdigit() and int(mtu) < MIN_MTU:
                return f"mtu: expected at least {MIN_MTU} at {net.name} of {_name(port)}, got {mtu}"
    return ""


def _gpu(root: Path) -> str:
    """Return the PCI address of the GPU that was given to this process's container; of one, if it has several."""
    return next(_gpus(root), "")


def _gpus(root: Path) -> Iterator[str]:
    for described in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.partition(":")[::2] for line in _read(described).splitlines())
        # The driver may list all of the host; only those that were given have their device.
        if (root / f"dev/nvidia{lines.get('Device Minor', '').strip()}").exists():
            yield described.parent.name.lower()


def _closeness(gpu: str, nic: Path, root: Path) -> str:
    here = root / "sys/bus/pci/devices" / gpu
    if not gpu or not here.exists() or not nic.exists():
        return ""
    parts, others = here.resolve().parts, nic.resolve().parts
    joint = [one for one, other in zip(parts, others, strict=False) if one == other]
    above = [part for part in joint if part.count(":") >= 1]
    if len(above) > 1:
        return "PIX"
    if above:
        return "PHB"
    nodes = [_read(each / "numa_node") for each in (here, nic)]
    if any(not node.isdigit() for node in nodes):  # -1 where the host does not say
        return ""
    return "NODE" if nodes[0] == nodes[1] else "SYS"


def _may_lock(root: Path) -> bool:
    """Return whether this process may lock memory whatever its limit (CAP_IPC_LOCK)."""
    lines = dict(line.partition(":")[::2] for line in _read(root / "proc/self/status").splitlines())
    return bool(int(lines.get("CapEff", "0").strip() or "0", 16) >> 14 & 1)


def _name(port: Path) -> str:
    return f"{port.parent.parent.name}:{port.name}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
