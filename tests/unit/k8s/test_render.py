import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import Network, Placement, ServiceSpec
from oasiskv.operator.facts import CERTIFICATE, INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT
from oasiskv.operator.kinds import read
from oasiskv.operator.render import Rendered, render
from oasiskv.operator.testing import SPEC
from oasiskv.services.staging.__main__ import read_config

METADATA = {"name": "chat", "namespace": "llm"}
SCALING = {"maxReplicas": 4, "prometheus": {"address": "http://prometheus:9090", "query": "up", "threshold": 2}}
ALL = frozenset({INFERENCE_SERVICE, POD_MONITOR, SCALED_OBJECT})


def rendered(kinds: frozenset[str] = ALL, **changes: Any) -> Rendered:
    spec = read(ServiceSpec, {**SPEC, **changes}, "spec")
    return render(METADATA, spec, spec.placement or Placement(), spec.network or Network(), kinds)


def objects(made: Rendered) -> dict[str, Any]:
    return {f"{each['kind']}/{role(each)}": each for each in (*made.common, *made.generation, *made.decode)}


def role(made: Mapping[str, Any]) -> str:
    found: str = made["metadata"]["labels"]["oasiskv.io/role"]
    return made["metadata"]["name"] if found == "service" else found


def pods(made: Rendered) -> dict[str, Any]:
    found = objects(made)
    predictor = dict(found["InferenceService/decode"]["spec"]["predictor"])
    del predictor["minReplicas"], predictor["maxReplicas"]
    return {
        "staging": found["StatefulSet/staging"]["spec"]["template"],
        "prefill": found["Deployment/prefill"]["spec"]["template"],
        "decode": {"metadata": {"labels": predictor["labels"]}, "spec": predictor},
    }


