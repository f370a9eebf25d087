"""The images' install and start commands, run in a plain environment: no container can be built everywhere."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oasiskv.operator.testing_images import build, run_environment, value

CONFIG = """
[staging]
pool_bytes = 1048576
is_strict = true
[fingerprint]
model_hash = "m"
dtype = "float16"
block_size = 16
num_layers = 2
num_kv_heads = 2
head_dim = 16
[server]
address = "127.0.0.1:0"
"""
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11) or platform.machine() != "x86_64" or sys.platform != "linux",
        reason="the lock files are for CPython 3.11 on x86-64 Linux",
    ),
]


def python() -> Path:
    """Return the Python that this one's environment was made of."""
    return Path(sys.executable).resolve()


def test_the_operator_installs_and_starts(tmp_path: Path) -> None:
    installed = build("operator", tmp_path, python())
    environment = run_environment("operator", tmp_path, tmp_path)
    command = [str(installed), *value("operator", "ENTRYPOINT")[1:]]
    printed = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True).stdout
    assert "--namespace" in printed
    for module in ("oasiskv.operator.process", "oasiskv.operator.upgrade"):
        subprocess.run([str(installed), "-c", f"import {module}"], env=environment, check=True)
    # What it wants and does not get is said in one line.
    environment = {**environment, "KUBECONFIG": str(tmp_path / "none")}
    upgrade = [str(installed), "-m", "oasiskv.operator.upgrade", f"--account={tmp_path / 'none'}"]
    done = subprocess.run(upgrade, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: upgrade: expected to run in a pod")


def test_the_staging_service_installs_starts_and_ends(tmp_path: Path) -> None:
    installed = build("staging", tmp_path, python())
    (tmp_path / "oasiskv.toml").write_text(CONFIG)
    environment = run_environment("staging", tmp_path, tmp_path)
    command = [str(installed), *value("staging", "ENTRYPOINT")[1:], "--config", str(tmp_path / "oasiskv.toml")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert "listens on port" in process.stdout.readline(), (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    # NIXL's binding and the exporter of traces are there, torch is not.
    looks = "import nixl_cu13._api, opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    subprocess.run([str(installed), "-c", looks], env=environment, check=True)
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    subprocess.run([str(installed), "-c", looks], env=environment, check=True)


@pytest.mark.parametrize("image", ["prefill", "decode"])
def test_an_engine_installs_and_starts(image: str, tmp_path: Path) -> None:
    """Takes some 10 GB of disk; what it does without a GPU is to say how it is called."""
    if os.environ.get("OASISKV_SOAK_IMAGES") != "all":
        pytest.skip("OASISKV_SOAK_IMAGES=all: expected for the images with CUDA, which take 10 GB each")
    installed = build(image, tmp_path, python())
    environment = run_environment(image, tmp_path, tmp_path)
    command = [str(installed), *value(image, "ENTRYPOINT")[1:], "--help"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--config" in printed
