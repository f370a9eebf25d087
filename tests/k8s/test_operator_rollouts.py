"""What goes on serving while specs change, operators die and changes are taken back."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.asks import Asks
from oasiskv.operator.client import MANAGER, Client
from oasiskv.operator.differs import differs
from oasiskv.operator.facts import INFERENCE_SERVICE, Facts
from oasiskv.operator.kinds import read
from oasiskv.operator.metrics import Metrics
from oasiskv.operator.names import ROLE, SERVICE
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.shell import Shell
from oasiskv.operator.store import Store
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_operator import OWNED, Start, condition, is_settled, sample, wait_for

pytestmark = pytest.mark.timeout(240)

Key = tuple[str, str]


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"r{abs(hash(request.node.name)) % 10**8}"
    plane.check("create", "namespace", name)
    yield name
    plane.check("delete", "oks", "--all", "-n", name, "--wait=false")


def patch(plane: ControlPlane, namespace: str, name: str, spec: dict[str, Any]) -> None:
    plane.check("patch", "oks", name, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def pods(plane: ControlPlane, namespace: str, role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plane.get("pods", "-n", namespace, "-l", f"oasiskv.io/role={role}")["items"]
    return found


def num_ready(of: list[dict[str, Any]]) -> int:
    return sum(
        any(
            each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", ())
        )
        and "deletionTimestamp" not in pod["metadata"]
        for pod in of
    )


def owned(plane: ControlPlane, namespace: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what services own themselves."""
    return [
        each
        for each in plane.get(OWNED, "-n", namespace, "-l", "oasiskv.io/service", *arguments)["items"]
        if any(owner["kind"] == "OasisKVService" for owner in each["metadata"].get("ownerReferences", ()))
    ]


def is_as_fresh(plane: ControlPlane, namespace: str, name: str, *, reads_nodes: bool = True) -> bool:
    """Return whether there is exactly what would be made of the service if it were new."""
    made = plane.get("oks", name, "-n", namespace)
    nodes = () if reads_nodes else None
    wanted = reconcile(made, Facts(now="2026-01-01T00:00:00Z", kinds=frozenset({INFERENCE_SERVICE}), nodes=nodes)).apply
    live = {(each["kind"], each["metadata"]["name"]): each for each in owned(plane, namespace, "--show-managed-fields")}
    return live.keys() == {(each["kind"], each["metadata"]["name"]) for each in wanted} and not any(
        differs(each, live[each["kind"], each["metadata"]["name"]], MANAGER) for each in wanted
    )


class Seen:
    """Every state of a service's pods and Deployments, by watches, so that nothing between two looks is missed."""

    def __init__(self, plane: ControlPlane, namespace: str, seconds: int) -> None:
        self.fewest: dict[str, int] = {}
        """Ready pods of each role."""
        self.budgets: set[tuple[int, int]] = set()
        """Replicas and `maxUnavailable` of Deployments."""
        self.num_pods = 0
        """That there ever were."""
        found = plane.get("pods", "-n", namespace, "-l", "oasiskv.io/service=chat")["items"]
        self._ready: dict[str, set[str]] = {}
        for pod in found:
            self._pod("ADDED", pod)
        self.fewest = {role: len(ready) for role, ready in self._ready.items()}
        paths = {
            f"/api/v1/namespaces/{namespace}/pods": self._pod,
            f"/apis/apps/v1/namespaces/{namespace}/deployments": self._deployment,
        }

        def follow(path: str, take: Callable[[str, Any], None]) -> None:
            for event in plane.watch(f"{path}?labelSelector=oasiskv.io/service=chat", seconds):
                take(event["type"], event["object"])

        self._pool = ThreadPoolExecutor(len(paths))
        self._watches = [self._pool.submit(follow, *each) for each in paths.items()]

    def join(self) -> None:
        """Wait for the end of the watches."""
        self._pool.shutdown()
        for watch in self._watches:
            watch.result()

    def _pod(self, kind: str, pod: Any) -> None:
        role, name = pod["metadata"]["labels"][ROLE], pod["metadata"]["name"]
        ready = self._ready.setdefault(role, set())
        self.num_pods += kind == "ADDED"
        if kind != "DELETED" and num_ready([pod]):
            ready.add(name)
        else:
            ready.discard(name)
        self.fewest[role] = min(len(ready), self.fewest.get(role, 0))

    def _deployment(self, kind: str, made: Any) -> None:
        if kind != "DELETED":
            spec = made["spec"]
            self.budgets.add((spec["replicas"], spec["strategy"]["rollingUpdate"]["maxUnavailable"]))


