"""A model by the name that a user gives: a folder, one that `oasiskv model` fetches, or one on Hugging Face."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.cli.model import MODELS, fetch
from oasiskv.core.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""Files that vLLM loads where no `--load-format` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that was found."""

    path: str
    """A folder, or a name that vLLM takes."""
    config: Mapping[str, Any]
    """Content of its `config.json`."""
    weight_bytes: int | None
    """Of its weights on disk; None where they are not here."""


def find_model(name: str, report: Callable[[str], None], setting: str = "MODEL") -> Model:
    """Find a folder, fetch a model that `oasiskv model` knows, or ask Hugging Face for the configuration of another.

    Args:
        name: Of the model.
        report: Receives lines for a person.
        setting: Where the name was given.

    Raises:
        ConfigError: there is none.
    """
    folder = Path(name)
    if name in MODELS and not folder.is_dir():
        folder = fetch(name, report=_unless_cached(report))
    if folder.is_dir():
        try:
            config = json.loads((folder / "config.json").read_text())
            if not isinstance(config, dict):
                raise ValueError(f"{type(config).__name__} in config.json")
        except OSError as cause:
            raise ConfigError(f"{setting}: expected a folder with a config.json, got {folder} without one") from cause
        except ValueError as cause:
            raise ConfigError(
                f"{setting}: expected a mapping in JSON in {folder}/config.json, got other content ({cause})"
            ) from cause
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return Model(path=str(folder), config=config, weight_bytes=weights or None)
    expected = f"a folder, one of {', '.join(MODELS)}, or OWNER/NAME on Hugging Face"
    if name.startswith((".", "~")) or not re.fullmatch(r"[^/]+/[^/]+", name):
        raise ConfigError(f"{setting}: expected {expected}, got {name}")
    try:
        from transformers import PretrainedConfig

        config, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError, ImportError) as cause:
        reason = str(cause).strip().partition("\n")[0]
        raise ConfigError(f"{setting}: expected {expected}, got {name!r} ({reason})") from cause
    return Model(path=name, config=config, weight_bytes=None)


def _unless_cached(report: Callable[[str], None]) -> Callable[[str], None]:
    """Say nothing of a model that is here already: hold the first line, its origin, until there is another."""
    lines: list[str] = []

    def pass_on(line: str) -> None:
        lines.append(line)
        if len(lines) == 2 and not line.startswith("Already in"):
            report(lines[0])
        if len(lines) > 1 and not line.startswith("Already in"):
            report(line)

    return pass_on


def check_weights(model: Model) -> None:
    """Check that a folder has weights.

    Raises:
        ConfigError: it has none.
    """
    folder = Path(model.path)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
        raise ConfigError(f"MODEL: expected weights ({', '.join(WEIGHTS)}) in {folder}, got none")
