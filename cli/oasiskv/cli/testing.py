"""Services of a tiny model as processes, for tests of what they are together."""

import contextlib
import json
import os
import re
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from oasiskv.cli.cluster import Cluster, child_environment
from oasiskv.cli.services_file import Process, split, toml
from oasiskv.engine.testing import random_requests, write_tiny_eagle3, write_tiny_model, write_word_tokenizer

VOCAB_SIZE = 192
NUM_TOKENS = 24
"""Of each answer."""

LOCAL = {"min_tokens": 1}
"""Asks for what depends on earlier tokens, so the whole request is computed by the decode service."""

FILE = """
[engine]
model = %(model)s
[engine.lookahead]
budget_blocks = 6
switch = "early"
host_pool_bytes = "16MiB"
debug_verify = true
[engine.arguments]
max_model_len = 1024
max_num_seqs = 4
enforce_eager = true
kv_cache_memory_bytes = 16777216
[fingerprint]
model_hash = "tiny"
dtype = "float32"
block_size = 16
num_layers = %(num_layers)d
num_kv_heads = 3
head_dim = 32
tp_size = %(tp_size)d
[staging]
address = "127.0.0.1:0"
pool_bytes = 67108864
[prefill]
address = "127.0.0.1:0"
[prefill.engine]
tp_size = 1
[decode]
address = "127.0.0.1:0"
http_address = "127.0.0.1:0"
model_name = "tiny"
"""


def write_model(folder: Path) -> Path:
    """Write a model with three KV heads, as SmolLM2 has, and a tokenizer that knows the words w0 to w191."""
    write_tiny_model(folder, num_layers=3, num_heads=6, num_kv_heads=3, hidden_size=96, vocab_size=VOCAB_SIZE)
    write_word_tokenizer(folder, VOCAB_SIZE)
    return folder


def eagle3(model: Path) -> dict[str, Any]:
    """Write a drafter beside a model, and return what an engine is told of it."""
    folder = write_tiny_eagle3(model.with_name(f"{model.name}-eagle3"), model)
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 1}


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths; another seed shares no block with this one."""
    requests = random_requests(lengths or (201, 347, 256), 1, vocab_size=VOCAB_SIZE, prompt_seed=seed)
    return [request["prompt"] for request in requests]


def file_text(model: Path, *, tp_size: int = 1, num_layers: int = 3, rest: str = "") -> str:
    """Return a file of settings for the model, with further tables at its end."""
    values = {"model": json.dumps(str(model)), "tp_size": tp_size, "num_layers": num_layers}
    return FILE % values + rest


def merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with others laid over them."""
    both = tables.keys() & changes.keys()
    inner = {name: merged(tables[name], changes[name]) for name in both if isinstance(changes[name], Mapping)}
    return {**tables, **changes, **inner}


def changed(process: Process, tables: Mapping[str, Any] | None) -> Process:
    """Return the process with tables laid over its file, if there are any."""
    if tables is None:
        return process
    return replace(process, config=toml(merged(tomllib.loads(process.config), tables)))


@contextlib.contextmanager
def running(
    folder: Path, text: str, changes: Mapping[str, Mapping[str, Any]] | None = None, **counts: int
) -> Iterator[dict[str, Process]]:
    """Start services and wait until they are ready; where a `with` block fails, their logs are printed.

    Args:
        folder: For sockets.
        text: Settings of all of them.
        changes: By the name of a process, tables that are laid over what the file says.
        **counts: `stagings`, `prefills` and `decodes`.

    Yields:
        The processes by their names.
    """
    processes = [changed(process, (changes or {}).get(process.name)) for process in split(text, folder, **counts)]
    chosen = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    environment, lines = child_environment(os.environ | chosen, "/"), list[str]()
    with Cluster(processes, environment, lines.append, is_verbose=True) as cluster:
        try:
            cluster.wait_ready(800)
            yield {process.name: process for process in processes}
        except BaseException:
            print("\n".join(lines[-80:]))
            raise


def complete(process: Process, prompt: list[int], **more: Any) -> str:
    """Return the words that a decode service answers."""
    with openai.OpenAI(base_url=f"http://{process.http_address}/v1", api_key="none") as client:
        whole = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body=more
        )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == NUM_TOKENS
    return whole.choices[0].text


def address(process: Process) -> str:
    """Return where a service answers gRPC."""
    return str(tomllib.loads(process.config)[process.role]["address"])


def metric(process: Process, name: str, labels: str = "") -> float:
    """Return the sum of a metric's samples whose labels contain a text."""
    with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{([^}}]*)\}})? (\S+)$", lines, re.MULTILINE)
    return sum(float(value) for said, value in found if labels in said)
