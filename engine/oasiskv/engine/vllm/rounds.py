"""Rounds of equal requests through an engine inside this process, each step timed; `oasiskv.cli.sweep` starts it.

The command line names a file with the job. One line of JSON per round goes to the file that the job names, as soon as
the round is over, so that a run that is cut off keeps what it measured.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oasiskv.engine.vllm.api_server import end_with_parent

SETTLED_TOKENS = 3
"""Tokens after which a request counts as decoding: graphs and the drafter have taken over by then."""


def measure(llm: Any, num_requests: int, context: int, num_tokens: int) -> dict[str, float]:
    """Answer requests that arrive at once, and time the steps in which as many of them decode as ever do.

    Prefixes are not shared, so that each request holds its own blocks.

    Args:
        llm: vLLM's `LLM`.
        num_requests: Requests.
        context: Prompt tokens of each.
        num_tokens: Tokens that the last one to decode generates; those before it a few more, so that all decode
            together for a while.

    Returns:
        Milliseconds of a step (`tpot_ms_*`), tokens per second of those steps and of the whole round, seconds to first
        tokens (`ttft_s_*`), how many requests decoded together, and the blocks held at most, engine's and host's.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    vocab_size = llm.model_config.get_vocab_size()
    total = 0
    for i in range(num_requests):
        length = num_tokens + 2 * (num_requests - i)
        total += length
        sampling = SamplingParams(temperature=1.0, seed=i, max_tokens=length, ignore_eos=True, detokenize=False)
        prompt = [(i * 7919 + 31 * token + 1) % vocab_size for token in range(context)]
        engine.add_request(f"{num_requests}-{i}", {"prompt_token_ids": prompt}, sampling)
    started, steps, first_tokens = time.perf_counter(), list[tuple[float, int]](), dict[str, float]()
    held_blocks = host_held_blocks = 0
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            first_tokens.setdefault(output.request_id, now - started)
        settled = sum(request.num_output_tokens > SETTLED_TOKENS for request in scheduler.running)
        steps.append((now, settled))
        held, host_held = _held(scheduler)
        held_blocks, host_held_blocks = max(held, held_blocks), max(host_held, host_held_blocks)
    wall_s = time.perf_counter() - started
    running = max(settled for _, settled in steps)
    times = [at for at, settled in steps if settled == running]
    gaps = sorted(1e3 * (later - earlier) for earlier, later in itertools.pairwise(times))
    waits = sorted(first_tokens.values())
    return {
        "running": running,
        "steps": len(gaps),
        "tpot_ms_mean": statistics.fmean(gaps),
        "tpot_ms_p50": statistics.median(gaps),
        "tpot_ms_p99": gaps[int(0.99 * (len(gaps) - 1))],
        "steady_tokens_per_s": 1e3 * running / statistics.fmean(gaps),
        "tokens_per_s": total / wall_s,
        "ttft_s_p50": statistics.median(waits),
        "ttft_s_last": waits[-1],
        "wall_s": wall_s,
        "tokens": total,
        "held_blocks": held_blocks,
        "host_held_blocks": host_held_blocks,
    }


def _held(scheduler: Any) -> tuple[int, int]:
    """Return the engine blocks and the host blocks that requests hold."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    ledger = getattr(manager.coordinator.single_type_managers[0], "ledger", None)
    host = 0 if ledger is None else ledger.num_host_blocks_held
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), host


def counts() -> dict[str, float]:
    """Return the backend's counters, settled; none in a stock engine."""
    worker = sys.modules.get("oasiskv.engine.vllm.worker")
    backend = worker and worker.current()
    if backend is None or backend.runtime is None:
        return {}
    return dict(backend.runtime.counts(wait=True))


def derive(row: Mapping[str, float], spent: Mapping[str, float], *, num_pairs: int) -> dict[str, float]:
    """Return what a round says of the backend.

    Args:
        row: Of `measure`.
        spent: What was counted during the round.
        num_pairs: Layers times KV heads of this process.
    """
    sparse_rows = max(1.0, spent["sparse_rows"])
    load_bytes_per_row = spent["load_bytes"] / sparse_rows
    transfer_s = spent["transfer_seconds"]
    measured = {} if transfer_s == 0 else {"link_busy_gb_per_s": spent["load_bytes"] / transfer_s / 1e9}
    return measured | {
        "sparse_rows": spent["sparse_rows"],
        "sparse_share": min(1.0, spent["sparse_rows"] / max(1.0, row["tokens"] - row["requests"])),
        "cap_mean": spent["allowed_blocks"] / sparse_rows,
        "cap_share": spent["fetched"] / max(1.0, spent["allowed_blocks"] * num_pairs),
        "deferred_share": spent["deferred"] / max(1.0, spent["predicted"]),
        "hit_share": spent["hit"] / max(1.0, spent["predicted"]),
        "late_layers": spent["late_layers"],
        "stall_ms_per_step": 1e3 * spent["stall_seconds"] / max(1.0, row["steps"]),
        "load_bytes_per_step": load_bytes_per_row * row["running"],
        "link_gb_per_s": load_bytes_per_row * row["running"] / row["tpot_ms_mean"] / 1e6,
    }


