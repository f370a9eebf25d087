"""A fake kubelet for tests: runs the containers of pods of one node as processes on loopback, without any container.

What the API server, the scheduler and the controllers see is what a real one would tell them. What a process sees
differs from a container in this:

- Each pod has an address of its own below 127.0.0.0/8, so its ports are those of its spec. Where its files say
  `0.0.0.0`, which would be all pods at once here, they get that address.
- There is no cluster DNS. A name such as `chat-prefill-1.llm.svc` in a pod's files becomes an address that follows from
  the name, and a pod that a headless Service selects has that Service's address: one pod per Service. Where a Service
  leads from one revision to the next, pods have addresses of their own, and connections to the Service's go on to them.
- Volumes are folders. Wherever files, the command line or the environment of a pod name a mounted path, they get the
  folder. `/dev/shm` stays the machine's, and a volume claim is the host path of its volume.
- A pod that has an account finds its token by KUBECONFIG.
- There is no image: `python` is the interpreter of the tests. Requests and limits only count for the scheduler.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oasiskv.operator.names import REVISION
from oasiskv.operator.testing import PRODUCT
from oasiskv.operator.testing_cluster import NODE_SIZE, ControlPlane
from oasiskv.operator.testing_forward import Forwarder

LABEL = "oasiskv.io/fake-kubelet"
"""Of its node, by which pods select it; also the taint that keeps all others away."""
POLL_S, LEASE_S, REFRESH_S, RESTART_S = 0.3, 5.0, 1.0, 10.0
IMAGE = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment that an image for a small machine without GPU and network would set."""

Object = Mapping[str, Any]


