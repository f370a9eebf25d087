"""A thousand hosts and ten thousand pods: what the operator takes of time, processor and memory."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.operator.client import Client
from oasiskv.operator.resources import PODS
from oasiskv.operator.testing_cluster import ALL, ControlPlane
from oasiskv.operator.testing_operator import OperatorProcess, is_settled, sample, wait_for

NUM_NODES, NUM_PODS, NUM_SERVICES = (int(each) for each in os.environ.get("OASISKV_SCALE", "1000 10000 50").split())
"""Ten thousand pods of others; each service has a staging, a prefill and two decode pods beside them."""
FULL_S = 60
"""Longest time for a turn of every service."""
STEADY_S = 60

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder or not all(os.access(Path(folder, name), os.X_OK) for name in ALL):
        pytest.skip(f"KUBEBUILDER_ASSETS: expected a folder with {', '.join(ALL)}, got {folder!r}")
    made = ControlPlane(tmp_path, Path(folder))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def processor_s(process: "subprocess.Popen[bytes]") -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: "subprocess.Popen[bytes]", which: str = "VmRSS") -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


async def make_pods() -> None:
    """Make the pods of others, each bound to a host: the scheduler would take minutes for so many."""
    client = Client()
    width = asyncio.Semaphore(50)

    async def make(index: int) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"other-{index}", "labels": {"app": "other"}},
            "spec": {
                "nodeName": f"h100-{index % NUM_NODES}",
                "containers": [{"name": "a", "image": "a:1", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
            },
        }
        async with width:
            await client.create(PODS.path("default"), pod)

    await asyncio.gather(*map(make, range(NUM_PODS)))
    await client.close()


def test_a_large_cluster_is_looked_after_in_a_minute(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_s = time.monotonic()
    plane.add_nodes(NUM_NODES)
    print(f"\n{NUM_NODES} hosts after {time.monotonic() - begin_s:.0f} s")
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    asyncio.run(make_pods())

    def num_running() -> int:
        made = plane.check("get", "pods", "-n", "default", "--field-selector=status.phase=Running", "-o", "name")
        return len(made.splitlines())

    wait_for(lambda: num_running() >= NUM_PODS, "all pods of others", 1800)
    print(f"{NUM_PODS} pods after {time.monotonic() - begin_s:.0f} s")

    arguments = ("--read-nodes", "--resync-seconds=100000")
    operator = OperatorProcess(
        tmp_path / "first.log", plane.kubeconfig, *arguments, environment={"POD_NAMESPACE": "default"}
    )
    try:
        begin_s = time.monotonic()
        operator.wait_ready()
        print(
            f"ready after {time.monotonic() - begin_s:.1f} s, {processor_s(operator.process):.1f} s of processor,"
            f" {memory_mib(operator.process):.0f} MiB, at most {memory_mib(operator.process, 'VmHWM'):.0f}"
        )
        services = [sample(f"s{index}", "llm") for index in range(NUM_SERVICES)]
        begin_s = time.monotonic()
        plane.put(services)
        wait_for(
            lambda: all(is_settled(plane, "llm", f"s{index}") for index in range(NUM_SERVICES)), "all to settle", 900
        )
        print(f"{NUM_SERVICES} services settled after {time.monotonic() - begin_s:.0f} s")
    finally:
        assert operator.stop() == 0
    operator = OperatorProcess(
        tmp_path / "second.log", plane.kubeconfig, *arguments, environment={"POD_NAMESPACE": "default"}
    )
    try:
        begin_s = time.monotonic()
        operator.wait_ready()
        name = "oasiskv_operator_reconcile_seconds_count"
        wait_for(lambda: operator.metric(name) >= NUM_SERVICES, "a turn of each", 10 * FULL_S)
        full_s = time.monotonic() - begin_s
        print(f"everything read and a turn of each of {NUM_SERVICES} services after {full_s:.1f} s")
        assert operator.metric("oasiskv_operator_writes_total") == 0
        assert full_s <= FULL_S
        # Pods here never say that KV comes through, so they are asked often at first, and less often after a minute.
        for when in ("while pods are asked every 5 s", "steady"):
            before_s, since_s = processor_s(operator.process), time.monotonic()
            time.sleep(STEADY_S)
            share = (processor_s(operator.process) - before_s) / (time.monotonic() - since_s)
            print(
                f"{when}: {share:.1%} of a processor, {memory_mib(operator.process):.0f} MiB,"
                f" at most {memory_mib(operator.process, 'VmHWM'):.0f}"
            )
        assert memory_mib(operator.process, "VmHWM") < 512  # the chart's limit
    finally:
        assert operator.stop() == 0
