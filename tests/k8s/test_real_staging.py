"""Real staging services as the operator rendered them, with certificates and handed over; engines are simulated."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from oasiskv.core.errors import PeerUnavailableError
from oasiskv.operator.settings import METRICS_PORT, STAGING_PORT
from oasiskv.operator.testing_cluster import NODE_SIZE, ControlPlane
from oasiskv.operator.testing_kubelet import LABEL, FakeKubelet
from oasiskv.operator.testing_operator import Start, is_settled, sample, wait_for
from oasiskv.operator.testing_pods import SECRET
from oasiskv.protos.staging.v1 import staging_pb2, staging_pb2_grpc
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.rpc.testing import tls_files
from oasiskv.services.rpc.tls import channel_credentials
from oasiskv.services.testing import FINGERPRINT, Peer, random_blocks

pytestmark = pytest.mark.timeout(240)

MANY = "400"
"""Cores, which only the node of the real pod has. It has no GPU, so that engines go elsewhere."""
CHANGES: dict[str, Any] = {
    "staging": {"memory": "64Mi", "cpu": "300", "drainSeconds": 10},
    "placement": {"nodeSelector": {LABEL: "true"}, "tolerations": [{"key": LABEL}]},
    "network": {"fabric": "Stream"},
    "telemetry": {},
}


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
    plane: ControlPlane,
    cluster_admin: Path,
    start: Start,
    kubelet: FakeKubelet,
    certify: Callable[..., None],
    tmp_path: Path,
) -> None:
    namespace = "certificates"
    plane.check("create", "namespace", namespace)
    start(cluster_admin, "--read-nodes")
    plane.put([sample("chat", namespace, tls={"secret": SECRET}, **CHANGES)])

    def status() -> dict[str, Any]:
        found: dict[str, Any] = plane.get("oks", "chat", "-n", namespace).get("status", {})
        return found

    wait_for(lambda: status().get("kvGeneration"), "a KV generation")
    service = f"chat-staging-{status()['kvGeneration']}"
    name = f"{service}.{namespace}.svc"
    folders = {which: tmp_path / which for which in ("first", "renewed")}
    certify(namespace, folders["first"], name)
    wait_for(lambda: is_settled(plane, namespace, "chat"), "staging to be ready", 120)
    address = kubelet.where(namespace, service, STAGING_PORT)
    first = channel_credentials(tls_files(folders["first"], name))
    assert is_answered(address, name, first)
    nobody = grpc.ssl_channel_credentials((folders["first"] / "authority.pem").read_bytes())
    assert not is_answered(address, name, nobody)

    with urllib.request.urlopen(f"http://{address.rpartition(':')[0]}:{METRICS_PORT}/readyz", timeout=30) as answer:
        told = json.loads(answer.read())
    assert (told["role"], told["rdma"]["path"]) == ("staging", "stream")  # as `network.fabric` says
    assert told["rdma"]["problem"]

    certify(namespace, folders["renewed"], name)
    renewed = channel_credentials(tls_files(folders["renewed"], name))
    wait_for(lambda: is_answered(address, name, renewed), "the renewed certificate to be used")
    assert not is_answered(address, name, first)
    assert kubelet.num_starts(namespace) == 1
    plane.check("delete", "oks", "chat", "-n", namespace)
    wait_for(lambda: kubelet.codes, "staging to end")
    assert list(kubelet.codes.values()) == [0]
    assert kubelet.errors == []


def test_what_staging_holds_at_a_rollout_is_at_the_next_one_and_its_leases_are_served_meanwhile(
    plane: ControlPlane, cluster_admin: Path, start: Start, kubelet: FakeKubelet
) -> None:
    namespace = "handover"
    plane.check("create", "namespace", namespace)
    start(cluster_admin, "--read-nodes")
    kv = staging_pb2.Fingerprint()
    kv.CopyFrom(FINGERPRINT)
    kv.block_size, kv.num_kv_heads, kv.head_dim = 16, 1, 4  # as many bytes as the tests' own
    model = {"uri": "hf://a/b", "hash": "m", "dtype": "float16", "numLayers": 3, "numKvHeads": 1, "headDim": 4}
    staging = {**CHANGES["staging"], "cpu": "150", "drainSeconds": 120, "replacement": "HandOver"}
    plane.put([sample("chat", namespace, **{**CHANGES, "model": model, "staging": staging})])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "staging to be ready", 120)
    service = f"chat-staging-{plane.get('oks', 'chat', '-n', namespace)['status']['kvGeneration']}"
    address = f"{kubelet.address(namespace, service)}:{STAGING_PORT}"
    content = random_blocks(1, *(b"%d" % number for number in range(12)))
    names = list(content)

    async def register(client: StagingClient) -> Peer:
        request = staging_pb2.RegisterPeerRequest(fingerprint=kv, name="test", access=staging_pb2.ACCESS_STREAM)
        return Peer(client, await client.call(client.stub.RegisterPeer, request))

    async def found_at_the_next(epoch: str) -> bool:
        # Channels of equal options share a connection, and this one has to be new each time.
        async with StagingClient(address, max_message_bytes=5 * 2**20) as client:
            try:
                reader = await register(client)
                if (await reader.stats()).epoch == epoch or not all(await reader.locate(*names)):
                    return False
                assert await reader.check(names, content) == names
            except PeerUnavailableError:  # the old one drains
                return False
            return True

    async def scenario(old: str) -> None:
        # A connection to the Service that broke would go on to the next one.
        async with StagingClient(old) as client:
            writer = await register(client)
            await writer.release(await writer.stage(content))
            held = await writer.lease(*names[:3])
            epoch = (await writer.stats()).epoch
            change = json.dumps({"spec": {"staging": {"cpu": "151"}}})
            plane.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", change)
            async with asyncio.timeout(120):
                while not await found_at_the_next(epoch):
                    renewal = staging_pb2.RenewRequest(peer_id=writer.peer_id, ttl_ms=60_000)
                    assert not (await client.call(client.stub.Renew, renewal)).lost_lease_ids
                    await asyncio.sleep(0.3)
            # The one that goes still serves who reads in it.
            assert kubelet.codes == {}
            assert (await writer.stats()).epoch == epoch
            np.testing.assert_array_equal((await writer.read(held.lease_id, 3))[2], content[names[2]])
            await writer.release(held.lease_id)

    asyncio.run(scenario(kubelet.where(namespace, service, STAGING_PORT)))
    wait_for(lambda: kubelet.codes, "the old one to end")
    wait_for(lambda: is_settled(plane, namespace, "chat"), "the next one to be all there is")
    assert kubelet.num_starts(namespace) == 1  # of those that are left
    plane.check("delete", "oks", "chat", "-n", namespace)
    wait_for(lambda: len(kubelet.codes) == 2, "staging to end")
    assert list(kubelet.codes.values()) == [0, 0]
    assert kubelet.errors == []
