"""The chart, installed by a real helm on a real API server, for tests."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from oasiskv.operator.testing_server import ApiServer

CHART = Path(__file__).parents[3] / "helm/oasiskv"
NAMES = ("helm", "helm3", "helm4")
KUBE_VERSION = "1.36.0"
"""What helm is told where it talks to no API server."""
HOOK_S = 60


def helms() -> list[Path]:
    """Return every helm beside the binaries of the API server and in PATH, each once."""
    folders = os.pathsep.join([os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", "")])
    found = [Path(path).resolve() for name in NAMES if (path := shutil.which(name, path=folders))]
    return sorted(set(found))


class Helm:
    """One helm, with a home of its own.

    Args:
        binary: The program.
        home: A folder for what it keeps.
        kubeconfig: Of the cluster; None for what needs none.
    """

    def __init__(self, binary: Path, home: Path, kubeconfig: Path | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        # As people call it: helm 4 signs what it applies with the name of its program.
        self._binary = home / "helm"
        if not self._binary.exists():
            self._binary.symlink_to(binary)
        places = {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = {**os.environ, **places, "KUBECONFIG": str(kubeconfig or home / "none")}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run it."""
        command = [str(self._binary), *arguments]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)

    def check(self, *arguments: str) -> str:
        """Run it and return what it printed; it must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{done.stdout}"
        return done.stdout

    def template(self, *arguments: str, chart: Path = CHART) -> "subprocess.CompletedProcess[str]":
        """Render the chart without a cluster."""
        return self.run("template", "oasiskv", str(chart), f"--kube-version={KUBE_VERSION}", *arguments)

    def objects(self, *arguments: str, chart: Path = CHART) -> list[dict[str, Any]]:
        """Return the objects of the rendered chart."""
        done = self.template(*arguments, chart=chart)
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def older(folder: Path, version: str = "0.0.1", drop: str = "telemetry") -> Path:
    """Return a chart as an earlier version could have been: by another image, and without a field of services."""
    chart = Path(shutil.copytree(CHART, folder / f"chart-{version}"))
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": version, "appVersion": version}))
    for path in (chart / "crds").iterdir():
        made = yaml.load(path.read_text(), yaml.CSafeLoader)
        made["metadata"]["annotations"]["oasiskv.io/version"] = version
        made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].pop(drop, None)
        path.write_text(yaml.dump(made, Dumper=yaml.CSafeDumper))
    return chart


@contextmanager
def running_job(server: ApiServer, namespace: str, name: str, folder: Path) -> Iterator[list[str]]:
    """Run the next Job of that name as its pod would, with its service account; give what it printed."""
    printed: list[str] = []
    thread = threading.Thread(target=_run_job, args=(server, namespace, name, folder, printed))
    thread.start()
    try:
        yield printed
    finally:
        thread.join()


def _run_job(server: ApiServer, namespace: str, name: str, folder: Path, printed: list[str]) -> None:
    job = ("job", name, "-n", namespace)
    if server.kubectl("wait", "--for=create", f"--timeout={HOOK_S}s", *job).returncode:
        printed.append("no Job was made")
        return
    pod = json.loads(server.check("get", *job, "-o", "json"))["spec"]["template"]["spec"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(server.check("create", "token", pod["serviceAccountName"], "-n", namespace))
    (folder / "ca.crt").write_bytes(server.certificate.read_bytes())
    python, *command = pod["containers"][0]["command"]
    assert python == "python"
    place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    done = subprocess.run(
        [sys.executable, *command, f"--account={folder}"],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
    )
    printed += [*done.stdout.splitlines(), *done.stderr.splitlines()]
    server.check("patch", *job, "--subresource=status", "--type=merge", "-p", json.dumps(_ended(done.returncode == 0)))


def _ended(is_done: bool) -> dict[str, Any]:
    now = "2026-01-01T00:00:00Z"
    names = ("SuccessCriteriaMet", "Complete") if is_done else ("FailureTarget", "Failed")
    conditions = [{"type": name, "status": "True", "lastTransitionTime": now} for name in names]
    times = {"startTime": now} | ({"completionTime": now} if is_done else {})
    return {"status": {**times, "succeeded" if is_done else "failed": 1, "conditions": conditions}}
