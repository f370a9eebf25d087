"""What the images' Dockerfiles say, and the part of it that needs no containers done in a folder, for tests."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICES = ROOT / "services/oasiskv/services"
IMAGES = {"operator": Path(__file__).parent} | {name: SERVICES / name for name in ("staging", "prefill", "decode")}
"""By image: the folder of its Dockerfile."""
PLACES = ("/opt/oasiskv", "/src", "/locks", "/wheels")
"""Folders of a container that `build` has in its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One of a Dockerfile."""

    name: str
    text: str

    def words(self) -> list[str]:
        """Return the texts of an instruction in JSON form, or what blanks part."""
        made: list[str] = json.loads(self.text) if self.text.startswith("[") else self.text.split()
        return made


def stages(image: str) -> list[list[Instruction]]:
    """Return the instructions of each stage of an image, FROM first."""
    text = (IMAGES[image] / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    made: list[list[Instruction]] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        if name == "FROM":
            made.append([])
        made[-1].append(Instruction(name=name, text=rest.strip()))
    return made


def value(image: str, name: str) -> list[str]:
    """Return the words of the last instruction of that name of the image itself."""
    found = [each for each in stages(image)[-1] if each.name == name]
    return found[-1].words() if found else []


def environment(stage: list[Instruction]) -> dict[str, str]:
    """Return the variables that a stage sets."""
    pairs = [word.split("=", 1) for each in stage if each.name == "ENV" for word in each.words()]
    return {name: text for name, text in pairs}


def build(image: str, folder: Path, python: Path) -> Path:
    """Do what the first stage of an image does in a folder, and return the Python that it installed into.

    Args:
        image: Which.
        folder: Holds what is /opt/oasiskv, /src, /locks and /wheels in a container.
        python: Stands in for that of the base image.
    """
    base = folder / "base"
    subprocess.run([str(python), "-m", "venv", str(base)], check=True)
    (folder / "src").mkdir()
    stage = stages(image)[0]
    variables = {**os.environ, **environment(stage), "PATH": f"{base / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    variables = {name: text for name, text in variables.items() if not name.startswith("PYTHON")}
    for each in stage:
        if each.name == "COPY":
            _copy(each.words(), folder)
        elif each.name == "RUN":
            subprocess.run(["bash", "-ec", here(each.text, folder)], check=True, env=variables, cwd=folder / "src")
    return folder / "opt/oasiskv/bin/python"


def here(text: str, folder: Path) -> str:
    """Return a text of a Dockerfile with the places of the container in a folder."""
    for place in PLACES:
        text = re.sub(rf"(?<![\w./]){place}\b", f"{folder}{place}", text)
    return text


def run_environment(image: str, folder: Path, home: Path) -> Mapping[str, str]:
    """Return the environment of a process of a built image: what the image says, and no Python of ours."""
    made = {name: here(text, folder) for name, text in environment(stages(image)[-1]).items()}
    made["PATH"] = made["PATH"].replace("$PATH", os.environ["PATH"])
    return {**made, "HOME": str(home)}


def _copy(words: list[str], folder: Path) -> None:
    *sources, target = words
    place = folder / "src" if target == "." else Path(here(target, folder))
    place.mkdir(parents=True, exist_ok=True)
    if sources == ["."]:
        allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
        sources = allowed
    for source in sources:
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / source, place / source, ignore=ignore, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, place / Path(source).name)
