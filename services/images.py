"""Writes what the container images install, and what is in them, from `pyproject.toml` and the package index.

`python services/images.py lock` writes a `requirements.txt` beside each Dockerfile: exact versions, each with the hash
of the one wheel that the images take. `sbom` writes a CycloneDX bill of materials of each to `build/sbom`. Both install
their tool into `build/tools`.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
SERVICES = ROOT / "services/oasiskv/services"
FOLDERS = {"operator": ROOT / "operator/oasiskv/operator"} | {
    name: SERVICES / name for name in ("staging", "prefill", "decode")
}
EXTRAS = {
    "operator": ("operator",),
    "staging": ("services", "nixl", "otel"),
    "prefill": ("cuda", "services", "nixl", "otel"),
    "decode": ("cuda", "services", "nixl", "otel"),
}
LEFT_OUT = {"staging": ("torch",)}
"""Packages that others ask for and this image does without: NIXL's binding looks at tensors only if torch is there."""
BUILD = SERVICES.parents[1] / "build-requirements.txt"
"""What builds our own wheel."""
TOOLS = {"uv": "uv==0.13.9", "cyclonedx-py": "cyclonedx-bom==7.5.0"}
PYTHON, GLIBC = (3, 11), 36
"""Of the base image, Debian 12."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
HEADER = "# Written by `make locks`. Do not edit."


def tool(name: str) -> str:
    """Return the path of a tool, which is installed if it is not there."""
    place = ROOT / "build/tools" / name
    program = place / "bin" / name
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin/pip"), "install", "--quiet", TOOLS[name]], check=True)
    return str(program)


def lines(lock: Mapping[str, Any]) -> Iterator[str]:
    """Yield a requirement for each package of a lock (PEP 751): its version and the hash of the wheel to take.

    Raises:
        SystemExit: A package has no wheel for the images.
    """
    tags = [*cpython_tags(PYTHON, platforms=PLATFORMS), *compatible_tags(PYTHON, platforms=PLATFORMS)]
    rank = {tag: place for place, tag in enumerate(tags)}
    for package in sorted(lock["packages"], key=lambda package: str(package["name"])):
        found = {_best(wheel, rank): wheel["hashes"]["sha256"] for wheel in package.get("wheels", [])}
        place = min(found, default=len(rank))
        if place == len(rank):
            sys.exit(f"error: {package['name']}: expected a wheel for CPython {PYTHON} on x86-64 Linux, got none")
        yield f"{package['name']}=={package['version']} --hash=sha256:{found[place]}"


def _best(wheel: Mapping[str, Any], rank: Mapping[Tag, int]) -> int:
    file = wheel.get("name") or wheel["url"].rpartition("/")[2]
    return min((rank[tag] for tag in parse_wheel_filename(file)[3] if tag in rank), default=len(rank))


def wanted(name: str) -> str:
    """Return the requirements of an image, or those that build our wheel, a line each."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if name == "build":
        return "\n".join(about["build-system"]["requires"])
    extras = about["project"]["optional-dependencies"]
    found = [*about["project"]["dependencies"], *(each for extra in EXTRAS[name] for each in extras[extra])]
    return "\n".join(found)


def write_locks() -> None:
    """Write every lock file."""
    folder = ROOT / "build/locks"
    folder.mkdir(parents=True, exist_ok=True)
    version = f"--python-version={'.'.join(map(str, PYTHON))}"
    platform = f"--python-platform=x86_64-manylinux_2_{GLIBC}"
    for name in ("build", *EXTRAS):
        command = [tool("uv"), "pip", "compile", "-", "--quiet", "--format=pylock.toml", "--no-build"]
        command += [version, platform, f"--override={folder / 'left-out.txt'}"]
        # A marker that never holds: what is left out is not even resolved.
        (folder / "left-out.txt").write_text(
            "".join(f"{each} ; python_version < '3'\n" for each in LEFT_OUT.get(name, ()))
        )
        done = subprocess.run(command, input=wanted(name), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {name}: {done.stderr}")
        path = BUILD if name == "build" else FOLDERS[name] / "requirements.txt"
        path.write_text("\n".join([HEADER, *lines(tomllib.loads(done.stdout)), ""]))
        print(path.relative_to(ROOT))


def write_sboms() -> None:
    """Write the bill of materials of every image, from its lock file."""
    folder = ROOT / "build/sbom"
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in FOLDERS.items():
        path = folder / f"oasiskv-{name}.cdx.json"
        command = [tool("cyclonedx-py"), "requirements", str(place / "requirements.txt")]
        command += [f"--pyproject={ROOT / 'pyproject.toml'}", "--output-reproducible"]
        subprocess.run([*command, f"--output-file={path}"], check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        print(path.relative_to(ROOT))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("lock", "sbom"))
    {"lock": write_locks, "sbom": write_sboms}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