def test_every_selector_selects_the_pods_of_its_role() -> None:
    made = rendered()
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(made).items()}
    found = objects(made)
    for name in ("Service/staging", "Service/prefill"):
        assert found[name]["spec"]["selector"].items() <= labels[role(found[name])].items()
    for name in (
        "StatefulSet/staging",
        "Deployment/prefill",
        "PodDisruptionBudget/prefill",
        "PodDisruptionBudget/decode",
    ):
        chosen = [
            each for each in labels if found[name]["spec"]["selector"]["matchLabels"].items() <= labels[each].items()
        ]
        assert chosen == [role(found[name])]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_engines_prefer_to_be_near_their_staging_and_apart_from_one_another(name: str) -> None:
    made = pods(rendered())
    (near,) = made[name]["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (spread,) = made[name]["spec"]["topologySpreadConstraints"]
    for wanted, role_ in ((near["podAffinityTerm"], "staging"), (spread, name)):
        of = wanted["labelSelector"]["matchLabels"].items()
        assert [each for each in made if of <= made[each]["metadata"]["labels"].items()] == [role_]


@pytest.mark.parametrize("name", ["prefill", "decode", "staging"])
def test_pods_pass_the_restricted_level_of_pod_security(name: str) -> None:
    spec = pods(rendered())[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all(set(volume) & {"configMap", "emptyDir", "persistentVolumeClaim"} for volume in spec["volumes"])
    assert not set(spec) & {"hostNetwork", "hostPID", "hostIPC"}
    (container,) = spec["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", ["prefill", "decode", "staging"])
def test_no_default_of_a_cluster_can_shrink_a_container(name: str) -> None:
    (container,) = pods(rendered())[name]["spec"]["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert "readinessProbe" in container


@pytest.mark.parametrize("name", ["prefill", "decode", "staging"])
def test_what_a_container_mounts_is_there(name: str) -> None:
    spec = pods(rendered())[name]["spec"]
    claims = objects(rendered())["StatefulSet/staging"]["spec"]["volumeClaimTemplates"] if name == "staging" else []
    there = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == there


def test_a_pod_lives_longer_than_its_drain() -> None:
    made = pods(rendered(decode={"drain": {"preStopSeconds": 20, "timeoutSeconds": 100}}))
    assert made["decode"]["spec"]["terminationGracePeriodSeconds"] > 120


def test_decode_is_what_kserve_takes() -> None:
    service = objects(rendered())["InferenceService/decode"]
    assert service["metadata"]["annotations"] == {
        "serving.kserve.io/deploymentMode": "Standard",
        "serving.kserve.io/autoscalerClass": "none",
    }
    (container,) = service["spec"]["predictor"]["containers"]
    assert container["name"] == "kserve-container"
    assert container["ports"][0]["containerPort"] == 8080  # KServe's Service exposes the first as 80
    assert not [each["name"] for each in container["env"] if each["name"] in ("PYTHONPATH", "PROTOCOL", "STORAGE_URI")]


def test_a_change_of_one_role_leaves_the_other_roles_pods_alone() -> None:
    before = pods(rendered())
    for name in ("prefill", "decode", "staging"):
        own = dict(SPEC.get(name, {}))
        after = pods(rendered(ALL, **{name: {**own, "image": "other:1"}}))
        assert [each for each in after if after[each] != before[each]] == [name]


def test_scaling_changes_no_pod() -> None:
    assert pods(rendered(decode={"replicas": 5}, prefill={"replicas": 3})) == pods(rendered())


@pytest.mark.parametrize("has_keda", [False, True])
def test_one_owner_decides_how_many_prefill_pods_there_are(has_keda: bool) -> None:
    kinds = ALL if has_keda else ALL - {SCALED_OBJECT}
    found = objects(rendered(kinds, prefill={"scaling": SCALING}))
    assert ("replicas" in found["Deployment/prefill"]["spec"], "ScaledObject/prefill" in found) == (
        not has_keda,
        has_keda,
    )


def test_objects_of_kinds_that_the_cluster_lacks_are_not_made() -> None:
    found = objects(rendered(frozenset({INFERENCE_SERVICE}), prefill={"scaling": SCALING}))
    assert not [name for name in found if name.startswith(("PodMonitor", "ScaledObject"))]
    assert [name for name in objects(rendered()) if name.startswith("PodMonitor")] == ["PodMonitor/chat"]


def test_suspending_stops_gpus_and_keeps_staging() -> None:
    found = objects(rendered(suspend=True, prefill={"scaling": SCALING}))
    assert found["Deployment/prefill"]["spec"]["replicas"] == 0
    assert found["InferenceService/decode"]["metadata"]["annotations"]["serving.kserve.io/stop"] == "true"
    assert found["StatefulSet/staging"]["spec"]["replicas"] == 1
    assert "ScaledObject/prefill" not in found


def test_memory_that_cannot_hold_the_host_pool_is_refused_in_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"spec.decode.resources.memory: expected more than the host pool of 68719476736"
    ):
        rendered(decode={"resources": {"memory": "80Gi"}})


def test_a_pool_that_staging_cannot_change_is_part_of_the_kv_generation() -> None:
    other = rendered(staging={"ssd": {"size": "2Ti", "storageClass": "nvme"}})
    assert other.kv != rendered().kv


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        ({"model": {**SPEC["model"], "hash": "def"}}, True),
        ({"engine": {**SPEC["engine"], "blockSize": 32}}, True),
        ({"model": {**SPEC["model"], "headDim": 64}}, True),
        ({"engine": {"lookahead": {"budgetBlocks": 128, "summary": "mid", "scoreAlpha": 0}}}, True),
        ({"engine": {"lookahead": {"budgetBlocks": 256}}}, True),
        ({"engine": {"lookahead": {"budgetBlocks": 128, "minCap": 8}}}, False),
        ({"tls": {"secret": "ca"}}, True),
        ({"image": "oasiskv/engine:0.5.0"}, False),
        ({"staging": {**SPEC["staging"], "memory": "64Gi"}}, False),
    ],
)
def test_a_new_kv_generation_is_what_old_pods_could_not_exchange_kv_with(change: dict[str, Any], is_new: bool) -> None:
    assert (rendered(**change).kv != rendered().kv) is is_new


def test_a_spec_from_before_certificates_is_of_the_kv_generation_that_it_was() -> None:
    # Else every service would move to a new one with an upgrade of the operator.
    assert rendered().kv == "3e0bf3ee"


