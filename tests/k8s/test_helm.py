"""The chart by real helm on a real API server: it is taken, upgrades keep what runs, uninstall leaves nothing."""

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasiskv.operator.facts import Facts
from oasiskv.operator.reconcile import reconcile
from oasiskv.operator.testing import SPEC
from oasiskv.operator.testing_helm import CHART, Helm, helms, older, running_job
from oasiskv.operator.testing_server import ApiServer

pytestmark = pytest.mark.timeout(240)
MONITORING = ["monitoring.podMonitor=true", "monitoring.rules=true", "monitoring.dashboards.enabled=true"]
MODES: dict[str, list[str]] = {
    "as it is": [],
    "all": [
        *MONITORING,
        "redis.enabled=true",
        "otel.endpoint=http://otel:4317",
        "operator.priorityClassName=system-cluster-critical",
        "operator.nodeSelector.disk=ssd",
        "operator.tolerations[0].key=a,operator.tolerations[0].operator=Exists",
        "operator.pullSecrets={a,b}",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
    ],
    "of a namespace": ["operator.watchNamespaces={a}"],
    "of namespaces, with nodes": ["operator.watchNamespaces={a,b}", "operator.readNodes=true"],
    "with an account that is there": ["rbac.create=false", "serviceAccount=there"],
    "by digest": [f"operator.digest=sha256:{'0' * 64}", "networkPolicy.enabled=false", "crds.upgrade=false"],
}
BAD = {
    "operatr.image=a": "operatr",
    "operator.imge=a": "imge",
    "operator.logLevel=loud": "logLevel",
    "operator.image=Bad Name": "image",
    "operator.tag=latest": "tag",
    "operator.digest=sha256:1": "digest",
    "operator.watchNamespaces={A_B}": "watchNamespaces",
    "operator.resources.limit.cpu=1": "limit",
    "operator.resources.limits.cpu=many": "cpu",
    "operator.tolerations[0].keys=a": "keys",
    "operator.tolerations[0].effect=Never": "effect",
    "otel.endpoint=otel:4317": "endpoint",
    "redis.url=redis://user:secret@host:6379": "url",
    "redis.memory=1": "memory",
    "monitoring.dashboards.enabled=perhaps": "enabled",
    "networkPolicy.metricsFrom[0].pods=a": "pods",
    "rbac.create=false": "serviceAccount: expected the name of an account",
    f"operator.tag=v1,operator.digest=sha256:{'0' * 64}": "operator.tag: expected it or operator.digest",
    "redis.enabled=true,redis.url=redis://host:6379": "redis.url: expected it or redis.enabled",
    f"services.{'a' * 36}.image=a:1": "of at most 35 characters, got 36",
    "services.chat.imagee=a:1": "services.chat.imagee: expected one of decode, endpoint, ",
    "services.chat.decode.replica=2": "services.chat.decode.replica: expected one of drain, ",
    "services.chat.placement.tolerations[0].keys=a": "services.chat.placement.tolerations[0].keys: expected one of ",
    "profiles.a.network.fabrics=TCP": "profiles.a.network.fabrics: expected one of fabric, ",
    "operator.watchNamespaces={other},services.chat.image=a:1": "operator.watchNamespaces: expected",
}
OTHER: dict[str, Any] = {
    "operator.image": "elsewhere/operator",
    "operator.tag": "other",
    "operator.digest": f"sha256:{'1' * 64}",
    "operator.pullPolicy": "Always",
    "operator.pullSecrets": ["c"],
    "operator.watchNamespaces": ["default"],
    "operator.readNodes": True,
    "operator.logLevel": "debug",
    "operator.resources": {"limits": {"cpu": 2}},
    "operator.nodeSelector": {"a": "b"},
    "operator.tolerations": [{"key": "b", "operator": "Exists"}],
    "operator.priorityClassName": "high",
    "crds.upgrade": False,
    "rbac.create": False,
    "serviceAccount": "there",
    "otel.endpoint": "http://other:4317",
    "monitoring.podMonitor": False,
    "monitoring.rules": False,
    "monitoring.dashboards.enabled": False,
    "monitoring.dashboards.labels": {"a": "b"},
    "monitoring.dashboards.annotations": {"folder": "KV"},
    "redis.enabled": False,
    "redis.url": "redis://other:6379",
    "redis.image": "elsewhere/redis",
    "redis.tag": "7.4.0",
    "redis.digest": f"sha256:{'1' * 64}",
    "redis.pullPolicy": "Always",
    "redis.memory": "1Gi",
    "networkPolicy.enabled": False,
    "networkPolicy.metricsFrom": [],
    "profiles": {"h100": {}},
    "services": {"other": {}},
}
"""Another value of each value."""
NEEDS = {
    "operator.readNodes": ['--set-json=operator.watchNamespaces=["default"]'],
    "rbac.create": ['--set-json=serviceAccount="there"'],
    "redis.url": ["--set-json=redis.enabled=false"],
}
"""What else is said where a value counts."""
EVERYTHING = (
    "pods,services,deployments,replicasets,statefulsets,daemonsets,configmaps,secrets,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,networkpolicies,jobs,"
    "poddisruptionbudgets,leases,priorityclasses,mutatingwebhookconfigurations,validatingwebhookconfigurations,"
    "podmonitors,prometheusrules"
)


