"""A real API server with etcd for tests, run from a folder of binaries as controller-runtime's envtest has it."""

import json
import os
import secrets
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

BINARIES = ("etcd", "kube-apiserver", "kubectl")
CRDS = Path(__file__).parents[3] / "helm/oasiskv/crds"
START_S = 60


class ApiServer:
    """An API server, spoken to by kubectl."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self._folder, self._binaries = folder, binaries
        self._processes: list[subprocess.Popen[bytes]] = []
        self.kubeconfig = folder / "kubeconfig"
        """The administrator's."""
        self.certificate = folder / "certs/apiserver.crt"
        self.port = 0
        self._token = ""

    def start(self) -> None:
        """Start both processes and wait until the API server answers."""
        ports = [_free_port() for _ in range(3)]
        self.port = ports[2]
        client, peer = (f"http://127.0.0.1:{port}" for port in ports[:2])
        token = self._token = secrets.token_hex(16)
        (self._folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        _write_key(self._folder / "sa.key", self._folder / "sa.pub")
        self._run(
            "etcd",
            data_dir=self._folder / "etcd",
            unsafe_no_fsync="true",
            listen_client_urls=client,
            advertise_client_urls=client,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"default={peer}",
        )
        self._run(
            "kube-apiserver",
            etcd_servers=client,
            bind_address="127.0.0.1",
            secure_port=ports[2],
            cert_dir=self._folder / "certs",
            token_auth_file=self._folder / "tokens.csv",
            service_account_issuer="https://kubernetes.default.svc",
            service_account_key_file=self._folder / "sa.pub",
            service_account_signing_key_file=self._folder / "sa.key",
            authorization_mode="RBAC",
            service_cluster_ip_range="10.0.0.0/16",
            endpoint_reconciler_type="none",
            **self._more_flags(),
        )
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"https://127.0.0.1:{ports[2]}", "insecure-skip-tls-verify": True}}
            ],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(config))
        deadline = time.monotonic() + START_S
        while self.kubectl("get", "--raw", "/readyz").returncode:
            assert time.monotonic() < deadline, f"no API server after {START_S} s: see {self._folder}"
            assert all(process.poll() is None for process in self._processes), f"a process ended: see {self._folder}"
            time.sleep(0.2)
        self.check("create", "namespace", "llm")
        self.check("apply", "-f", str(CRDS))  # without --server-side: what most people type has to work
        # All at once: the API server lets each definition rest for five seconds before it is used.
        self._define_more()
        self.wait_for_kinds()

    def stop(self) -> None:
        """End both processes, etcd last: an API server without one does not end."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_for_kinds(self) -> None:
        """Wait until every kind that was defined can be used."""
        deadline = time.monotonic() + START_S
        # It fails at once over a definition that has no status yet.
        while (done := self.kubectl("wait", "--for=condition=established", "--timeout=10s", "crd", "--all")).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.2)

    def drop_definitions(self) -> None:
        """Take the definitions away, and with them every service and profile."""
        plurals = [each for each in ("oasiskvservices", "oasiskvprofiles") if self._is_defined(each)]
        for each in plurals:
            # The API server empties a kind before it lets its definition go. If it cannot list it at that moment, since
            # it has only begun to serve it or has just got another schema, it tries again only five minutes later.
            self._wait_until_listed(each)
        if plurals:
            self.check("delete", "crd", "--timeout=60s", *(f"{each}.oasiskv.io" for each in plurals))

    def _is_defined(self, plural: str) -> bool:
        return self.kubectl("get", "crd", f"{plural}.oasiskv.io").returncode == 0

    def _wait_until_listed(self, plural: str) -> None:
        deadline = time.monotonic() + START_S
        while (done := self.kubectl("get", "--raw", f"/apis/oasiskv.io/v1alpha1/{plural}")).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.1)

    def kubectl(self, *arguments: str, put: Mapping[str, Any] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run kubectl; `put` goes to its standard input."""
        command = [str(self._binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        text = None if put is None else json.dumps(put)
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    def check(self, *arguments: str, put: Mapping[str, Any] | None = None) -> str:
        """Run kubectl and return what it printed; it must succeed."""
        done = self.kubectl(*arguments, put=put)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, verb: str, path: str, body: Mapping[str, Any] | None = None, kind: str = "application/json") -> Any:
        """Send one request as the administrator, which takes a tenth of what kubectl takes; return the answer.

        Raises:
            urllib.error.HTTPError: It was no success.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        request = urllib.request.Request(f"https://127.0.0.1:{self.port}{path}", data, headers, method=verb)
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return json.loads(answer.read())

    def watch(self, path: str, seconds: int) -> Iterator[Any]:
        """Yield the objects of a path that are there, and then every change, as events of a watch, for so long."""
        headers = {"Authorization": f"Bearer {self._token}"}
        mark = "&" if "?" in path else "?"
        url = f"https://127.0.0.1:{self.port}{path}{mark}watch=true&timeoutSeconds={seconds}"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=seconds + 30, context=self._context) as answer:
            for line in answer:
                yield json.loads(line)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.check_hostname = False  # the certificate is for other names
        return context

    def _define_more(self) -> None:
        """Make further definitions."""

    def _more_flags(self) -> Mapping[str, object]:
        """Return further flags of the API server."""
        return {}

    def _run(self, name: str, environment: Mapping[str, str] | None = None, /, **flags: object) -> None:
        command = [str(self._binaries / name)]
        command += [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        with (self._folder / f"{name}.log").open("wb") as log:
            env = {**os.environ, **(environment or {})}
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _write_key(private: Path, public: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    none = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, none))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
