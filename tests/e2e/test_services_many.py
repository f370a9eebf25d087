"""Several prefill and decode services as processes, with other tensor-parallel ranks or drafters on the two sides."""

import contextlib
import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli.cluster import Cluster, child_environment
from oasiskv.cli.services_file import Process, split
from oasiskv.engine.testing import random_requests, write_tiny_eagle3, write_tiny_model

pytestmark = pytest.mark.timeout(600)

PROMPTS = [request["prompt"] for request in random_requests([201, 347, 256], 1, vocab_size=192)]
# Asks for what depends on earlier tokens, so the whole request is computed by the decode service.
LOCAL = {"min_tokens": 1}
FILE = """
[engine]
model = %(model)s
[engine.lookahead]
budget_blocks = 6
switch = "early"
host_pool_bytes = "64MiB"
debug_verify = true
[engine.arguments]
max_model_len = 1024
max_num_seqs = 4
enforce_eager = true
kv_cache_memory_bytes = 134217728
[fingerprint]
model_hash = "tiny"
dtype = "float32"
block_size = 16
num_layers = 3
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
%(decode)s
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads, as SmolLM2 has, and a tokenizer that knows the words w0 to w191."""
    folder = tmp_path_factory.mktemp("many") / "model"
    write_tiny_model(folder, num_layers=3, num_heads=6, num_kv_heads=3, hidden_size=96, vocab_size=192)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(192)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


@contextlib.contextmanager
def running(folder: Path, text: str, **counts: int) -> Iterator[list[Process]]:
    processes = split(text, folder, **counts)
    chosen = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    environment, lines = child_environment(os.environ | chosen, "/"), list[str]()
    with Cluster(processes, environment, lines.append, is_verbose=True) as cluster:
        try:
            cluster.wait_ready(400)
            yield processes
        except BaseException:
            print("\n".join(lines[-80:]))
            raise


def complete(process: Process, prompt: list[int], **more: Any) -> str:
    with openai.OpenAI(base_url=f"http://{process.http_address}/v1", api_key="none") as client:
        whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, extra_body=more)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    return whole.choices[0].text


def metric(process: Process, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=30) as answer:
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(float(value) for value in found)


def test_two_of_each_with_other_ranks_give_the_tokens_of_one_engine_and_share_prefixes(
    model: Path, tmp_path: Path
) -> None:
    text = FILE % {"model": json.dumps(str(model)), "tp_size": 3, "decode": ""}
    with running(tmp_path, text, prefills=2, decodes=2) as processes:
        prefills = [process for process in processes if process.role == "prefill"]
        decodes = [process for process in processes if process.role == "decode"]
        for prompt in PROMPTS:
            whole = complete(decodes[0], prompt, **LOCAL)
            assert [complete(decode, prompt) for decode in decodes] == [whole, whole]
        handed = [metric(process, "oasiskv_prefill_handovers_total") for process in prefills]
        assert sum(handed) == 2 * len(PROMPTS)
        # The second time a prompt comes, all of it but its end is in staging.
        loaded = sum(metric(process, "oasiskv_prefill_loaded_tokens_total") for process in prefills)
        assert loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)


def test_a_drafter_on_the_decode_side_alone_looks_ahead_there(model: Path, tmp_path: Path) -> None:
    draft = write_tiny_eagle3(tmp_path / "eagle3", model)
    speculative = json.dumps(str(draft))
    decode = f"[decode.engine.arguments.speculative_config]\nmethod = 'eagle3'\nmodel = {speculative}\n"
    text = FILE % {
        "model": json.dumps(str(model)),
        "tp_size": 1,
        "decode": decode + "num_speculative_tokens = 1\n",
    }
    with running(tmp_path, text) as processes:
        (process,) = [process for process in processes if process.role == "decode"]
        texts = [complete(process, prompt) for prompt in PROMPTS]
        assert [complete(process, prompt) for prompt in PROMPTS] == texts
        # Its first token is that of any engine of the model.
        first = [complete(process, prompt, **LOCAL).split("w")[1] for prompt in PROMPTS]
        assert [text.split("w")[1] for text in texts] == first
        assert metric(process, "oasiskv_decode_handovers_total") == 2 * len(PROMPTS)
        assert metric(process, "oasiskv_lookahead_draft_total") > 0
