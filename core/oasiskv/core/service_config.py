"""The settings of the prefill and decode services: one TOML file, which the staging service reads too.

Each service takes the tables that concern it, so one file can be given to all of them. `[staging]`, `[leases]`,
`[server]`, `[disk]` and `[directory]` are the staging service's own, `[up]` is that of `oasiskv up`; they are passed
over here.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint

Config = TypeVar("Config")

OWNED_ARGUMENTS = {
    "model": "engine.model",
    "dtype": "fingerprint.dtype",
    "block_size": "fingerprint.block_size",
    "tensor_parallel_size": "engine.tp_size",
    "worker_cls": "nothing: it follows from the machine",
    "kv_transfer_config": "engine.lookahead",
}
"""Arguments of vLLM that the services set themselves, and the setting that says what they become."""

SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}

TABLES = frozenset(
    {"engine", "fingerprint", "prefill", "decode", "tls", "staging", "leases", "server", "disk", "directory", "up"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Where this process's certificate is, and whom it trusts; all PEM."""

    certificate: Path
    """Certificate chain of this process."""

    key: Path
    """Its private key."""

    authority: Path
    """Certificates of those who may sign for a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The vLLM engine inside a service."""

    model: str
    """A folder, or a name that vLLM takes."""

    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    """Settings of the backend; `budget_blocks`, `summary` and `summary_dtype` must be equal on both sides of a
    handover."""

    tp_size: int | None = None
    """Tensor-parallel ranks of this engine; `fingerprint.tp_size`, which they are by default, is a multiple of them."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM's engine by its Python name, such as `max_model_len` or `speculative_config`."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: The model is not named, or an argument is one that the services set.
        """
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model: expected a folder or a name, got {self.model!r}")
        if self.tp_size is not None and (not _is_number(self.tp_size, int) or self.tp_size < 1):
            raise ConfigError(f"tp_size: expected an integer of at least 1, got {self.tp_size!r}")
        if not isinstance(self.arguments, Mapping):
            raise ConfigError(f"arguments: expected a table, got {self.arguments!r}")
        for name in self.arguments:
            if (owner := OWNED_ARGUMENTS.get(name.replace("-", "_"))) is not None:
                raise ConfigError(f"arguments.{name}: expected it to be left to the service, which takes {owner}")
            if not name.isidentifier():
                raise ConfigError(f"arguments.{name}: expected vLLM's name in Python, such as max_model_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """What a prefill service is told."""

    address: str
    """`host:port` to listen on for prefill.v1; port 0 for a free one."""

    staging: str
    """`host:port` of the staging service that takes the KV."""

    fingerprint: Fingerprint
    """What the KV is; the engine is checked against it."""

    engine: EngineConfig
    """The engine."""

    tls: TlsConfig | None = None
    """Mutual TLS with peers; None to speak in the clear."""

    max_requests: int = 256
    """Most requests under way, those that wait included; more are refused, so that another service gets them."""

    max_call_s: float = 600.0
    """Longest prefill in seconds, waiting included, whatever its caller's deadline."""

    handle_ttl_s: float = 60.0
    """Seconds in which a decode service must take a handle before its blocks may be evicted."""

    drain_s: float = 30.0
    """Seconds that requests get to end after SIGTERM, before they are aborted."""

    metrics_address: str = ""
    """`host:port` of probes and Prometheus metrics over plain HTTP, port 0 for a free one; empty for none."""

    revision: str = ""
    """Which rollout this process belongs to; told wherever its state is."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        check_address("address", self.address)
        check_address("staging", self.staging)
        _check_common(self, "max_call_s", "handle_ttl_s", "drain_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """What a decode service is told."""

    address: str
    """`host:port` to listen on for decode.v1; port 0 for a free one."""

    http_address: str
    """`host:port` to listen on for vLLM's OpenAI-compatible HTTP; port 0 for a free one."""

    fingerprint: Fingerprint
    """What the KV is; the engine is checked against it."""

    engine: EngineConfig
    """The engine."""

    prefills: tuple[str, ...] = ()
    """`host:port` of each prefill service, or of several under one name; with none every prompt is computed here."""

    staging: str = ""
    """`host:port` of the staging service that the prefill services use; empty for what each of them says, which may be
    several, or without any."""

    tls: TlsConfig | None = None
    """Mutual TLS with peers and callers of decode.v1; None to speak in the clear."""

    oip_address: str = ""
    """`host:port` of the Open Inference Protocol over plain gRPC, port 0 for a free one; empty for none."""

    model_name: str = ""
    """What requests call the model; empty for `engine.model`."""

    http_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Options of vLLM's HTTP server by their names, such as `enable_auto_tool_choice` or `chat_template`."""

    local_prompt_tokens: int = 0
    """Prompts of at most this many tokens are computed here; so are those too short to become sparse."""

    max_requests: int = 1024
    """Most requests under way, those that wait included; more are refused."""

    max_call_s: float = 3600.0
    """Longest request in seconds, waiting included, whatever its caller's deadline."""

    drain_s: float = 30.0
    """Seconds that requests get to end after SIGTERM, before they are aborted."""

    metrics_address: str = ""
    """`host:port` of probes and Prometheus metrics over plain HTTP, port 0 for a free one; empty for none."""

    revision: str = ""
    """Which rollout this process belongs to; told wherever its state is."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range.
        """
        check_address("address", self.address)
        check_address("http_address", self.http_address)
        if not isinstance(self.prefills, list | tuple):
            raise ConfigError(f"prefills: expected a list of host:port, got {self.prefills!r}")
        object.__setattr__(self, "prefills", tuple(self.prefills))
        for address in self.prefills:
            check_address("prefills", address)
        if self.staging:
            check_address("staging", self.staging)
        if not _is_number(self.local_prompt_tokens, int) or self.local_prompt_tokens < 0:
            raise ConfigError(f"local_prompt_tokens: expected 0 or more, got {self.local_prompt_tokens!r}")
        if self.oip_address:
            check_address("oip_address", self.oip_address)
        if not isinstance(self.model_name, str):
            raise ConfigError(f"model_name: expected a text, got {self.model_name!r}")
        if not isinstance(self.http_arguments, Mapping):
            raise ConfigError(f"http_arguments: expected a table, got {self.http_arguments!r}")
        _check_common(self, "max_call_s", "drain_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesConfig:
    """What one file says about the prefill and decode services; None for one that it has no table for."""

    prefill: PrefillConfig | None = None
    decode: DecodeConfig | None = None


def read_services(text: str) -> ServicesConfig:
    """Return the settings in a TOML text.

    `[engine]` holds for both services; `[prefill.engine]` and `[decode.engine]` say what differs, setting by setting.

    Raises:
        ConfigError: A table or key is unknown or absent, or a value is wrong; the message names it.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"config: expected TOML, got {cause}") from cause
    for name in sorted(tables.keys() - TABLES):
        raise ConfigError(f"{name}: expected one of the tables {', '.join(sorted(TABLES))}")
    common: dict[str, Any] = {"tls": None}
    if "tls" in tables:
        files = {name: Path(str(value)) for name, value in _table(tables, "tls").items()}
        common["tls"] = build(TlsConfig, "tls", files)
    if tables.keys() & {"prefill", "decode"}:
        common["fingerprint"] = build(Fingerprint, "fingerprint", _table(tables, "fingerprint"))
    return ServicesConfig(
        prefill=_service(PrefillConfig, "prefill", tables, common) if "prefill" in tables else None,
        decode=_service(DecodeConfig, "decode", tables, common) if "decode" in tables else None,
    )


def build(cls: type[Config], table: str, values: Mapping[str, Any], **others: Any) -> Config:
    """Return a dataclass from a table of a file.

    Args:
        cls: The dataclass.
        table: Name of the table, for messages.
        values: What the table says.
        others: Fields that are not the table's to say.

    Raises:
        ConfigError: A key is unknown or absent, or a value is wrong; the message names table and key.
    """
    names = {field.name for field in fields(cls)} - others.keys()  # type: ignore[arg-type]
    for name in values.keys() - names:
        raise ConfigError(f"{table}.{name}: expected one of {', '.join(sorted(names))}")
    _check_scalars(cls, table, values)
    try:
        return cls(**values, **others)
    except ConfigError as cause:
        raise ConfigError(f"{table}.{cause}") from cause
    except TypeError as cause:  # a field without a default is absent, or a value is of a type that nothing compares to
        raise ConfigError(f"{table}: {cause}") from cause


def _check_scalars(cls: type[Any], table: str, values: Mapping[str, Any]) -> None:
    """Refuse a value of another kind than its field's, where that is a truth value, a number or a text."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        kinds = get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        if any(kind not in SCALARS and kind is not NoneType for kind in kinds):
            continue
        # A number of Python's may be a truth value, and an integer serves as a number.
        found = {type(value), float} if type(value) is int else {type(value)}
        if found.isdisjoint(kinds):
            expected = " or ".join(SCALARS[kind] for kind in kinds if kind in SCALARS)
            # Without the value, which may hold a password.
            raise ConfigError(f"{table}.{name}: expected {expected}, got a value of type {type(value).__name__}")


def check_address(name: str, address: object) -> None:
    """Refuse what is not `host:port`.

    Raises:
        ConfigError: It is not; the message begins with `name`.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name}: expected host:port, got {address!r}")


def _service(cls: type[Config], name: str, tables: Mapping[str, Any], common: Mapping[str, Any]) -> Config:
    values = dict(_table(tables, name))
    own = values.pop("engine", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{name}.engine: expected a table, got {own!r}")
    shared = _table(tables, "engine")
    engine = {**shared, **own}
    for nested in ("lookahead", "arguments"):
        if nested in engine:
            engine[nested] = {**_table(shared, nested, "engine."), **_table(own, nested, f"{name}.engine.")}
    if "lookahead" in engine:
        try:
            engine["lookahead"] = LookaheadConfig.from_mapping(engine["lookahead"])
        except ConfigError as cause:
            raise ConfigError(f"engine.lookahead.{cause}") from cause
    return build(cls, name, values, engine=build(EngineConfig, "engine", engine), **common)


def _table(tables: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{prefix}{name}: expected a table, got {table!r}")
    return table


def _check_common(config: PrefillConfig | DecodeConfig, *seconds: str) -> None:
    if config.metrics_address:
        check_address("metrics_address", config.metrics_address)
    if not isinstance(config.revision, str):
        raise ConfigError(f"revision: expected a text, got {config.revision!r}")
    if not _is_number(config.max_requests, int) or config.max_requests < 1:
        raise ConfigError(f"max_requests: expected an integer of at least 1, got {config.max_requests!r}")
    for name in seconds:
        value = getattr(config, name)
        if not _is_number(value, int | float) or not value > 0:
            raise ConfigError(f"{name}: expected seconds above 0, got {value!r}")


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
