"""The file that says what `oasiskv up` starts: made for a model, or read, and split into a file for each process."""

import contextlib
import copy
import json
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from oasiskv.cli.launch import Launch, check_port, free_port, lookahead_settings
from oasiskv.core.errors import ConfigError
from oasiskv.core.service_config import DecodeConfig, PrefillConfig, build, check_address, read_services

DTYPES = {"float": "float32", "half": "float16"}
"""What a model's configuration calls a type, where a fingerprint calls it otherwise."""

ROLES = ("directory", "staging", "prefill", "decode")
"""In the order in which they are started; they are stopped in the other one."""

REDIS = "redis-server"
"""Of Debian's package of that name."""

ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Where to reach what listens everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """`[up]`: how many there are of each."""

    stagings: int = 1
    prefills: int = 1
    decodes: int = 1

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        for name in ("stagings", "prefills", "decodes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process to start."""

    role: str
    name: str
    """The role and, where there are several, which one."""
    config: str
    """TOML."""
    metrics_port: int
    """On loopback."""
    http_address: str = ""
    """Of decode, as a client calls it."""
    drain_s: float = 30.0
    """Time that requests get to end."""


def file_for(launch: Launch, model_name: str, http_address: str) -> str:
    """Return a file for a model: every process on loopback, at ports that are free when they start.

    Args:
        launch: The plan of one server; each of prefill and decode is as large.
        model_name: What requests call the model.
        http_address: `host:port` of OpenAI's HTTP.
    """
    plan, shape = launch.plan, launch.plan.pools.shape
    arguments: dict[str, Any] = {
        "max_model_len": plan.pools.max_model_len,
        "max_num_seqs": plan.pools.max_num_seqs,
        "enforce_eager": launch.device == "cpu",
    }
    if launch.device == "cuda":
        # Prefill and decode share the GPU.
        arguments["gpu_memory_utilization"] = 0.45
    if plan.engine_bytes is not None:
        arguments["kv_cache_memory_bytes"] = plan.engine_bytes
    tables: dict[str, Any] = {
        "up": {"stagings": 1, "prefills": 1, "decodes": 1},
        "engine": {
            "model": launch.model.path,
            "lookahead": lookahead_settings(plan.config),
            "arguments": arguments,
        },
        "fingerprint": {
            "model_hash": model_hash(launch.model.path, launch.model.config),
            "dtype": DTYPES.get(shape.dtype, shape.dtype),
            "block_size": plan.pools.block_size,
            "num_layers": shape.num_layers,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        },
        "staging": {"address": "127.0.0.1:0", "pool_bytes": plan.config.host_pool_bytes},
        "prefill": {"address": "127.0.0.1:0"},
        "decode": {"address": "127.0.0.1:0", "http_address": http_address, "model_name": model_name},
    }
    return toml(tables)


def model_hash(model: str, config: Mapping[str, Any]) -> str:
    """Return what tells this model's KV from another's, for processes of one machine: they read the same files."""
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return sha256(json.dumps([model, dict(config), facts], sort_keys=True).encode()).hexdigest()


def split(text: str, folder: Path, **counts: int | None) -> list[Process]:
    """Return the processes that a file asks for, each with a file of its own; all on this machine.

    Where one finds another is filled in, whatever the file says; so are ports that are 0 or absent. The second process
    of a role listens at the ports after those of the first. Several staging services take prefill services in turn, and
    have a directory between them: that of the file, or one in a Redis of their own if this machine has its server.

    Args:
        text: TOML.
        folder: For sockets.
        counts: `stagings`, `prefills` and `decodes`, in the place of what the file says where they are not None.

    Raises:
        ConfigError: A setting is wrong or a port is taken; the message names it.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"config: expected TOML, got {cause}") from cause
    for role in ("staging", "prefill", "decode"):
        if not isinstance(tables.get(role), dict):
            raise ConfigError(f"{role}: expected this table, got none")
    given = {name: value for name, value in counts.items() if value is not None}
    number = build(Counts, "up", tables.pop("up", {}) | given)
    directory = _directory(tables, folder) if number.stagings > 1 else []
    stagings = [_staging(index, number.stagings, tables, folder) for index in range(number.stagings)]
    prefills = [
        _engine("prefill", index, number.prefills, tables, {"staging": stagings[index % number.stagings].address})
        for index in range(number.prefills)
    ]
    # With several of them decode reads where each prefill service says that its KV is.
    peers = {
        "staging": stagings[0].address if number.stagings == 1 else "",
        "prefills": [one.address for one in prefills],
    }
    decodes = [_engine("decode", index, number.decodes, tables, peers) for index in range(number.decodes)]
    return [*directory, *(one.process for one in (*stagings, *prefills, *decodes))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    process: Process
    address: str
    """As a peer calls it."""


def _directory(tables: dict[str, Any], folder: Path) -> list[Process]:
    """Return the Redis that the directory is in, unless the file names one or this machine has none."""
    if "directory" in tables or shutil.which(REDIS) is None:
        return []
    path = str(folder / "directory.sock")
    tables["directory"] = {"url": f"unix://{path}"}
    # Nothing on disk, since the services write it anew, and no port, since they are all here.
    config = f'port 0\nunixsocket {path}\nsave ""\nappendonly no\ndir {folder}\n'
    return [Process(role="directory", name="directory", config=config, metrics_port=0, drain_s=0.0)]


def _staging(index: int, number: int, tables: Mapping[str, Any], folder: Path) -> _Placed:
    own = {name: copy.deepcopy(table) for name, table in tables.items() if name not in ("prefill", "decode", "engine")}
    server = own.setdefault("server", {})
    wanted = own["staging"].pop("address", server.get("address", "127.0.0.1:0"))
    address = _listen("staging.address", wanted, index)
    metrics = _listen("server.metrics_address", server.get("metrics_address") or "127.0.0.1:0", index)
    server |= {"address": address, "metrics_address": metrics}
    name = _name("staging", index, number)
    if not own["staging"].get("is_strict"):
        own["staging"].setdefault("memory_socket", str(folder / "staging.sock"))
    if number > 1:
        if "memory_socket" in own["staging"]:
            own["staging"]["memory_socket"] += f".{index}"
        if "folder" in own.get("disk", {}):
            own["disk"]["folder"] = str(Path(own["disk"]["folder"], name))
            with contextlib.suppress(OSError):  # the service says what is wrong with it
                Path(own["disk"]["folder"]).mkdir(exist_ok=True)
    if "directory" in own:
        own["directory"]["address"] = _reach(address)
    process = Process(
        role="staging",
        name=name,
        config=toml(own),
        metrics_port=_port(metrics),
        drain_s=own["staging"].get("drain_s", Process.__dataclass_fields__["drain_s"].default),
    )
    return _Placed(process=process, address=_reach(address))


def _engine(role: str, index: int, number: int, tables: Mapping[str, Any], peers: Mapping[str, Any]) -> _Placed:
    wanted = (role, "engine", "fingerprint", "tls")
    own = {name: copy.deepcopy(table) for name, table in tables.items() if name in wanted}
    settings = own[role]
    settings |= peers
    names = ["address", "metrics_address"] if role == "prefill" else ["address", "metrics_address", "http_address"]
    for name in names:
        settings[name] = _listen(f"{role}.{name}", settings.get(name) or "127.0.0.1:0", index)
    text = toml(own)
    config: PrefillConfig | DecodeConfig | None = getattr(read_services(text), role)
    assert config is not None
    process = Process(
        role=role,
        name=_name(role, index, number),
        config=text,
        metrics_port=_port(settings["metrics_address"]),
        http_address=_reach(settings.get("http_address", "")),
        drain_s=config.drain_s,
    )
    return _Placed(process=process, address=_reach(settings["address"]))


def _name(role: str, index: int, number: int) -> str:
    return role if number == 1 else f"{role}-{index}"


def _listen(name: str, address: object, index: int) -> str:
    """Return where the process of that index listens."""
    check_address(name, address)
    host, _, port = str(address).rpartition(":")
    if int(port) == 0:
        return f"{host}:{free_port()}"
    check_port(host.strip("[]"), int(port) + index, name)
    return f"{host}:{int(port) + index}"


def _reach(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{ANY.get(host, host)}:{port}" if address else ""


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def toml(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML."""
    return "\n".join(_table([name], table) for name, table in tables.items())


def _table(path: list[str], table: Mapping[str, Any]) -> str:
    lines = [f"[{'.'.join(map(_key, path))}]"]
    nested = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            nested.append(_table([*path, name], value))
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    return "\n".join([*lines, "", *nested])


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    # Of texts, numbers and booleans JSON is TOML, but for pairs of surrogates, and DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