def test_random_edits_every_50_ms_never_take_more_pods_than_may_be_missing(
    plane: ControlPlane, cluster_admin: Path, namespace: str, start: Start
) -> None:
    start(cluster_admin, "--read-nodes")
    roles = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    plane.put([sample("chat", namespace, **roles)])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 90)
    chance = random.Random(7)
    edits: list[dict[str, Any]] = [{"image": f"oasiskv/engine:{number}"} for number in range(6)]
    edits += [{"engine": {"blockSize": size}} for size in (16, 32, 64)]
    edits += [{"decode": {"maxRequests": number}} for number in (100, 200)]
    path = f"/apis/oasiskv.io/v1alpha1/namespaces/{namespace}/oasiskvservices/chat"
    seen = Seen(plane, namespace, 15)
    for _ in range(100):
        begin_s = time.monotonic()
        plane.ask("PATCH", path, {"spec": chance.choice(edits)}, "application/merge-patch+json")
        time.sleep(max(0.0, 0.05 - (time.monotonic() - begin_s)))
    seen.join()
    assert seen.budgets == {(2, 0)}
    assert seen.num_pods > 10  # edits did replace pods
    assert (seen.fewest["prefill"], seen.fewest["decode"]) == (2, 2)
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 120)
    wait_for(lambda: is_as_fresh(plane, namespace, "chat"), "what a new service would have")


def test_a_change_that_is_taken_back_half_way_goes_back_to_the_pods_that_still_live(
    plane: ControlPlane, cluster_admin: Path, namespace: str, start: Start
) -> None:
    start(cluster_admin, "--read-nodes")
    plane.put([sample("chat", namespace)])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 90)

    def uids() -> set[str]:
        return {
            pod["metadata"]["uid"] for role in ("prefill", "decode", "staging") for pod in pods(plane, namespace, role)
        }

    before, kv = uids(), plane.get("oks", "chat", "-n", namespace)["status"]["kvGeneration"]
    # No host has the label, so that the new generation comes up as far as its objects and no further.
    nowhere = {"engine": {"blockSize": 32}, "placement": {"nodeSelector": {"pool": "none"}, "tolerations": None}}
    patch(plane, namespace, "chat", nowhere)

    def generations() -> set[str]:
        found = plane.get("deployments", "-n", namespace, "-l", "oasiskv.io/role=prefill")["items"]
        return {each["metadata"]["labels"]["oasiskv.io/kv-generation"] for each in found}

    wait_for(lambda: len(generations()) == 2, "a second generation")
    assert before <= uids()
    placement = {**sample("chat", namespace)["spec"]["placement"], "nodeSelector": None}
    patch(plane, namespace, "chat", {"engine": {"blockSize": 16}, "placement": placement})
    wait_for(lambda: generations() == {kv}, "the first generation alone")
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 90)
    wait_for(lambda: uids() == before, "the pods that were there")


