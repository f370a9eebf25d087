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

    Args:
        llm: vLLM's `LLM`.
        num_requests: Requests.
        context: Prompt tokens of each.
        num_tokens: Tokens that the last one to decode generates; those before it a few more, so that all decode
            together for a while.

    Returns:
        Milliseconds of a step (`tpot_ms_*`), tokens per second of those steps and of the whole round, seconds to first
        tokens (`ttft_s_*`), and how many requests decoded together.
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
    while engine.has_unfinished_requests():
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            first_tokens.setdefault(output.request_id, now - started)
        settled = sum(request.num_output_tokens > SETTLED_TOKENS for request in scheduler.running)
        steps.append((now, settled))
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
    }


def counts() -> dict[str, float]:
    """Return the backend's counters, settled; none in a stock engine."""
    worker = sys.modules.get("oasiskv.engine.vllm.worker")
    backend = worker and worker.current()
    if backend is None or backend.runtime is None:
        return {}
    return dict(backend.runtime.counts(wait=True))


def derive(row: Mapping[str, float], spent: Mapping[str, float], *, cap: int, num_pairs: int) -> dict[str, float]:
    """Return what a round says of the backend.

    Args:
        row: Of `measure`.
        spent: What was counted during the round.
        cap: Units that a KV head may fetch per step.
        num_pairs: Layers times KV heads of this process.
    """
    sparse_rows = max(1.0, spent["sparse_rows"])
    load_bytes_per_row = spent["load_bytes"] / sparse_rows
    return {
        "sparse_rows": spent["sparse_rows"],
        "cap_share": spent["fetched"] / (sparse_rows * num_pairs * cap),
        "deferred_share": spent["deferred"] / max(1.0, spent["predicted"]),
        "hit_share": spent["hit"] / max(1.0, spent["predicted"]),
        "late_layers": spent["late_layers"],
        "stall_ms_per_step": 1e3 * spent["stall_seconds"] / max(1.0, row["steps"]),
        "load_bytes_per_step": load_bytes_per_row * row["running"],
        "link_gb_per_s": load_bytes_per_row * row["running"] / row["tpot_ms_mean"] / 1e6,
    }


def main() -> None:
    """Do the job of the command line: start the engine and run its rounds."""
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    started = time.monotonic()
    llm = LLM(**job["engine"])
    start_s = time.monotonic() - started
    config = llm.llm_engine.vllm_config
    pool = config.cache_config.num_gpu_blocks
    with Path(job["results"]).open("a") as results:
        for num_requests in job["requests"]:
            before = counts()
            row = measure(llm, num_requests, job["context"], job["num_tokens"])
            # One more step lets the backend see that the requests left.
            llm.llm_engine.step()
            after = counts()
            if after:
                spent = {name: after[name] - before[name] for name in after}
                row |= derive(row, spent, cap=job["cap"], num_pairs=_num_pairs())
            row |= {"requests": num_requests, "engine_blocks": pool, "start_s": start_s}
            results.write(json.dumps(row) + "\n")
            results.flush()
    os._exit(0)


def _num_pairs() -> int:
    from oasiskv.engine.vllm.worker import current

    backend = current()
    assert backend is not None
    assert backend.runtime is not None
    return backend.runtime.shape.num_layers * backend.runtime.shape.num_kv_heads


if __name__ == "__main__":
    main()
