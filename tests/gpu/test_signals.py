"""Real engines on a GPU whose steps are ordered against the background in different ways: all give the same tokens."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

LENGTHS = (37, 600, 1201, 2011, 1500, 490)
NUM_TOKENS = 80
SETTINGS = {"budget_blocks": 32, "host_pool_bytes": "2GiB", "switch": "early"}
LATE: dict[str, Any] = {"debug_hold_layers": 60, "debug_poison": True}


def run_engine(model: str, settings: dict[str, Any], *, is_graph: bool, waits: bool) -> dict[str, Any]:
    """Answer prompts of all lengths at once, checking every few steps that working sets hold the host's bytes."""
    import random

    import torch
    from vllm import LLM, SamplingParams

    from oasiskv.core.errors import CorruptBlockError
    from oasiskv.engine.vllm.worker import current

    if not waits:
        from oasiskv.kernels.flags import Flags

        Flags.await_done = lambda *_: None  # type: ignore[method-assign]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 8, 16]}
    options: dict[str, Any] = {"compilation_config": graphs} if is_graph else {"enforce_eager": True}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        block_size=16,
        dtype="bfloat16",
        disable_cascade_attn=True,
        max_model_len=4096,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**30,
        worker_cls="oasiskv.engine.vllm.cuda.Worker",
        kv_transfer_config={
            "kv_connector": "OasisKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        },
        speculative_config={"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3},
        **options,
    )
    rng, engine = random.Random(0), llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for i, length in enumerate(LENGTHS):
        engine.add_request(str(i), {"prompt_token_ids": [rng.randrange(3, 256) for _ in range(length)]}, sampling)
    worker = current()
    assert worker is not None
    assert worker.runtime is not None
    tokens: dict[str, list[int]] = {}
    num_corrupt, step = 0, 0
    while engine.has_unfinished_requests():
        tokens |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
        step += 1
        if step % 7 == 0:
            torch.cuda.synchronize()
            try:
                worker.runtime.check_invariants()
            except CorruptBlockError:
                num_corrupt += 1
    engine.step()
    counts = worker.runtime.counts(wait=True)
    return {"tokens": [tokens[str(i)] for i in range(len(LENGTHS))], "corrupt": num_corrupt, "counts": counts}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from oasiskv.engine.testing import write_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(
        folder,
        architecture="llama",
        num_layers=6,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        hidden_size=256,
        vocab_size=256,
        seed=1,
        max_positions=8192,
    )
    return folder


class Engines:
    """Engines that run at the same time, each in a process of its own."""

    def __init__(self, model: pathlib.Path) -> None:
        self._model = model
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._results: dict[str, dict[str, Any]] = {}

    def start(self, name: str, *, is_graph: bool = True, waits: bool = True, **settings: Any) -> None:
        given = json.dumps([str(self._model), SETTINGS | settings, is_graph, waits])
        self._processes[name] = subprocess.Popen(
            [sys.executable, __file__, given],
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, name: str) -> dict[str, Any]:
        """Wait for an engine."""
        if name not in self._results:
            out, log = self._processes[name].communicate(timeout=300)
            assert self._processes[name].returncode == 0, log[-3000:]
            self._results[name] = json.loads(out.splitlines()[-1])
        return self._results[name]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def engines(model: pathlib.Path) -> Iterator[Engines]:
    engines = Engines(model)
    engines.start("eager", is_graph=False)
    for signal in ("joined", "flags"):
        engines.start(signal, signal=signal)
        engines.start(f"{signal}, late", signal=signal, **LATE)
    engines.start("flags, late, no wait", waits=False, signal="flags", **LATE)
    yield engines
    engines.close()


@pytest.mark.parametrize("name", ["joined", "joined, late", "flags", "flags, late"])
def test_graphs_give_the_tokens_of_an_eager_engine(engines: Engines, name: str) -> None:
    eager, got = engines.result("eager"), engines.result(name)
    assert got["corrupt"] == eager["corrupt"] == 0
    assert got["tokens"] == eager["tokens"]
    counts = got["counts"]
    assert counts["fetched"] > 0
    assert counts["predicted"] == counts["hit"] + counts["fetched"] + counts["deferred"]


def test_late_transfers_are_counted_where_layers_wait_for_them(engines: Engines) -> None:
    assert engines.result("joined, late")["counts"]["late"] == 0
    assert engines.result("flags, late")["counts"]["late"] > 0


def test_without_the_wait_late_transfers_show(engines: Engines) -> None:
    eager, got = engines.result("eager"), engines.result("flags, late, no wait")
    assert got["tokens"] != eager["tokens"] or got["corrupt"] > 0


if __name__ == "__main__":
    folder, settings, is_graph, waits = json.loads(sys.argv[1])
    print(json.dumps(run_engine(folder, settings, is_graph=is_graph, waits=waits)), flush=True)
    os._exit(0)
