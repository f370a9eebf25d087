"""The operator on an API server whose definitions come late, go, and come again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.operator.testing_operator import OperatorProcess, sample, wait_for
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