def sets(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


@pytest.fixture(scope="module", params=helms() or [Path("none")], ids=lambda path: path.name)
def binary(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    if path not in helms():
        why = "helm: expected helm, helm3 or helm4 in KUBEBUILDER_ASSETS or PATH, got none"
        if os.environ.get("OASISKV_REQUIRE_CONTROL_PLANE"):
            pytest.fail(why)
        pytest.skip(why)
    return path


@pytest.fixture(scope="module")
def helm(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(binary, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def server(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Return an API server of this module's own: definitions come and go in it."""
    made = ApiServer(tmp_path_factory.mktemp("server"), binaries)
    try:
        made.start()
        for name in ("a", "b"):  # of MODES
            made.check("create", "namespace", name)
        items = [stand_in("PodMonitor"), stand_in("PrometheusRule")]
        made.check("apply", "-f", "-", put={"apiVersion": "v1", "kind": "List", "items": items})
        made.wait_for_kinds()
        yield made
    finally:
        made.stop()


def make_namespace(server: ApiServer) -> str:
    """Make a namespace of the restricted level that nothing was in."""
    name = f"n-{uuid.uuid4()}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    put = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    server.check("create", "-f", "-", put=put)
    return name


@pytest.fixture
def namespace(server: ApiServer) -> str:
    return make_namespace(server)


@pytest.fixture
def other(server: ApiServer) -> str:
    return make_namespace(server)


@pytest.fixture
def installer(server: ApiServer, binary: Path, tmp_path: Path) -> Iterator[Helm]:
    """Return helm on a cluster without our definitions, as most are; what it installed goes at the end."""
    server.drop_definitions()
    helm = Helm(binary, tmp_path, server.kubeconfig)
    yield helm
    for release in json.loads(helm.check("list", "-A", "-o", "json")):
        helm.check("uninstall", release["name"], f"--namespace={release['namespace']}")
    server.drop_definitions()


def stand_in(kind: str) -> dict[str, Any]:
    """Return a definition for a kind of the Prometheus operator that takes any spec."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def listed(server: ApiServer) -> set[str]:
    template = 'jsonpath={range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name}{"\\n"}{end}'
    found = server.check("get", EVERYTHING, "-A", "-o", template).splitlines()
    # The API server makes and renews these by itself, when it likes.
    return {line for line in found if line and not line.startswith(("Lease kube-system/", "ConfigMap kube-system/"))}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_passes_lint(mode: list[str], helm: Helm) -> None:
    helm.check("lint", "--strict", "--kube-version=1.36.0", str(CHART), *sets(mode))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_is_taken_by_the_api_server(mode: list[str], helm: Helm, server: ApiServer, namespace: str) -> None:
    objects = helm.objects(*sets(mode), f"--namespace={namespace}")
    items = [each for each in objects if each["kind"] != "Pod"]  # pods want their account to be there
    for each in items:
        each["metadata"].setdefault("namespace", namespace)
    put = {"apiVersion": "v1", "kind": "List", "items": items}
    done = server.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", put=put)
    assert done.returncode == 0, done.stderr
    assert "would violate PodSecurity" not in done.stderr
    assert len(done.stdout.splitlines()) == len(items)


@pytest.mark.parametrize(("value", "name"), BAD.items(), ids=BAD)
def test_a_bad_value_is_refused_by_its_name(value: str, name: str, helm: Helm) -> None:
    done = helm.template("--set", value)
    assert done.returncode
    assert name in done.stderr


def test_every_value_takes_effect(helm: Helm, tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def leaves(of: Any, path: str = "") -> Iterator[str]:
        if not isinstance(of, dict) or not of or path.endswith((".resources", ".labels")):
            yield path[1:]
            return
        for name, each in of.items():
            yield from leaves(each, f"{path}.{name}")

    assert set(leaves(values)) == OTHER.keys()
    switches = {"podMonitor": True, "rules": True, "dashboards": {"enabled": True}}
    base = {"monitoring": switches, "redis": {"enabled": True}, "services": {"chat": {}}}
    base["networkPolicy"] = {"metricsFrom": [{"podSelector": {}}]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(base))
    before: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for path, value in OTHER.items():
        given = (f"-f={tmp_path / 'values.yaml'}", *NEEDS.get(path, ()))
        if given not in before:
            before[given] = helm.objects(*given)
        assert helm.objects(*given, f"--set-json={path}={json.dumps(value)}") != before[given], path


def test_every_pod_passes_the_restricted_level(helm: Helm, server: ApiServer, namespace: str) -> None:
    objects = helm.objects(*sets(MODES["all"]), "--set", "services.chat.image=a:1")
    specs = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Pod"}
    for each in objects:
        if each["kind"] in ("Deployment", "Job"):
            specs[each["metadata"]["name"]] = each["spec"]["template"]["spec"]
    assert len(specs) == 5
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    server.check("create", "-n", namespace, "-f", "-", put=account)
    items = []
    for name, spec in specs.items():
        # Their own accounts are not there.
        spec = {key: value for key, value in spec.items() if key != "serviceAccountName"}
        items.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    put = {"apiVersion": "v1", "kind": "List", "items": items}
    server.check("create", "--dry-run=server", "-n", namespace, "-f", "-", put=put)


def test_a_namespaced_operator_has_no_object_and_no_right_elsewhere(
    installer: Helm, server: ApiServer, namespace: str, other: str
) -> None:
    values = sets([f"operator.watchNamespaces={{{namespace}}}", "crds.upgrade=false"])
    objects = installer.objects(*values, f"--namespace={namespace}")
    assert not [each["kind"] for each in objects if each["kind"].startswith("Cluster")]
    assert {each["metadata"].get("namespace", namespace) for each in objects} == {namespace}
    installer.check("install", "one", str(CHART), f"--namespace={namespace}", *values)
    account = f"--as=system:serviceaccount:{namespace}:one-oasiskv-operator"
    for verb, what in (("patch", "deployments.apps"), ("list", "oasiskvservices"), ("delete", "configmaps")):
        assert server.kubectl("auth", "can-i", verb, what, account, "-n", namespace).returncode == 0
        assert server.kubectl("auth", "can-i", verb, what, account, "-n", other).returncode
    for verb, what in (("list", "nodes"), ("list", "secrets"), ("create", "pods"), ("update", "leases")):
        assert server.kubectl("auth", "can-i", verb, what, account, "-n", namespace).returncode


def test_two_releases_of_one_name_in_two_namespaces_do_not_meet(
    installer: Helm, server: ApiServer, namespace: str, other: str
) -> None:
    before = listed(server)
    for each in (namespace, other):
        installer.check("install", "oasiskv", str(CHART), f"--namespace={each}")
    for each in (namespace, other):
        installer.check("uninstall", "oasiskv", f"--namespace={each}")
    assert listed(server) == before


def test_from_nothing_to_nothing_with_a_service_in_between(
    installer: Helm, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    before = listed(server)
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"services": {"chat": SPEC}, "profiles": {"h100": {"network": SPEC["network"]}}}))
    release = ("oasiskv", str(CHART), f"--namespace={namespace}", f"-f={values}", *sets(MODES["all"]))
    # One command: the definitions are there before the service is.
    installer.check("install", *release)
    assert server.check("get", "oks,okp", "-n", namespace, "-o", "name").split() == [
        "oasiskvservice.oasiskv.io/chat",
        "oasiskvprofile.oasiskv.io/h100",
    ]
    with running_job(server, namespace, "oasiskv-definitions", tmp_path / "account") as printed:
        installer.check("upgrade", *release)
    assert printed == ["oasiskvservices: 0.1.0 -> 0.1.0", "oasiskvprofiles: 0.1.0 -> 0.1.0"]
    installer.check("uninstall", "oasiskv", f"--namespace={namespace}")
    assert listed(server) == before


def test_an_upgrade_brings_new_fields_and_changes_nothing_that_runs(
    installer: Helm, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    installer.check("install", "oasiskv", str(older(tmp_path)), f"--namespace={namespace}")
    service: dict[str, Any] = {"apiVersion": "oasiskv.io/v1alpha1", "kind": "OasisKVService", "spec": dict(SPEC)}
    service["metadata"] = {"name": "chat", "namespace": namespace}
    unknown = server.kubectl("create", "--validate=strict", "-f", "-", put=service)
    assert 'unknown field "spec.telemetry"' in unknown.stderr
    known = {name: value for name, value in SPEC.items() if name != "telemetry"}
    server.check("create", "-f", "-", put=service | {"spec": known})
    children = apply_children(server, namespace)
    with running_job(server, namespace, "oasiskv-definitions", tmp_path / "account") as printed:
        installer.check("upgrade", "oasiskv", str(CHART), f"--namespace={namespace}")
    assert printed == ["oasiskvservices: 0.0.1 -> 0.1.0", "oasiskvprofiles: 0.0.1 -> 0.1.0"]
    assert versions(server, namespace, children) == children
    assert apply_children(server, namespace) == children
    # The API server may take a moment to serve what it has taken.
    wait = ("wait", "oks/chat", "-n", namespace, "--for=jsonpath={.spec.telemetry.otlpEndpoint}", "--timeout=30s")
    server.check("patch", "oks", "chat", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": dict(SPEC)}))
    server.check(*wait)


def apply_children(server: ApiServer, namespace: str) -> dict[str, str]:
    """Write what the operator would, and return the version of each object."""
    made = json.loads(server.check("get", "oks", "chat", "-n", namespace, "-o", "json"))
    objects = reconcile(made, Facts(now="2026-01-01T00:00:00Z", kinds=frozenset())).apply
    put = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    server.check("apply", "--server-side", "--field-manager=oasiskv-operator", "-f", "-", put=put)
    return versions(server, namespace, [f"{each['kind']}/{each['metadata']['name']}".lower() for each in objects])


def versions(server: ApiServer, namespace: str, names: Iterable[str]) -> dict[str, str]:
    template = 'jsonpath={range .items[*]}{.metadata.resourceVersion}{"\\n"}{end}'
    found = server.check("get", *names, "-n", namespace, "-o", template).split()
    return dict(zip(names, found, strict=True))


def test_a_release_of_an_older_version_leaves_newer_definitions(
    installer: Helm, server: ApiServer, namespace: str, other: str, tmp_path: Path
) -> None:
    installer.check("install", "new", str(older(tmp_path, "9.10.0", drop="none")), f"--namespace={namespace}")
    # As a second release has to be: of helm 4, `install` replaces definitions by its own.
    installer.check("install", "old", str(CHART), "--skip-crds", f"--namespace={other}")
    with running_job(server, other, "old-oasiskv-definitions", tmp_path / "account") as printed:
        installer.check("upgrade", "old", str(CHART), f"--namespace={other}")
    assert printed[0] == "oasiskvservices: stays at 9.10.0, which is newer than 0.1.0"


def test_definitions_stay_and_the_next_release_takes_them(
    installer: Helm, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    installer.check("install", "oasiskv", str(older(tmp_path)), f"--namespace={namespace}")
    with running_job(server, namespace, "oasiskv-definitions", tmp_path / "account"):
        installer.check("upgrade", "oasiskv", str(CHART), f"--namespace={namespace}")
    installer.check("uninstall", "oasiskv", f"--namespace={namespace}")
    later = older(tmp_path, "0.2.0", drop="none")
    installer.check("install", "again", str(later), f"--namespace={namespace}")


def test_an_upgrade_without_definitions_fails_says_why_and_leaves_no_right_behind(
    installer: Helm, server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    before = listed(server)
    installer.check("install", "oasiskv", str(CHART), "--skip-crds", f"--namespace={namespace}")
    with running_job(server, namespace, "oasiskv-definitions", tmp_path / "account") as printed:
        assert installer.run("upgrade", "oasiskv", str(CHART), f"--namespace={namespace}").returncode
    assert printed[0].startswith("error: oasiskvservices.oasiskv.io: expected to be installed, got none; `helm show")
    installer.check("uninstall", "oasiskv", f"--namespace={namespace}")
    job = f"Job {namespace}/oasiskv-definitions"  # kept for its log, for an hour
    assert listed(server) == before | {job}
    ttl = ("get", "job", "oasiskv-definitions", "-n", namespace, "-o", "jsonpath={.spec.ttlSecondsAfterFinished}")
    assert server.check(*ttl) == "3600"


def test_test_pods_ask_what_is_there(helm: Helm) -> None:
    objects = helm.objects("--set", "services.chat.image=a:1")
    pods = {each["metadata"]["name"]: each["spec"]["containers"][0] for each in objects if each["kind"] == "Pod"}
    assert pods.keys() == {"oasiskv-test-operator", "chat-test"}
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for url in pods["oasiskv-test-operator"]["args"]:
        host, port = url.split("/")[2].split(":")
        assert int(port) in [each["port"] for each in services[host]["spec"]["ports"]]
    assert pods["chat-test"]["args"][0].startswith("http://chat-predictor/")  # as KServe calls it


@pytest.mark.parametrize(("codes", "passes"), [((200, 200), True), ((200, 503), False)])
def test_a_test_pod_passes_if_everything_answers(codes: tuple[int, int], passes: bool, helm: Helm) -> None:
    pod = next(each for each in helm.objects() if each["kind"] == "Pod")["spec"]["containers"][0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes[int(self.path[1:])])
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            urls = [f"http://127.0.0.1:{server.server_port}/{place}" for place in range(len(codes))]
            done = subprocess.run(
                [sys.executable, *pod["command"][1:], *urls], capture_output=True, text=True, check=False
            )
        finally:
            server.shutdown()
    assert (done.returncode == 0) is passes, done.stderr
