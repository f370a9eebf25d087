"""What a pod says of RDMA, over trees of files as kernels with and without devices have them."""

import os
import stat
from pathlib import Path

import pytest

from oasiskv.services.rdma import MIN_LOCKED_BYTES, facts, look

GPU, ROOTS = "0000:17:00.0", ("pci0000:15", "pci0000:15/0000:15:01.0/0000:16:00.0")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def add_nic(
    root: Path, name: str, at: str, *, node: str = "0", layer: str = "Ethernet", state: str = "4: ACTIVE"
) -> Path:
    """Make a device with one port, and return the port's folder."""
    pci = root / "sys/devices" / at / f"0000:{18 + len(list(root.glob('sys/class/infiniband/*')))}:00.0"
    write(pci / "numa_node", node)
    write(pci / f"infiniband_verbs/uverbs{name[-1]}/abi_version", "1")
    write(pci / f"net/eth{name[-1]}/mtu", "9000")
    write(root / f"dev/infiniband/uverbs{name[-1]}", "")
    device = root / "sys/class/infiniband" / name
    device.mkdir(parents=True)
    (device / "device").symlink_to(pci)
    port = device / "ports/1"
    write(port / "state", state)
    write(port / "link_layer", layer)
    write(port / "gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001")
    write(port / "gid_attrs/types/3", "RoCE v2")
    write(port / "gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001")
    write(port / "gid_attrs/types/0", "IB/RoCE v1")
    write(port / "gids/5", "0000:0000:0000:0000:0000:0000:0000:0000")
    return port


def add_gpu(root: Path, at: str = ROOTS[1], node: str = "0") -> None:
    pci = root / "sys/devices" / at / GPU
    write(pci / "numa_node", node)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / GPU).symlink_to(pci)
    write(root / "dev/nvidia2", "")
    write(root / f"proc/driver/nvidia/gpus/{GPU}/information", "Model: \t\t H100\nDevice Minor: \t 2")
    write(root / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t H100\nDevice Minor: \t 0")


def test_a_host_without_a_port_says_so(tmp_path: Path) -> None:
    assert look(root=tmp_path).problem == "port: expected one in /sys/class/infiniband, got none"


@pytest.mark.parametrize(
    ("at", "node", "closeness"),
    [
        (ROOTS[1], "0", "PIX"),
        (ROOTS[0], "0", "PHB"),
        ("pci0000:30", "0", "NODE"),
        ("pci0000:80", "1", "SYS"),
        ("pci0000:80", "-1", ""),
    ],
)
def test_how_near_the_port_is_to_the_gpu_is_measured(tmp_path: Path, at: str, node: str, closeness: str) -> None:
    add_gpu(tmp_path)
    add_nic(tmp_path, "mlx5_0", at, node=node)
    found = look(limit_bytes=-1, root=tmp_path)
    assert (found.problem, found.port, found.gpu, found.closeness) == ("", "mlx5_0:1", GPU, closeness)
    slow = "nic: expected one on the memory node of GPU 0000:17:00.0, got mlx5_0:1 on another as the nearest"
    assert found.note == (slow if closeness == "SYS" else "")


def test_the_nearest_port_that_can_be_used_is_the_one_that_counts(tmp_path: Path) -> None:
    add_gpu(tmp_path)
    add_nic(tmp_path, "mlx5_0", "pci0000:80", node="1")
    add_nic(tmp_path, "mlx5_1", "pci0000:30")
    add_nic(tmp_path, "mlx5_2", ROOTS[1], state="1: DOWN")
    found = look(limit_bytes=-1, root=tmp_path)
    assert (found.port, found.closeness, found.problem, found.note) == ("mlx5_1:1", "NODE", "", "")


def test_a_port_that_is_down_or_shut_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = add_nic(tmp_path, "mlx5_0", ROOTS[0], state="1: DOWN")
    assert look(root=tmp_path).problem == "port: expected mlx5_0:1 to be active, got 1: DOWN"
    write(port / "state", "4: ACTIVE")
    verbs = tmp_path / "dev/infiniband/uverbs0"
    expected = "device: expected /dev/infiniband/uverbs0 of mlx5_0:1 to be there to open, got"
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).exists() and bool(Path(path).stat().st_mode & 0o200)
    )
    verbs.chmod(stat.S_IRUSR)
    assert look(root=tmp_path).problem == f"{expected} one that it may not"
    verbs.unlink()
    assert look(root=tmp_path).problem == f"{expected} none"


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("3", ""),
        ("", ""),
        ("0", "gid: expected RoCE v2 at index 0 of mlx5_0:1, got IB/RoCE v1"),
        ("5", "gid: expected one at index 5 of mlx5_0:1, got none"),
        ("9", "gid: expected one at index 9 of mlx5_0:1, got none"),
    ],
)
def test_the_gid_that_ucx_is_told_to_use_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str, problem: str
) -> None:
    monkeypatch.setenv("UCX_IB_GID_INDEX", index)
    port = add_nic(tmp_path, "mlx5_0", ROOTS[0])
    assert look(limit_bytes=-1, root=tmp_path).problem == problem
    write(port / "gid_attrs/types/3", "IB/RoCE v1")
    if not index:
        assert look(root=tmp_path).problem == "gid: expected one of RoCE v2 at mlx5_0:1, got none"
    write(port / "link_layer", "InfiniBand")  # which has no such kinds
    assert look(limit_bytes=-1, root=tmp_path).problem == ""


def test_a_limit_of_locked_memory_below_the_pool_is_said_in_numbers(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0", ROOTS[0])
    write(tmp_path / "proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\nCapBnd:\t0")
    problem = look(memory_bytes=2**30, limit_bytes=65536, root=tmp_path).problem
    assert problem == "memlock: expected a limit of at least 1073741824 bytes, got 65536"
    assert look(limit_bytes=65536, root=tmp_path).problem.startswith(
        f"memlock: expected a limit of at least {MIN_LOCKED_BYTES}"
    )
    assert look(memory_bytes=2**30, limit_bytes=2**30, root=tmp_path).problem == ""
    assert look(memory_bytes=2**30, limit_bytes=-1, root=tmp_path).problem == ""
    write(tmp_path / "proc/self/status", "Name:\tpython\nCapEff:\t0000000000004000\nCapBnd:\t0")
    assert look(memory_bytes=2**30, limit_bytes=65536, root=tmp_path).problem == ""


def test_small_packets_are_noted(tmp_path: Path) -> None:
    port = add_nic(tmp_path, "mlx5_0", ROOTS[0])
    write(port.parent.parent / "device/net/eth0/mtu", "1500")
    assert look(limit_bytes=-1, root=tmp_path).note == "mtu: expected at least 4200 at eth0 of mlx5_0:1, got 1500"


def test_a_port_that_nobody_could_register_memory_with_is_a_problem_although_it_looks_right(tmp_path: Path) -> None:
    add_nic(tmp_path, "mlx5_0", ROOTS[0])
    found = look(limit_bytes=-1, root=tmp_path)
    assert facts(found, "one-sided", "")["problem"] == facts(found, "", "")["problem"] == ""
    said = facts(found, "stream", "roce cannot be used: nixl: expected 9 bytes to be registered, got NOT_SUPPORTED")
    assert said["problem"].startswith(
        "registration: expected one-sided transfers, got a stream, since roce cannot be used"
    )
    assert facts(look(root=tmp_path / "none"), "stream", "x")["problem"].startswith("port:")