def memory(
    row: Mapping[str, float], *, context: int, block_size: int, block_bytes: float, budget_blocks: int, page_rows: int
) -> dict[str, float]:
    """Return the bytes that a round's requests held, and those that a step's attention and prediction read.

    Args:
        row: Of `measure` and, with the backend, of `derive`.
        context: Prompt tokens of each request.
        block_size: Tokens per block.
        block_bytes: Bytes of an engine block, all layers.
        budget_blocks: Resident blocks of a sparse request.
        page_rows: Blocks that a summary page describes.
    """
    blocks = context / block_size
    sparse = row.get("sparse_share", 0.0)
    read_blocks = sparse * (budget_blocks + blocks / page_rows) + (1 - sparse) * blocks
    return {
        "hbm_kv_bytes": row["held_blocks"] * block_bytes,
        "hbm_read_bytes_per_step": row["running"] * read_blocks * block_bytes,
    }


def main() -> None:
    """Do the job of the command line: start the engine and run its rounds."""
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    if job["engine"].get("load_format") == "dummy":
        _keep_own_head()
    started = time.monotonic()
    llm = LLM(**job["engine"])
    start_s = time.monotonic() - started
    config = llm.llm_engine.vllm_config
    pool = config.cache_config.num_gpu_blocks
    with Path(job["results"]).open("a") as results:
        for num_requests in job["requests"]:
            before = counts()
            row = measure(llm, num_requests, job["context"], job["num_tokens"]) | {"requests": num_requests}
            # One more step lets the backend see that the requests left.
            llm.llm_engine.step()
            after = counts()
            if after:
                spent = {name: after[name] - before[name] for name in after}
                row |= derive(row, spent, num_pairs=_num_pairs()) | _host_bytes(row)
            row |= memory(row, context=job["context"], **_sizes(config, llm))
            row |= {"engine_blocks": pool, "start_s": start_s} | _device_bytes()
            results.write(json.dumps(row | {"step_sizes": _step_sizes(config)}) + "\n")
            results.flush()
    os._exit(0)


def _keep_own_head() -> None:
    """Give EAGLE-3 heads with random weights the output layer that their configuration names.

    vLLM learns from the names of loaded weights that a head has one of its own; random ones have no names, and it would
    use the target's, which may be several times as large.
    """
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True


def _num_pairs() -> int:
    from oasiskv.engine.vllm.worker import current

    backend = current()
    assert backend is not None
    assert backend.runtime is not None
    return backend.runtime.shape.num_layers * backend.runtime.shape.num_kv_heads


def _host_bytes(row: Mapping[str, float]) -> dict[str, float]:
    from oasiskv.engine.vllm.worker import current

    backend = current()
    assert backend is not None
    assert backend.runtime is not None
    return {
        "host_bytes": backend.config.host_pool_bytes,
        "host_kv_bytes": row["host_held_blocks"] * backend.runtime.shape.host_block_bytes,
    }


def _sizes(config: Any, llm: Any) -> dict[str, Any]:
    """Return what `memory` must know of the engine."""
    from oasiskv.engine.vllm import settings

    (group,) = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    block_size = group.kv_cache_spec.block_size
    budget_blocks, page_rows = 0, 1
    if settings.is_enabled(config):
        layout = settings.layout_of(config, settings.load(config))
        budget_blocks, page_rows = layout.budget_blocks, layout.rows_per_page
    return {
        "block_size": block_size,
        "block_bytes": group.kv_cache_spec.page_size_bytes * len(group.layer_names),
        "budget_blocks": budget_blocks,
        "page_rows": page_rows,
    }


def _step_sizes(config: Any) -> dict[str, int]:
    """Return what `bench fit` must know of the model; of a stock engine too."""
    from oasiskv.core.config import LookaheadConfig
    from oasiskv.engine.vllm import settings

    ours = settings.load(config) if settings.is_enabled(config) else LookaheadConfig()
    sizes = {"block_size": config.cache_config.block_size, "budget_blocks": ours.budget_blocks}
    return sizes | settings.step_sizes(config, ours)


def _device_bytes() -> dict[str, float]:
    """Return the most that this process took of the GPU; nothing without one."""
    import torch

    return {"hbm_bytes": torch.cuda.max_memory_reserved()} if torch.cuda.is_available() else {}


if __name__ == "__main__":
    main()
