"""A real staging service with certificates of a Secret, as the operator rendered it; its engines are simulated."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from oasiskv.operator.settings import STAGING_PORT
from oasiskv.operator.testing_cluster import NODE_SIZE, ControlPlane
from oasiskv.operator.testing_kubelet import LABEL, FakeKubelet
from oasiskv.operator.testing_operator import Start, is_settled, sample, wait_for
from oasiskv.protos.staging.v1 import staging_pb2, staging_pb2_grpc
from oasiskv.services.rpc.testing import make_certificate, tls_files
from oasiskv.services.rpc.tls import channel_credentials

pytestmark = pytest.mark.timeout(240)

MANY = "400"
"""Cores, which only the node of the real pod has. It has no GPU, so that engines go elsewhere."""


@pytest.fixture
def kubelet(plane: ControlPlane, tmp_path: Path) -> Iterator[FakeKubelet]:
    plane.add_nodes(1, "sim", **{LABEL: "true"})
    size = {name: value for name, value in NODE_SIZE.items() if "gpu" not in name} | {"cpu": MANY}
    made = FakeKubelet(plane, "cpu-1", tmp_path, size)
    try:
        made.start()
        yield made
    finally:
        print(made.printed())  # shown where a test failed
        made.stop()
        plane.check("delete", "node", "sim-0")


def put_secret(plane: ControlPlane, namespace: str, folder: Path, name: str) -> None:
    files = {"tls.crt": f"{name}.pem", "tls.key": f"{name}.key", "ca.crt": "authority.pem"}
    data = {key: base64.b64encode((folder / file).read_bytes()).decode() for key, file in files.items()}
    metadata = {"name": "mine", "namespace": namespace}
    plane.put([{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}])


def is_answered(address: str, name: str, credentials: grpc.ChannelCredentials) -> bool:
    """Return whether a staging service answers a caller, to whom it must prove to be who peers look for."""
    options = (("grpc.ssl_target_name_override", name),)
    with grpc.secure_channel(address, credentials, options) as channel:
        try:
            stats = staging_pb2_grpc.StagingStub(channel).Stats(staging_pb2.StatsRequest(), timeout=10)
        except grpc.RpcError:
            return False
        return bool(stats.num_blocks > 0)


def test_staging_answers_who_shows_a_certificate_and_a_renewed_one_needs_no_restart(
    plane: ControlPlane, cluster_admin: Path, start: Start, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    namespace = "certificates"
    plane.check("create", "namespace", namespace)
    start(cluster_admin, "--read-nodes")
    changes: dict[str, Any] = {
        "staging": {"memory": "64Mi", "cpu": "300", "drainSeconds": 10},
        "placement": {"nodeSelector": {LABEL: "true"}, "tolerations": [{"key": LABEL}]},
        "network": {"fabric": "Stream"},
        "telemetry": {},
    }
    plane.put([sample("chat", namespace, tls={"secret": "mine"}, **changes)])

    def status() -> dict[str, Any]:
        found: dict[str, Any] = plane.get("oks", "chat", "-n", namespace).get("status", {})
        return found

    wait_for(lambda: status().get("kvGeneration"), "a KV generation")
    service = f"chat-staging-{status()['kvGeneration']}"
    name = f"{service}.{namespace}.svc"
    folders = {which: tmp_path / which for which in ("first", "renewed")}
    for folder in folders.values():
        folder.mkdir()
        authority = make_certificate(folder, "authority")
        make_certificate(folder, name, authority)
    put_secret(plane, namespace, folders["first"], name)
    wait_for(lambda: is_settled(plane, namespace, "chat"), "staging to be ready", 120)
    address = kubelet.where(namespace, service, STAGING_PORT)
    first, renewed = (channel_credentials(tls_files(folder, name)) for folder in folders.values())
    assert is_answered(address, name, first)
    assert not is_answered(address, name, renewed)
    nobody = grpc.ssl_channel_credentials((folders["first"] / "authority.pem").read_bytes())
    assert not is_answered(address, name, nobody)

    put_secret(plane, namespace, folders["renewed"], name)
    wait_for(lambda: is_answered(address, name, renewed), "the renewed certificate to be used")
    assert not is_answered(address, name, first)
    assert kubelet.num_starts(namespace) == 1
    plane.check("delete", "oks", "chat", "-n", namespace)
    wait_for(lambda: kubelet.codes, "staging to end")
    assert list(kubelet.codes.values()) == [0]
    assert kubelet.errors == []
