"""`oasiskv run`: a model answers a question about a long text while most of its KV cache lies outside the engine.

Without a GPU, prefill and decode are services of their own, as `oasiskv up` starts them. The answer of the same model
in stock vLLM, with everything resident, is printed beside ours.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oasiskv.cli.client import Answer, ask, read_metrics
from oasiskv.cli.cluster import Cluster
from oasiskv.cli.doctor import missing_for_services
from oasiskv.cli.launch import (
    Launch,
    Request,
    check_context,
    check_port,
    environment,
    find_device,
    free_port,
    prepare,
    told_as,
)
from oasiskv.cli.offline import Offline
from oasiskv.cli.serve import clock
from oasiskv.cli.server import Server, Show, stopped_by_sigterm
from oasiskv.cli.services_file import file_for, split
from oasiskv.core.errors import ConfigError, PeerUnavailableError, UnsupportedError
from oasiskv.core.host_memory import size
from oasiskv.core.needle import Needle, build_needle_prompt
from oasiskv.engine.vllm.offline import Prompt

DEFAULT_CONTEXT = 6325
"""Tokens of the prompt; with it SmolLM2 finds the fact densely and sparsely by a clear margin."""

ANSWER_TOKENS = 48
"""Most tokens of an answer; a right one takes about 15."""

FINISHED = "oasiskv_finished_requests_total"

SETTLE_POLL_S = 0.2
"""Counters that are the same after this time are the last ones."""

SETTLE_TIMEOUT_S = 5.0

TEXT = "ruth-1samuel.txt"
"""Of the folder `examples/texts`, which a wheel carries too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What both engines are asked."""

    needle: Needle
    content: str
    """The user's message."""
    token_ids: list[int]
    """The whole prompt as the chat template makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one engine answered."""

    text: str
    first_token_s: float
    """Seconds from the question to the first token."""
    tokens_per_s: float


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv run`."""
    parser = subparsers.add_parser("run", help="see a small model answer from a long text with the backend on")
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="a folder or smollm2-135m, the default")
    parser.add_argument("--model", help="the same as MODEL")
    parser.add_argument("--context", type=int, default=DEFAULT_CONTEXT, help="tokens in the prompt (%(default)s)")
    parser.add_argument("--budget-blocks", type=int, help="resident blocks; default an eighth of the context")
    parser.add_argument("--port", type=int, help="on loopback; default a free one")
    parser.add_argument("--text", type=Path, help="text to hide the fact in; default: Ruth and Samuel")
    parser.add_argument(
        "--single", action="store_true", help="one server in place of staging, prefill and decode; so on a GPU anyway"
    )
    parser.add_argument("--keep", action="store_true", help="go on serving afterwards, until ctrl-C")
    parser.add_argument("--verbose", action="store_true", help="show all of vLLM's log")


def run(args: argparse.Namespace) -> int:
    """Ask both engines and print what happened; return 1 if ours missed the fact."""
    started, device = time.monotonic(), find_device()
    name = args.model or args.folder or "smollm2-135m"
    request = _request(name, args)
    check_context(request, args.context, ANSWER_TOKENS, _say)
    with told_as("--context", "--max-model-len"):
        launch = prepare(request, device, _say)
    if device != "cpu":
        # The server must leave room on the GPU, and the question needs no more than this.
        plan = launch.plan
        launch = prepare(replace(request, engine_bytes=plan.pools.default_engine_bytes(plan.config)), device, _say)
    check_port(request.host, request.port)
    kept = launch.plan.config.budget_blocks * request.block_size
    _say(
        f"Model: {launch.model.path} on {device}; both engines read {args.context:,} tokens, "
        f"ours keeps {kept:,} of them per KV head."
    )
    question = make_question(launch, args.context, args.text)
    child = {**environment(device, 1, os.environ), "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    dense = Offline(_dense_engine(launch), [Prompt(token_ids=question.token_ids, max_tokens=ANSWER_TOKENS)], child)
    show = _say if args.verbose else clock(_say)
    # Two engines on one GPU would share its memory and its time.
    has_services = device == "cpu" and not args.single
    if has_services and (missing := missing_for_services()):
        _say(f"services lack {', '.join(missing)} (pip install -e '.[services]'), so one server does everything")
        has_services = False
    what = "staging, prefill and decode" if has_services else "one server"
    show(f"starting {what} with OasisKV, and a stock vLLM beside")
    with TemporaryDirectory(prefix="oasiskv-") as folder, stopped_by_sigterm(), dense:
        if device != "cpu":
            reference = _reference(dense)
        if has_services:
            server: Server | Cluster = _services(launch, request.port, Path(folder), child, show, args.verbose)
        else:
            server = _server(launch, request.port, child, show, args.verbose)
        with server:
            server.wait_ready()
            if has_services:
                show("ready")
            if device == "cpu":
                # On a CPU stock vLLM answers while the server starts, which keeps one core busy at most.
                with waiting("stock vLLM answers first, with everything resident"):
                    reference = _reference(dense)
            print(f"\n{question.needle.question}", flush=True)
            before = read_metrics(request.port)
            try:
                answer = _ask(request.port, question)
            except PeerUnavailableError:
                server.check()  # which process ended, and why, says more
                raise
            after = read_settled(lambda: read_metrics(request.port), before)
            print("\n")
            ours = Reply(text=answer.text, first_token_s=answer.token_times[0], tokens_per_s=answer.tokens_per_s)
            counts = {name: value - before.get(name, 0) for name, value in after.items()}
            print("\n".join(table(launch, question, ours, reference, counts)))
            print(f"\n{time.monotonic() - started:.0f} s in all")
            if args.keep:
                print(f"serving on http://127.0.0.1:{request.port} until ctrl-C")
                server.wait()
    is_found, is_reference_found = (question.needle.is_answered_by(reply.text) for reply in (ours, reference))
    if not is_found:
        hint = "" if is_reference_found else "; nor did stock vLLM: take another --context or --model"
        print(f"error: answer: expected {question.needle.number} in it, got {ours.text!r}{hint}", file=sys.stderr)
    return 0 if is_found else 1


def _server(launch: Launch, port: int, child: Mapping[str, str], show: Show, is_verbose: bool) -> Server:
    """Return one server that prefills and decodes."""
    return Server(
        launch.command(),
        child,
        show,
        is_verbose=is_verbose,
        # Anything less would stand in the middle of the answer.
        least_level="WARNING",
        address=("127.0.0.1", port),
    )


def _services(
    launch: Launch, port: int, folder: Path, child: Mapping[str, str], show: Show, is_verbose: bool
) -> Cluster:
    """Return services that share the same work, each as large as the one server."""
    processes = split(file_for(launch, "demo", f"127.0.0.1:{port}"), folder)
    return Cluster(processes, child, show, is_verbose=is_verbose, least_level="ERROR")


def make_question(launch: Launch, num_tokens: int, path: Path | None) -> Question:
    """Hide the fact in a text and ask for it, in `num_tokens` tokens as the model sees them.

    Raises:
        ConfigError: there is no such text, or no tokenizer.
        InvalidRequestError: the text is too short.
        UnsupportedError: the model is not one to chat with.
    """
    text, tokenizer = read_text(path), load_tokenizer(launch.model.path)
    if tokenizer.chat_template is None:
        raise UnsupportedError("MODEL: expected a tokenizer with a chat template, got one without")

    def encode(content: str) -> list[int]:
        chat = [{"role": "user", "content": content}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    needle = Needle()
    with told_as("--context", "num_tokens"), told_as("--text", "text"):
        content = build_needle_prompt(
            text, needle, num_tokens=num_tokens, count_tokens=lambda content: len(encode(content))
        )
    return Question(needle=needle, content=content, token_ids=encode(content))


def read_text(path: Path | None) -> str:
    """Read a text, the committed one where none is named.

    Raises:
        ConfigError: it is no text that can be read.
    """
    try:
        return (path or find_text()).read_text(encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"--text: expected a file of text, got {path} ({cause.strerror})") from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"--text: expected a file of text in UTF-8, got {path} with other bytes") from cause


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model that was found.

    Raises:
        ConfigError: it has none that loads.
    """
    from transformers import AutoTokenizer

    try:
        # A text longer than the model can take is no mistake here: it is cut to size.
        return AutoTokenizer.from_pretrained(model, model_max_length=10**9)
    except (OSError, ValueError, KeyError) as cause:
        reason = str(cause).strip().partition("\n")[0]
        raise ConfigError(f"MODEL: expected a tokenizer beside the weights, got {reason}") from cause


def find_text() -> Path:
    """Return the committed text: beside this module in a wheel, among the examples in a checkout."""
    here = Path(__file__).parent / "texts" / TEXT
    return here if here.is_file() else Path(__file__).parents[3] / "examples" / "texts" / TEXT


def table(
    launch: Launch, question: Question, ours: Reply, reference: Reply, counts: Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines of the comparison."""
    needle = question.needle
    held, dense = counts["oasiskv_finished_engine_blocks_total"], counts["oasiskv_finished_dense_blocks_total"]

    def count(name: str) -> str:
        return f"{counts[f'oasiskv_{name}_total']:,.0f}"

    def row(name: str, left: str, right: str) -> str:
        return f"{name:20}{left:>22}{right:>26}"

    def found(reply: Reply) -> str:
        return "found" if needle.is_answered_by(reply.text) else "missed"

    yield row("", "OasisKV", "stock vLLM, all resident")
    yield row(f"the fact ({needle.number})", found(ours), found(reference))
    yield row("context, tokens", f"{len(question.token_ids):,}", f"{len(question.token_ids):,}")
    yield row("engine blocks held", f"{held:,.0f}", f"{dense:,.0f}")
    if full := counts.get("oasiskv_handover_bytes_total", 0):
        admitted = counts["oasiskv_admitted_bytes_total"]
        yield row("KV at admission", size(int(admitted)), f"{size(int(full))}, all of it")
    yield row("first token, s", f"{ours.first_token_s:.2f}", f"{reference.first_token_s:.2f}")
    yield row("then tokens/s", f"{ours.tokens_per_s:.1f}", f"{reference.tokens_per_s:.1f}")
    yield ""
    yield f"stock vLLM answered: {reference.text.strip()}"
    yield (
        f"blocks predicted {count('predicted_blocks')} = hit {count('hit_blocks')} + fetched {count('fetched_blocks')} "
        f"+ deferred {count('deferred_blocks')}, over {count('sparse_steps')} sparse steps"
    )
    yield f"of those fetched: late {count('late_blocks')}, wasted {count('wasted_blocks')}"
    load, store = (size(int(counts[f"oasiskv_{name}_bytes_total"])) for name in ("load", "store"))
    yield f"moved: {load} from host memory to the engine, {store} to host memory"
    if full:
        missed = counts["oasiskv_missed_bytes_total"]
        yield (
            f"from prefill to decode: {size(int(admitted))} at admission (first set, summaries, map), "
            f"{size(int(missed))} later, of {size(int(full))}"
        )


def _request(name: str, args: argparse.Namespace) -> Request:
    block_size = 16
    if args.context < 8 * 2 * block_size:
        raise ConfigError(f"--context: expected at least {8 * 2 * block_size}, got {args.context}")
    budget = args.context // 8 // block_size if args.budget_blocks is None else args.budget_blocks
    return Request(
        model=name,
        budget_blocks=budget,
        block_size=block_size,
        max_model_len=-(-(args.context + ANSWER_TOKENS) // block_size) * block_size,
        max_num_seqs=2,
        host="127.0.0.1",
        port=args.port or free_port(),
        rest=["--served-model-name", "demo", "--disable-uvicorn-access-log"],
    )


def _dense_engine(launch: Launch) -> dict[str, Any]:
    pools = launch.plan.pools
    return {
        "model": launch.model.path,
        "dtype": pools.shape.dtype,
        "max_model_len": pools.max_model_len,
        "max_num_seqs": 1,
        # On a GPU both engines compile and capture graphs, so that their speeds can be compared.
        "enforce_eager": launch.device == "cpu",
        # vLLM's own block size may be up to 128 tokens, and its pool is in whole blocks.
        "kv_cache_memory_bytes": (pools.longest_blocks + 32) * pools.block_bytes,
    }


def _reference(dense: Offline) -> Reply:
    result = dense.wait().results[0]
    first, last = result.token_times[0], result.token_times[-1]
    speed = (len(result.token_times) - 1) / (last - first) if last > first else 0.0
    return Reply(text=result.text, first_token_s=first, tokens_per_s=speed)


def _ask(port: int, question: Question) -> Answer:
    request = {
        "model": "demo",
        "messages": [{"role": "user", "content": question.content}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
    }
    with ExitStack() as stack:
        stack.enter_context(waiting(f"reading {len(question.token_ids):,} tokens"))

        def show(piece: str) -> None:
            stack.close()
            print(piece, end="", flush=True)

        return ask(port, request, show)


def read_settled(read: Callable[[], dict[str, float]], before: Mapping[str, float]) -> dict[str, float]:
    """Read the counters once the engine has told the last of them, which it does a few steps after the answer.

    Args:
        read: Reads them once.
        before: What they were before the only request; after `SETTLE_TIMEOUT_S` the latest are returned as they are.
    """
    end, last, now = time.monotonic() + SETTLE_TIMEOUT_S, before, read()
    while time.monotonic() < end and (now != last or now[FINISHED] == before[FINISHED]):
        time.sleep(SETTLE_POLL_S)
        last, now = now, read()
    return now


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is being waited for, and on a terminal for how long already."""
    done, is_terminal, started = threading.Event(), sys.stderr.isatty(), time.monotonic()

    def count() -> None:
        while not done.wait(1.0):
            print(f"\r{what}: {time.monotonic() - started:.0f} s ", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=count if is_terminal else done.wait, name="waiting", daemon=True)
    print(f"{what} ", end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_terminal:
            print(file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
