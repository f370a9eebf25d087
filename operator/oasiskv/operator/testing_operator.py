"""The operator as its own process, for tests."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from oasiskv.operator.resources import SERVICES
from oasiskv.operator.testing import SPEC
from oasiskv.operator.testing_cluster import ControlPlane
from oasiskv.operator.testing_helm import CHART, KUBE_VERSION, Helm

WAIT_S = 60
Start = Callable[..., "OperatorProcess"]
OWNED = "configmaps,services,statefulsets,deployments,poddisruptionbudgets,networkpolicies,inferenceservices"


class OperatorProcess:
    """One operator.

    Args:
        log: Where it logs.
        kubeconfig: Who it is.
        arguments: Of the command line.
        environment: Beside this process's.
    """

    def __init__(
        self, log: Path, kubeconfig: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        command = [sys.executable, "-m", "oasiskv.operator", *arguments]
        command += ["--health-address=127.0.0.1:0", "--metrics-address=127.0.0.1:0"]
        env = {**os.environ, "KUBECONFIG": str(kubeconfig), **(environment or {})}
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
        self._address = ""

    def logged(self) -> Iterator[Mapping[str, Any]]:
        """Yield what it logged; what is no JSON is an error's trace."""
        for line in self._log.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"level": "error", "message": line}

    def wait_ready(self) -> None:
        """Wait until it works."""
        wait_for(lambda: self.get("/readyz")[0] == 200, "the operator to be ready")

    def get(self, path: str) -> tuple[int, str]:
        """Return code and body of an answer; code 0 before it listens."""
        assert self.process.poll() is None, self._log.read_text()[-4000:]
        if not self._address:
            said = [each["addresses"][0] for each in self.logged() if each["message"] == "listening"]
            if not said:
                return 0, ""
            self._address = said[-1]
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        _, text = self.get("/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def wait_for(what: Callable[[], Any], name: str, wait_s: float = WAIT_S) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + wait_s
    while not what():
        assert time.monotonic() < deadline, f"expected {name} within {wait_s} s"
        time.sleep(0.1)


def chart_role(plane: ControlPlane, helm: Helm, namespace: str, *values: str) -> Path:
    """Give a service account the roles of the chart and nothing more; return its kubeconfig."""
    sets = [part for value in values for part in ("--set", value)]
    text = helm.check(
        "template", "oasiskv", str(CHART), "--namespace", namespace, f"--kube-version={KUBE_VERSION}", *sets
    )
    plane.kubectl("create", "namespace", namespace)
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    made = [each for each in yaml.safe_load_all(text) if each and each["kind"] in kinds]
    for each in made:
        if not each["kind"].startswith("Cluster"):
            each["metadata"].setdefault("namespace", namespace)
    plane.put(made)
    account = next(each for each in made if each["kind"] == "ServiceAccount")
    return plane.account(namespace, account["metadata"]["name"])


def forbidden(plane: ControlPlane) -> list[str]:
    """Return what accounts asked for and had no right to."""
    decision = "authorization.k8s.io/decision"
    return [
        f"{call['verb']} {call['requestURI']}"
        for call in plane.calls()
        if call.get("annotations", {}).get(decision) == "forbid"
    ]


def sample(name: str, namespace: str, **changes: Any) -> dict[str, Any]:
    """Return a service whose pods need nothing that a simulated host does not have."""
    spec = {**SPEC, "model": {**SPEC["model"], "uri": "hf://qwen/qwen3-8b"}, "staging": {}, "pullSecrets": []}
    metadata = {"name": name, "namespace": namespace}
    return {
        "apiVersion": "oasiskv.io/v1alpha1",
        "kind": "OasisKVService",
        "metadata": metadata,
        "spec": {**spec, **changes},
    }


def condition(plane: ControlPlane, namespace: str, name: str, kind: str) -> Mapping[str, Any]:
    """Return a condition of a service; an empty one as long as it has none."""
    # Asked over and over: without a process each time.
    status = plane.ask("GET", SERVICES.path(namespace, name)).get("status", {})
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


def is_settled(plane: ControlPlane, namespace: str, name: str) -> bool:
    """Return whether all pods of a service's newest spec serve."""
    made = plane.ask("GET", SERVICES.path(namespace, name))
    status = made.get("status", {})
    found = {each["type"]: each["status"] for each in status.get("conditions", ())}
    return bool(
        status.get("observedGeneration") == made["metadata"]["generation"]
        and all(found.get(kind) == "True" for kind in ("StagingReady", "PrefillReady", "DecodeReady", "EndpointReady"))
        and status["kvGeneration"] == status["servingKvGeneration"]
    )


def versions(plane: ControlPlane, namespace: str, kinds: str = OWNED) -> dict[str, str]:
    """Return the version of every object of services in a namespace."""
    items = plane.get(kinds, "-n", namespace, "-l", "oasiskv.io/service")["items"]
    return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"] for each in items}
