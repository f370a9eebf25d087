"""The operator where what it watches comes late, goes, and comes again: definitions, and rights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_helm import Helm
from oasiskv.operator.testing_operator import OperatorProcess, Start, chart_role, is_settled, sample, wait_for
from oasiskv.operator.testing_server import CRDS, ApiServer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def undefined(cluster: ApiServer) -> Iterator[ApiServer]:
    """Return an API server without our definitions; it has them again at the end."""
    cluster.drop_definitions()
    yield cluster
    define(cluster)


def define(cluster: ApiServer) -> None:
    cluster.check("apply", "-f", str(CRDS))
    cluster.wait_for_kinds()


def test_services_are_looked_after_whenever_their_definitions_come(undefined: ApiServer, tmp_path: Path) -> None:
    operator = OperatorProcess(tmp_path / "log", undefined.kubeconfig, environment={"POD_NAMESPACE": "llm"})
    try:
        for name in ("first", "second"):
            wait_for(lambda: "got no definition" in operator.get("/readyz")[1], "the operator to say what it lacks")
            assert operator.get("/healthz")[0] == 200
            define(undefined)
            operator.wait_ready()
            undefined.check("apply", "-f", "-", put=sample(name, "llm"))

            def generation(name: str = name) -> str:
                path = "jsonpath={.status.observedGeneration}"
                return undefined.check("get", "oks", name, "-n", "llm", "-o", path)

            # Not by the turn that each service gets every five minutes.
            wait_for(lambda: generation() == "1", f"{name} to be looked at")
            undefined.drop_definitions()
    finally:
        assert operator.stop() == 0


def test_a_namespace_that_may_not_be_read_any_more_holds_up_no_other(
    plane: ControlPlane, chart: Helm, start: Start
) -> None:
    names = ("kept", "lost")
    for name in names:
        plane.check("create", "namespace", name)
    arguments = [f"--namespace={name}" for name in names]
    account = chart_role(plane, chart, "partly", "operator.watchNamespaces={kept,lost}")
    binding = plane.get("rolebinding", "oasiskv-operator", "-n", "lost")
    plane.check("delete", "rolebinding", "oasiskv-operator", "-n", "lost")  # as when the namespace was deleted
    operator = start(account, *arguments, "--resync-seconds=5", namespace="partly")
    plane.put([sample("chat", name) for name in names])
    wait_for(lambda: is_settled(plane, "kept", "chat"), "the namespace that may be read")
    assert (operator.get("/readyz")[0], operator.get("/healthz")[0]) == (200, 200)
    assert "status" not in plane.get("oks", "chat", "-n", "lost")
    metadata = {"name": binding["metadata"]["name"], "namespace": "lost"}
    plane.put([{**binding, "metadata": metadata}])
    wait_for(lambda: is_settled(plane, "lost", "chat"), "the namespace that may be read again", 120)
    for name in names:
        plane.check("delete", "oks", "chat", "-n", name)
