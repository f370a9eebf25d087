import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from oasiskv.operator.testing_cluster import ALL, ControlPlane
from oasiskv.operator.testing_helm import Helm, helms
from oasiskv.operator.testing_operator import OperatorProcess
from oasiskv.operator.testing_pods import put_secret
from oasiskv.operator.testing_server import BINARIES, ApiServer
from oasiskv.services.rpc.testing import make_certificate

NUM_NODES = 100


def _missing(what: str) -> None:
    """Skip with a word on how to get what is missing, but where `.ci/run` has found it."""
    if os.environ.get("OASISKV_REQUIRE_CONTROL_PLANE"):
        pytest.fail(what)
    pytest.skip(what)


def _binaries(names: tuple[str, ...]) -> Path:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    missing = [name for name in names if not os.access(Path(folder, name), os.X_OK)]
    if not folder or missing:
        _missing(
            f"KUBEBUILDER_ASSETS: expected a folder with {', '.join(names)}, got {folder!r} without"
            f" {', '.join(missing)}; setup-envtest of controller-runtime fetches the first three, the others are built"
            " or released by Kubernetes, kwok and KServe"
        )
    return Path(folder)


@pytest.fixture(scope="session")
def binaries() -> Path:
    """Return the folder of binaries that KUBEBUILDER_ASSETS names."""
    return _binaries(BINARIES)


@pytest.fixture(scope="session")
def cluster(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path_factory.mktemp("cluster"), binaries)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Return a whole control plane with a hundred hosts."""
    made = ControlPlane(tmp_path_factory.mktemp("plane"), _binaries(ALL))
    try:
        made.start()
        made.check("create", "namespace", "system")  # of the operators
        made.add_nodes(NUM_NODES - 2)
        made.add_nodes(1, "a100", **{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"})
        made.add_nodes(1, "elsewhere", "zone-b")
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def cluster_admin(plane: ControlPlane) -> Path:
    """Return a kubeconfig of an account that may do everything."""
    plane.check("create", "serviceaccount", "admin", "-n", "default")
    plane.check(
        "create", "clusterrolebinding", "admin", "--clusterrole=cluster-admin", "--serviceaccount=default:admin"
    )
    return plane.account("default", "admin")


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return a helm that renders the chart."""
    found = helms()
    if not found:
        _missing("helm: expected helm, helm3 or helm4 in KUBEBUILDER_ASSETS or PATH, got none")
    return Helm(found[0], tmp_path_factory.mktemp("chart"))


@pytest.fixture
def certify(plane: ControlPlane) -> Callable[..., None]:
    """Return what makes a certificate, of an authority of its own, and puts it into the Secret that pods mount."""

    def certify(namespace: str, folder: Path, name: str, addresses: Sequence[str] = ()) -> None:
        folder.mkdir()
        make_certificate(folder, name, make_certificate(folder, "authority"), addresses=addresses)
        put_secret(plane, namespace, folder, name)

    return certify


@pytest.fixture
def start(plane: ControlPlane, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Return what starts an operator; each is ended with the test."""
    made: list[OperatorProcess] = []

    def start(kubeconfig: Path, *arguments: str, namespace: str = "system", wait: bool = True) -> OperatorProcess:
        log = tmp_path / f"operator-{len(made)}.log"
        environment = {"POD_NAMESPACE": namespace, "POD_NAME": f"operator-{len(made)}"}
        made.append(OperatorProcess(log, kubeconfig, *arguments, environment=environment))
        if wait:
            made[-1].wait_ready()
        return made[-1]

    yield start
    codes = [each.stop() for each in made]
    assert not any(codes), codes
    for each in made:
        assert [line for line in each.logged() if line["level"] == "error"] == []
