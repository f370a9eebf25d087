"""Time decode steps of a served model inside vLLM, with OasisKV or without, on one GPU and real prefill.

    python benchmarks/decode_step.py MODEL [--drafter EAGLE3_HEAD] [--stock] [--requests 1 16 40] [--context 16384]
        [--host-memory 100GiB] [--host-dtype fp8] [--memory-share 0.515] [--output FILE]
        [--set switch=early] [--set signal=joined]

Weights are dummies, so the tokens mean nothing; the time, the bytes and the memory do. A step counts while all requests
of the round decode at once. 0.515 of an H200's memory stands for an 80 GB GPU.
"""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import statistics
import time
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


def setting(text: str) -> tuple[str, Any]:
    """Read `name=value`; the value is JSON, or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def start(args: argparse.Namespace) -> Any:
    """Start the engine in this process."""
    from vllm import LLM

    most = max(args.requests)
    extra: dict[str, Any] = {}
    if not args.stock:
        settings = {"host_pool_bytes": args.host_memory, "host_dtype": args.host_dtype} | dict(args.settings)
        extra["worker_cls"] = "oasiskv.engine.vllm.cuda.Worker"
        extra["kv_transfer_config"] = {
            "kv_connector": "OasisKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
    queries = 1
    if args.drafter:
        queries = 2
        extra["speculative_config"] = {"method": "eagle3", "model": args.drafter, "num_speculative_tokens": 1}
    return LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=16,
        enable_prefix_caching=False,
        max_model_len=args.context + 512,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=args.memory_share,
        compilation_config={"cudagraph_capture_sizes": [queries * count for count in args.requests]},
        **extra,
    )


def measure(llm: Any, count: int, context: int) -> dict[str, float]:
    """Run one round of `count` requests and time the steps in which all of them decode."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    for i in range(count):
        # Requests that entered first decode longest, so that all decode together for a while.
        length = 70 + 2 * (count - i)
        sampling = SamplingParams(temperature=1.0, seed=i, max_tokens=length, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [i + 1] + [7 + i] * (context - 1)}
        engine.add_request(f"{count}-{i}", prompt, sampling)
    started, steps = time.perf_counter(), []
    while engine.has_unfinished_requests():
        engine.step()
        steps.append((time.perf_counter(), sum(r.num_output_tokens > 3 for r in scheduler.running)))
    running = max(n for _, n in steps)
    times = [at for at, n in steps if n == running]
    gaps = [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    return {
        "requests": count,
        "running": running,
        "steps": len(times),
        "tpot_ms_mean": statistics.fmean(gaps),
        "tpot_ms_median": statistics.median(gaps),
        "tokens_per_s": 1e3 * running / statistics.fmean(gaps),
        "wall_s": time.perf_counter() - started,
    }


def main() -> None:
    """Measure every round and print or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 40])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--host-memory", default="100GiB")
    parser.add_argument("--host-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--memory-share", type=float, default=0.515)
    parser.add_argument(
        "--set", dest="settings", type=setting, action="append", default=[], help="further settings of the backend"
    )
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    import torch
    import vllm

    llm = start(args)
    rounds = []
    for count in args.requests:
        rounds.append(measure(llm, count, args.context))
        print(json.dumps(rounds[-1]), flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "weights": "dummy",
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "rounds": rounds,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