def test_staging_ends_when_its_service_leads_to_the_next_one_and_not_before(
    plane: ControlPlane, cluster_admin: Path, namespace: str, start: Start
) -> None:
    start(cluster_admin, "--read-nodes")
    plane.put([sample("chat", namespace, staging={"replacement": "HandOver", "cpu": "1"})])
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 90)
    (old,) = pods(plane, namespace, "staging")
    engines = {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in pods(plane, namespace, role)}
    name = f"chat-staging-{plane.get('oks', 'chat', '-n', namespace)['status']['kvGeneration']}"

    def leads_to() -> list[str]:
        """Return the staging pods that the Service selects."""
        selector = plane.get("service", name, "-n", namespace)["spec"]["selector"].items()
        found = pods(plane, namespace, "staging")
        return [pod["metadata"]["name"] for pod in found if selector <= pod["metadata"]["labels"].items()]

    assert leads_to() == [old["metadata"]["name"]]
    # No host is that large, so the next one is there and does not come up.
    patch(plane, namespace, "chat", {"staging": {"cpu": "500"}})
    wait_for(lambda: len(pods(plane, namespace, "staging")) == 2, "the next one")
    assert condition(plane, namespace, "chat", "StagingReady")["status"] == "False"
    assert leads_to() == [old["metadata"]["name"]]
    num_calls = len(list(plane.calls()))
    patch(plane, namespace, "chat", {"staging": {"cpu": "2"}})
    wait_for(lambda: is_settled(plane, namespace, "chat"), "to settle", 90)
    wait_for(lambda: len(pods(plane, namespace, "staging")) == 1, "the old one to end")
    (new,) = pods(plane, namespace, "staging")
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert leads_to() == [new["metadata"]["name"]]
    calls = [(call["verb"], call["requestURI"].split("?")[0]) for call in list(plane.calls())[num_calls:]]
    led = calls.index(("patch", f"/api/v1/namespaces/{namespace}/services/{name}"))
    sets = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    assert led < calls.index(("delete", f"{sets}/{old['metadata']['name'].rpartition('-')[0]}"))
    wait_for(lambda: is_as_fresh(plane, namespace, "chat"), "what a new service would have")
    # A node that is emptied waits until staging has moved to another one, which gets what it holds.
    num_calls, node = len(list(plane.calls())), new["spec"]["nodeName"]
    selector = f"oasiskv.io/role=staging,{SERVICE}=chat"
    drain = ("drain", node, f"--pod-selector={selector}", "--delete-emptydir-data", "--timeout=60s")
    try:
        said = plane.check(*drain)
    finally:
        plane.check("uncordon", node)
    assert "evicting pod" in said
    (moved,) = pods(plane, namespace, "staging")
    assert moved["metadata"]["uid"] != new["metadata"]["uid"]
    assert moved["spec"]["nodeName"] != node
    assert leads_to() == [moved["metadata"]["name"]]
    calls = [(call["verb"], call["requestURI"].split("?")[0]) for call in list(plane.calls())[num_calls:]]
    led = calls.index(("patch", f"/api/v1/namespaces/{namespace}/services/{name}"))
    assert led < calls.index(("delete", f"{sets}/{new['metadata']['name'].rpartition('-')[0]}"))
    told = {each["reason"] for each in plane.get("events.events.k8s.io", "-n", namespace)["items"]}
    assert "MovesOffNode" in told
    assert engines == {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in pods(plane, namespace, role)}


class Killed(BaseException):
    """The operator's end."""


class Mortal(Client):
    """A client whose process dies at its first write: before the API server gets it, or before the answer is read."""

    is_late = False

    async def _request(self, verb: str, path: str, **arguments: Any) -> dict[str, Any]:
        if verb == "GET":
            return await super()._request(verb, path, **arguments)
        if self.is_late:
            await super()._request(verb, path, **arguments)
        raise Killed


async def _live_once(key: Key, is_late: bool) -> bool:
    """Run an operator until it dies at its first write, or has nothing to write; return whether it died."""
    client, asks = Mortal(), Asks()
    client.is_late = is_late
    store = Store(client, [key[0]], False, lambda key: None)
    shell = Shell(client, store, Metrics(), asks)
    store.start()
    try:
        await store.look_for_kinds()
        await shell.turn(key)
    except Killed:
        return True
    finally:
        await store.stop()
        await asks.close()
        await client.close()
    return False


def test_an_operator_that_dies_at_every_write_gets_there_all_the_same(
    plane: ControlPlane, cluster_admin: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster_admin))
    key, chance = (namespace, "chat"), random.Random(3)

    async def live_until(is_there: Callable[[], bool]) -> int:
        deaths, deadline = 0, time.monotonic() + 150
        while True:
            has_died = await _live_once(key, is_late=chance.random() < 0.8)
            deaths += has_died
            if not has_died and is_there():
                return deaths
            assert time.monotonic() < deadline, plane.check("get", "oks", "chat", "-n", namespace, "-o", "yaml")

    async def main() -> None:
        plane.put([sample("chat", namespace, staging={"replacement": "HandOver"})])
        assert await live_until(lambda: is_settled(plane, *key)) > 14
        old = {pod["metadata"]["uid"] for pod in pods(plane, namespace, "decode")}
        patch(plane, namespace, "chat", {"engine": {"blockSize": 32}, "networkPolicy": "Disabled"})
        assert await live_until(lambda: is_settled(plane, *key) and is_as_fresh(plane, *key, reads_nodes=False)) > 14
        assert old.isdisjoint(pod["metadata"]["uid"] for pod in pods(plane, namespace, "decode"))
        patch(plane, namespace, "chat", {"staging": {"cpu": "2"}})  # handed over
        assert await live_until(lambda: is_settled(plane, *key) and is_as_fresh(plane, *key, reads_nodes=False)) > 4
        for _ in range(20):
            await asyncio.sleep(0)  # connections end a little later than they are closed

    asyncio.run(main())
    read(ServiceStatus, plane.get("oks", "chat", "-n", namespace)["status"], "status")