@pytest.mark.parametrize(("size", "setting", "pages"), [("2Mi", "2MiB", 100 * 2**20), ("1Gi", "1GiB", 2**30)])
def test_huge_pages_are_asked_of_the_node_whole_and_of_staging_by_size(size: str, setting: str, pages: int) -> None:
    made = objects(rendered(staging={"memory": "99.5Mi", "hugePages": size}))
    (container,) = made["StatefulSet/staging"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    asked = container["resources"]["requests"]
    # What is beside the pool is ordinary memory; the pool is none.
    assert (asked[f"hugepages-{size}"], asked["memory"]) == (str(pages), str(4 * 2**30))
    file = read_config(made["ConfigMap/staging"]["data"]["oasiskv.toml"])
    assert file.staging.huge_pages == setting


def test_staging_that_is_handed_over_comes_up_beside_the_one_that_serves() -> None:
    spec = {"replacement": "HandOver", "drainSeconds": 40}
    first, second = (rendered(staging={**spec, "image": image}) for image in ("a:1", "b:1"))
    assert first.kv == second.kv != rendered(staging={}).kv
    assert first.staging != second.staging
    old, new = objects(first), objects(second)
    assert old["Service/staging"]["metadata"] == new["Service/staging"]["metadata"]
    labels = [made["StatefulSet/staging"]["spec"]["template"]["metadata"]["labels"] for made in (old, new)]
    for made, chosen in ((old, [True, False]), (new, [False, True])):
        for selector in (
            made["Service/staging"]["spec"]["selector"],
            made["StatefulSet/staging"]["spec"]["selector"]["matchLabels"],
        ):
            assert [selector.items() <= each.items() for each in labels] == chosen
    # It gives what it holds to whatever its own name leads to then, once everybody has had time to learn that.
    file = read_config(old["ConfigMap/staging"]["data"]["oasiskv.toml"])
    assert file.staging.successor == f"{old['Service/staging']['metadata']['name']}.llm.svc:7411"
    pod = old["StatefulSet/staging"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 15}}}
    assert pod["terminationGracePeriodSeconds"] >= 15 + 40 + 30
    assert [each for each in ("prefill", "decode") if pods(first)[each] != pods(second)[each]] == []


@pytest.mark.parametrize("tls", [{"secret": "mine"}, {"issuer": {"name": "ca"}}])
def test_every_pod_mounts_the_certificate_that_its_file_names(tls: dict[str, Any]) -> None:
    made = rendered(frozenset({CERTIFICATE, INFERENCE_SERVICE}), tls=tls)
    certificates = [each for each in made.generation if each["kind"] == "Certificate"]
    secret = "mine" if "secret" in tls else f"chat-tls-{made.kv}"
    assert [each["spec"]["secretName"] for each in certificates] == [secret] * ("issuer" in tls)
    for pod in pods(made).values():
        (volume,) = (each for each in pod["spec"]["volumes"] if "secret" in each)
        assert volume["secret"]["secretName"] == secret
        (container,) = pod["spec"]["containers"]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == volume["name"])
        maps = [each for each in (*made.generation, *made.decode) if each["kind"] == "ConfigMap"]
        for each in maps:
            tables = tomllib.loads(each["data"]["oasiskv.toml"])
            assert {str(Path(file).parent) for file in tables["tls"].values()} == {mount["mountPath"]}


def test_a_certificate_names_every_host_that_a_file_of_its_kv_generation_names() -> None:
    made = rendered(
        frozenset({CERTIFICATE, INFERENCE_SERVICE}), tls={"issuer": {"name": "ca", "kind": "ClusterIssuer"}}
    )
    (certificate,) = (each for each in made.generation if each["kind"] == "Certificate")
    assert certificate["spec"]["issuerRef"] == {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    text = "".join(each["data"]["oasiskv.toml"] for each in (*made.generation, *made.decode) if "data" in each)
    hosts = set(re.findall(r"[a-z0-9.-]+\.svc", text))
    assert len(hosts) == 2
    assert hosts <= set(certificate["spec"]["dnsNames"])


def test_without_cert_manager_pods_never_speak_in_the_clear_instead() -> None:
    made = rendered(frozenset({INFERENCE_SERVICE}), tls={"issuer": {"name": "ca"}})
    assert "Certificate" not in {each["kind"] for each in made.generation}
    assert pods(made) == pods(rendered(frozenset({CERTIFICATE, INFERENCE_SERVICE}), tls={"issuer": {"name": "ca"}}))
