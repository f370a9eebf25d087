import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasiskv.operator.testing_server import BINARIES, ApiServer


@pytest.fixture(scope="session")
def binaries() -> Path:
    """Return the folder of binaries that KUBEBUILDER_ASSETS names."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    missing = [name for name in BINARIES if not os.access(Path(folder, name), os.X_OK)]
    if not folder or missing:
        pytest.skip(
            f"KUBEBUILDER_ASSETS: expected a folder with {', '.join(BINARIES)}, got {folder!r}; setup-envtest of"
            " controller-runtime fetches one"
        )
    return Path(folder)


@pytest.fixture(scope="session")
def cluster(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path_factory.mktemp("cluster"), binaries)
    try:
        made.start()
        yield made
    finally:
        made.stop()
