"""The configuration files of the three services, written from a spec and checked by the services' own rules."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.service_config import read_services
from oasiskv.operator.api import Network, ServiceSpec
from oasiskv.operator.kinds import quantity

PREFILL_PORT, STAGING_PORT, DECODE_PORT, HTTP_PORT, OIP_PORT, METRICS_PORT = 7412, 7411, 7413, 8080, 8081, 9400
TLS = "/etc/oasiskv-tls"
DISK, MODELS = "/var/lib/oasiskv/disk", "/models"
HUGE_PAGES = {None: "never", "2Mi": "2MiB", "1Gi": "1GiB"}
"""What staging calls them."""
DISK_SHARE = 0.9
"""Of a volume for blocks; file systems keep some for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where the services of one KV generation are, as hosts without ports."""

    prefill: str
    staging: str


def prefill_config(spec: ServiceSpec, peers: Peers, revision: str) -> str:
    """Return the file of prefill, of which `revision` is told wherever its state is.

    Raises:
        ConfigError: The services would refuse it.
    """
    own = {
        "address": f"0.0.0.0:{PREFILL_PORT}",
        "staging": f"{peers.staging}:{STAGING_PORT}",
        "max_requests": spec.prefill.max_requests,
        "max_call_s": float(spec.endpoint.timeout_seconds),
        "drain_s": float(spec.prefill.drain.timeout_seconds),
        "metrics_address": f"0.0.0.0:{METRICS_PORT}",
        "revision": revision,
    }
    return _checked(_engine(spec) | {"prefill": own})


def decode_config(spec: ServiceSpec, peers: Peers, revision: str) -> str:
    """Return the file of decode, of which `revision` is told wherever its state is.

    Without prefill pods it computes prompts itself.

    Raises:
        ConfigError: The services would refuse it.
    """
    own = {
        "address": f"0.0.0.0:{DECODE_PORT}",
        "http_address": f"0.0.0.0:{HTTP_PORT}",
        "oip_address": f"0.0.0.0:{OIP_PORT}",
        "local_prompt_tokens": spec.decode.local_prompt_tokens,
        "max_requests": spec.decode.max_requests,
        "max_call_s": float(spec.endpoint.timeout_seconds),
        "drain_s": float(spec.decode.drain.timeout_seconds),
        "metrics_address": f"0.0.0.0:{METRICS_PORT}",
        "revision": revision,
    }
    if spec.model.name is not None:
        own["model_name"] = spec.model.name
    if spec.prefill.replicas != 0:
        own |= {"prefills": [f"{peers.prefill}:{PREFILL_PORT}"], "staging": f"{peers.staging}:{STAGING_PORT}"}
    return _checked(_engine(spec) | {"decode": own})


def staging_config(spec: ServiceSpec, network: Network, peers: Peers) -> str:
    """Return the file of staging.

    Raises:
        ConfigError: Its pool would not hold a block.
    """
    block_bytes = Fingerprint(**_fingerprint(spec)).block_bytes
    if quantity(spec.staging.memory) < block_bytes:
        raise ConfigError(
            f"spec.staging.memory: expected room for a block of {block_bytes} bytes, got {spec.staging.memory}"
        )
    own: dict[str, Any] = {
        "pool_bytes": int(quantity(spec.staging.memory)),
        # In a container that did not ask for huge pages, touching one ends the process.
        "huge_pages": HUGE_PAGES[spec.staging.huge_pages],
        "drain_s": float(spec.staging.drain_seconds),
    }
    if spec.staging.replacement == "HandOver":
        # By the time it is told to end, its own name leads to the next one.
        own["successor"] = f"{peers.staging}:{STAGING_PORT}"
    if network.fabric == "Stream":
        own["is_strict"] = True
    else:
        own |= {
            "memory_socket": "/tmp/staging.sock",
            # Engines are other pods, which share no memory with this one.
            "locality": "remote",
            "transport": network.fabric.lower(),
        }
    server = {"address": f"0.0.0.0:{STAGING_PORT}", "metrics_address": f"0.0.0.0:{METRICS_PORT}"}
    tables = {"staging": own, "server": server, "fingerprint": _fingerprint(spec), **_tls(spec)}
    if spec.staging.ssd is not None:
        tables["disk"] = {"folder": DISK, "max_bytes": int(float(quantity(spec.staging.ssd.size)) * DISK_SHARE)}
    if spec.staging.directory is not None:
        tables["directory"] = {"url": spec.staging.directory, "address": f"{peers.staging}:{STAGING_PORT}"}
    return toml(tables)


def model_folder(spec: ServiceSpec) -> tuple[str, str]:
    """Return the claim that holds the model and what the engine calls it; no claim for a model that is downloaded."""
    scheme, _, place = spec.model.uri.partition("://")
    if scheme == "hf":
        return "", place
    claim, _, folder = place.partition("/")
    return claim, f"{MODELS}/{folder}"


def toml(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML, keys in order, so that equal settings are equal texts."""
    return "\n".join(_table((name,), table) for name, table in sorted(tables.items()))


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> str:
    lines = [f"[{'.'.join(map(_key, path))}]"]
    nested = []
    for name, value in sorted(table.items()):
        if isinstance(value, Mapping) and path != ("engine", "arguments"):
            nested.append(_table((*path, name), value))
        else:
            lines.append(f"{_key(name)} = {_inline(value)}")
    return "\n".join([*lines, "", *nested])


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _inline(name)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_inline(each)}" for name, each in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if value is None:
        raise ConfigError("spec.engine.arguments: expected values, got null, which the services' files cannot say")
    # Of texts, numbers and booleans JSON is TOML, but for pairs of surrogates, and DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _engine(spec: ServiceSpec) -> dict[str, Any]:
    engine = {"model": model_folder(spec)[1], "lookahead": spec.engine.lookahead, "arguments": spec.engine.arguments}
    return {"engine": engine, "fingerprint": _fingerprint(spec), **_tls(spec)}


def _tls(spec: ServiceSpec) -> dict[str, Any]:
    """Return the table of certificates, which all services read alike."""
    if spec.tls is None:
        return {}
    files = {"certificate": "tls.crt", "key": "tls.key", "authority": "ca.crt"}
    return {"tls": {name: f"{TLS}/{file}" for name, file in files.items()}}


def _fingerprint(spec: ServiceSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "model_hash": model.hash,
        "dtype": model.dtype,
        "block_size": spec.engine.block_size,
        "num_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }


def _checked(tables: Mapping[str, Any]) -> str:
    text = toml(tables)
    _check(text)
    return text


@lru_cache(1024)
def _check(text: str) -> None:
    """Have the services' own code read a file; the same text comes with every turn of a service."""
    read_services(text)