@dataclass(slots=True)
class _Pod:
    namespace: str
    name: str
    spec: Object
    address: str
    folder: Path
    paths: Mapping[str, str]
    """Folder by mounted path."""
    process: "subprocess.Popen[bytes] | None" = None
    started: str = ""
    is_ready: bool = False
    num_failures: int = 0
    """Of the readiness probe, one after the other."""
    num_starts: int = 0
    probe_at_s: float = 0.0
    start_at_s: float = 0.0
    end_at_s: float | None = None
    """When it is sent SIGTERM."""
    kill_at_s: float = 0.0
    said: Object = field(default_factory=dict)

    @property
    def container(self) -> Any:
        (container,) = self.spec["containers"]
        return container

    def signal(self, number: int) -> None:
        """Send a signal: to all of its processes if that ends them anyway, else to the first."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)


class FakeKubelet:
    """One node; `start` makes it and `stop` takes it away with all that runs on it.

    Args:
        plane: Where the node is one of.
        name: Of the node.
        logs: Folder for what the containers print.
        size: What the node offers.
    """

    def __init__(
        self, plane: ControlPlane, name: str, logs: Path, size: Mapping[str, str] = MappingProxyType(NODE_SIZE)
    ) -> None:
        self._plane, self._name, self._logs, self._size = plane, name, logs, dict(size)
        # Short, for the sockets in it.
        self._folder = Path(tempfile.mkdtemp(prefix="pods-"))
        self._numbers = itertools.count()
        self._salt = secrets.token_bytes(8)
        self._pods: dict[str, _Pod] = {}
        self._forwarders: dict[tuple[str, str], Forwarder] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-kubelet")
        self._lease_at_s = 0.0
        self._refresh_at_s = 0.0
        self.codes: dict[str, int] = {}
        """Exit codes of containers that were told to end, by pod."""
        self.errors: list[str] = []
        """What must not happen."""

    def start(self) -> None:
        """Make the node and begin to run what is bound to it."""
        now = _now()
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self._name,
                "labels": {
                    "kubernetes.io/hostname": self._name,
                    "topology.kubernetes.io/zone": "zone-a",
                    "nvidia.com/gpu.product": PRODUCT,
                    LABEL: "true",
                },
            },
            "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
            "status": {
                "allocatable": self._size,
                "capacity": self._size,
                "conditions": [
                    {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
                ],
            },
        }
        self._plane.put([node])
        self._thread.start()

    def stop(self) -> None:
        """End everything."""
        self._stop.set()
        self._thread.join()
        for pod in self._pods.values():
            if pod.process is not None:
                pod.signal(signal.SIGKILL)
                pod.process.wait()
        for forwarder in self._forwarders.values():
            forwarder.stop()
        for pod in self._pods.values():
            self._plane.kubectl("delete", "pod", pod.name, "-n", pod.namespace, "--force", "--grace-period=0")
        self._plane.kubectl("delete", "node", self._name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def where(self, namespace: str, service: str, port: int) -> str:
        """Return `host:port` of a ready pod behind a port of a Service, as the proxy of a node would choose it."""
        spec = self._get(f"/api/v1/namespaces/{namespace}/services/{service}")["spec"]
        target = next(each["targetPort"] for each in spec["ports"] if each["port"] == port)
        for pod in self._get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
            known = self._pods.get(pod["metadata"]["uid"])
            if known is not None and known.is_ready and _selects(spec, pod):
                return f"{known.address}:{_port(known.container, target)}"
        raise AssertionError(f"no pod is ready behind {service}")

    def num_starts(self, namespace: str) -> int:
        """Return how often containers of the pods of a namespace that run here were started."""
        return sum(pod.num_starts for pod in self._pods.values() if pod.namespace == namespace)

    def pods(self, namespace: str, role: str) -> list[str]:
        """Return `host` of each pod of a role that runs here."""
        selector = f"labelSelector=oasiskv.io/role={role}"
        found = self._get(f"/api/v1/namespaces/{namespace}/pods?{selector}")["items"]
        return [self._pods[each["metadata"]["uid"]].address for each in found if each["metadata"]["uid"] in self._pods]

    def printed(self) -> str:
        """Return the end of what each container printed."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(self._logs.glob("chat-*.log")))

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._sync()
            except urllib.error.HTTPError as error:
                with error:
                    # A pod may go, or change, while it is looked at.
                    if error.code not in (404, 409):
                        self.errors.append(f"{error.url}: {error.code} {error.read().decode()}")
            except OSError as error:
                self.errors.append(str(error))

    def _sync(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._lease_at_s:
            self._lease_at_s = now_s + LEASE_S
            self._renew()
        found = self._get(f"/api/v1/pods?fieldSelector=spec.nodeName={self._name}")["items"]
        for made in found:
            uid = made["metadata"]["uid"]
            if uid in self._pods or "deletionTimestamp" in made["metadata"]:
                continue
            try:
                self._pods[uid] = self._prepare(made)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != 404:  # it waits for what it mounts
                        raise
        by_uid = {made["metadata"]["uid"]: made for made in found}
        is_refresh = now_s >= self._refresh_at_s
        self._refresh_at_s = now_s + REFRESH_S if is_refresh else self._refresh_at_s
        for uid, pod in list(self._pods.items()):
            self._step(uid, pod, by_uid.get(uid), now_s)
            if is_refresh and uid in self._pods:
                self._mount_secrets(pod)

    def _step(self, uid: str, pod: _Pod, made: Object | None, now_s: float) -> None:
        if (made is None or "deletionTimestamp" in made["metadata"]) and pod.end_at_s is None:
            sleep_s = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            pod.end_at_s = now_s + sleep_s
            grace_s = 0 if made is None else made["metadata"].get("deletionGracePeriodSeconds", 30)
            pod.kill_at_s = now_s + grace_s
        is_running = pod.process is not None and pod.process.poll() is None
        if pod.end_at_s is not None:
            if is_running:
                self._end(pod, now_s)
            else:
                self._forget(uid, pod, made)
                return
        elif not is_running:
            if pod.process is not None:
                self.errors.append(f"{pod.name}: ended with {pod.process.returncode}")
                pod.process, pod.is_ready, pod.start_at_s = None, False, now_s + RESTART_S
            elif now_s >= pod.start_at_s:
                self._launch(pod, now_s)
        self._probe(pod, now_s)
        self._tell(pod)

    def _end(self, pod: _Pod, now_s: float) -> None:
        assert pod.end_at_s is not None
        if now_s >= pod.kill_at_s:
            self.errors.append(f"{pod.name}: expected it to end within its time")
            pod.signal(signal.SIGKILL)
        elif now_s >= pod.end_at_s:
            pod.signal(signal.SIGTERM)
            pod.end_at_s = float("inf")  # once: a second one means to end at once

    def _forget(self, uid: str, pod: _Pod, made: Object | None) -> None:
        if pod.process is not None:
            pod.signal(signal.SIGKILL)  # whatever it left behind
        if made is not None:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._plane.ask("DELETE", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", options)
        shutil.rmtree(pod.folder, ignore_errors=True)
        del self._pods[uid]
        if pod.process is not None:
            self.codes[pod.name] = pod.process.wait()

    def _prepare(self, made: Object) -> _Pod:
        metadata, spec = made["metadata"], made["spec"]
        namespace, folder = metadata["namespace"], self._folder / str(next(self._numbers))
        (container,) = spec["containers"]
        volumes = {each["name"]: each for each in spec["volumes"]}
        paths = {}
        for mount in container["volumeMounts"]:
            if mount["mountPath"] != "/dev/shm":
                paths[mount["mountPath"]] = str(self._volume(namespace, volumes[mount["name"]], folder))
        pod = _Pod(namespace, metadata["name"], spec, self._address_of(made), folder, paths)
        for mount in container["volumeMounts"]:
            if "configMap" in (volume := volumes[mount["name"]]):
                name = volume["configMap"]["name"]
                data = self._get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")["data"]
                for key, text in data.items():
                    Path(paths[mount["mountPath"]], key).write_text(self._here(pod, text))
        self._mount_secrets(pod)
        return pod

    def _volume(self, namespace: str, volume: Object, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            bound = self._get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")["spec"]["volumeName"]
            place: str = self._get(f"/api/v1/persistentvolumes/{bound}")["spec"]["hostPath"]["path"]
            return Path(place)
        path: Path = folder / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _mount_secrets(self, pod: _Pod) -> None:
        """Write the Secrets that a pod mounts, each as a whole: names point into a folder that is exchanged."""
        for volume in pod.spec["volumes"]:
            if "secret" not in volume:
                continue
            made = self._get(f"/api/v1/namespaces/{pod.namespace}/secrets/{volume['secret']['secretName']}")
            folder, version = pod.folder / volume["name"], made["metadata"]["resourceVersion"]
            if (folder / version).exists():
                continue
            (folder / version).mkdir()
            for key, text in made["data"].items():
                (folder / version / key).write_bytes(base64.b64decode(text))
                if not (folder / key).is_symlink():
                    (folder / key).symlink_to(f"..data/{key}")
            (folder / "..next").symlink_to(version)
            (folder / "..next").replace(folder / "..data")

    def _launch(self, pod: _Pod, now_s: float) -> None:
        container = pod.container
        command = [self._here(pod, word) for word in [*container["command"], *container.get("args", ())]]
        command = [sys.executable if word == "python" else word for word in command]
        env = os.environ | IMAGE | {"VLLM_HOST_IP": pod.address}
        env |= {each["name"]: self._here(pod, each["value"]) for each in container.get("env", ()) if "value" in each}
        fields = {"metadata.name": pod.name, "metadata.namespace": pod.namespace}
        for each in container.get("env", ()):
            if "fieldRef" in each.get("valueFrom", {}):
                env[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        if any("projected" in volume for volume in pod.spec["volumes"]):
            # Where it looks for the token of its account in a container, no process here could have one of its own.
            env["KUBECONFIG"] = str(self._plane.account(pod.namespace, pod.spec["serviceAccountName"]))
        with (self._logs / f"{pod.name}-{pod.num_starts}.log").open("wb") as log:
            pod.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, cwd=pod.folder, start_new_session=True
            )
        pod.started, pod.start_at_s, pod.num_starts = _now(), now_s, pod.num_starts + 1

    def _here(self, pod: _Pod, text: str) -> str:
        """Return a text of a pod with what a container would have for itself: see above."""
        text = text.replace("0.0.0.0", pod.address)
        text = re.sub(r"\b([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b", lambda found: self.address(found[2], found[1]), text)
        # In one go: a folder's own path may begin as a mounted one does.
        paths = "|".join(map(re.escape, sorted(pod.paths, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({paths})(?![\w.-])", lambda found: pod.paths[found[1]], text)

    def _address_of(self, made: Object) -> str:
        metadata = made["metadata"]
        for service in self._get(f"/api/v1/namespaces/{metadata['namespace']}/services")["items"]:
            spec, place = service["spec"], (metadata["namespace"], service["metadata"]["name"])
            if spec.get("clusterIP") != "None":
                continue
            of_any = {key: value for key, value in spec["selector"].items() if key != REVISION}
            if of_any != spec["selector"] and _selects({"selector": of_any}, made):
                if place not in self._forwarders:
                    (port,) = (each["port"] for each in spec["ports"])
                    where = functools.partial(self.where, *place, port)
                    self._forwarders[place] = Forwarder((self.address(*place), port), where)
            elif _selects(spec, made):
                return self.address(*place)
        return self.address(metadata["namespace"], metadata["uid"])

    def address(self, namespace: str, name: str) -> str:
        """Return what a Service's name stands for."""
        digest = hashlib.blake2b(f"{namespace}/{name}".encode(), key=self._salt, digest_size=3).digest()
        return ".".join(["127", *(str(1 + byte % 254) for byte in digest)])

    def _probe(self, pod: _Pod, now_s: float) -> None:
        probe = pod.container["readinessProbe"]
        if pod.process is None or now_s < pod.probe_at_s:
            return
        pod.probe_at_s = now_s + probe.get("periodSeconds", 10)
        port = _port(pod.container, probe["httpGet"]["port"])
        try:
            url = f"http://{pod.address}:{port}{probe['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)):
                pod.num_failures, pod.is_ready = 0, True
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            pod.num_failures += 1
            pod.is_ready = pod.is_ready and pod.num_failures < probe.get("failureThreshold", 3)

    def _tell(self, pod: _Pod) -> None:
        now, state = _now(), {"running": {"startedAt": pod.started}}
        if pod.process is None:
            state = {"waiting": {"reason": "CrashLoopBackOff"}} if pod.num_starts else {"waiting": {}}
        ready = {"Initialized": True, "ContainersReady": pod.is_ready, "Ready": pod.is_ready}
        said = {"ready": pod.is_ready, "restartCount": max(0, pod.num_starts - 1), "state": state}
        if said == pod.said:
            return
        container = {"name": pod.container["name"], "image": pod.container["image"], "imageID": "none", **said}
        status = {
            "phase": "Running" if pod.num_starts else "Pending",
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "startTime": pod.started or now,
            "conditions": [
                {"type": kind, "status": str(holds), "lastTransitionTime": now} for kind, holds in ready.items()
            ],
            "containerStatuses": [container],
        }
        metadata = {"name": pod.name, "namespace": pod.namespace}
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        self._apply(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status", made)
        pod.said = said

    def _renew(self) -> None:
        spec = {"holderIdentity": self._name, "leaseDurationSeconds": 40}
        spec |= {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        metadata = {"name": self._name, "namespace": "kube-node-lease"}
        made = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        self._apply(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._name}", made)

    def _get(self, path: str) -> Any:
        return self._plane.ask("GET", path)

    def _apply(self, path: str, made: Object) -> None:
        self._plane.ask("PATCH", f"{path}?fieldManager=fake-kubelet&force=true", made, "application/apply-patch+yaml")


def _selects(spec: Object, pod: Object) -> bool:
    """Return whether a Service selects a pod."""
    wanted = spec.get("selector", {})
    return bool(wanted) and wanted.items() <= pod["metadata"].get("labels", {}).items()


def _port(container: Object, port: int | str) -> int:
    """Return the number of a port that may be given by name."""
    if isinstance(port, int):
        return port
    return next(int(each["containerPort"]) for each in container["ports"] if each["name"] == port)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
