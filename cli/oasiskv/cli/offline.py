"""Prompts through an engine inside one process of its own: the dense answers that `run` and `eval` compare with.

`Offline` starts the process and reads its results; the process is this module run with a job on its standard input.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from oasiskv.cli.log import LogReader
from oasiskv.cli.vllm_server import end_with_parent
from oasiskv.core.errors import EngineFailedError


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One request: greedy, or forced to continue with given tokens."""

    token_ids: list[int]
    max_tokens: int
    forced: list[int] | None = None
    """Tokens to continue with; the log-probabilities are then kept."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a prompt."""

    text: str
    token_times: list[float]
    """Seconds from the start of the job to each token."""


@dataclass(slots=True, kw_only=True)
class Results:
    """What became of a job."""

    results: list[Result]
    counts: dict[str, float]
    """The backend's counters; empty with the stock engine."""
    log_probs: list[Path] = field(default_factory=list)
    """Of each forced prompt: `float32[num_steps, vocab_size]` as a NumPy file, in the folder of the job."""


class Offline:
    """One job in a process of its own; a context manager that ends it and forgets its files."""

    def __init__(self, engine: Mapping[str, Any], prompts: Sequence[Prompt], environment: Mapping[str, str]) -> None:
        """Prepare a job.

        Args:
            engine: Arguments of vLLM's `LLM`.
            prompts: Run together, as the engine batches them.
            environment: Of the process.
        """
        self._engine = dict(engine)
        self._prompts = list(prompts)
        self._environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._folder = tempfile.TemporaryDirectory(prefix="oasiskv-")
        self._process: subprocess.Popen[str] | None = None
        self._log = LogReader()
        self._tail: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._read, name="offline-log", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        job = {"folder": self._folder.name, "engine": self._engine, "prompts": [asdict(p) for p in self._prompts]}
        path = Path(self._folder.name, "job.json")
        path.write_text(json.dumps(job))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oasiskv.cli.offline", str(path)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the process if it still runs: it has nothing to save and no children."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._reader.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def wait(self) -> Results:
        """Wait for the results.

        Raises:
            EngineFailedError: the engine failed; the message is the cause it gave.
        """
        assert self._process is not None
        if (code := self._process.wait()) != 0:
            self._reader.join(5.0)
            tail = "\n".join(self._tail)
            raise EngineFailedError(self._log.cause or f"the engine ended with exit code {code}; last words:\n{tail}")
        content = json.loads(Path(self._folder.name, "results.json").read_text())
        return Results(
            results=[Result(**result) for result in content["results"]],
            counts=content["counts"],
            log_probs=[Path(path) for path in content["log_probs"]],
        )

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip("\n"))
            self._log.read(line.rstrip("\n"))


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job in this process and return the content of its results."""
    from vllm import LLM, SamplingParams

    from oasiskv.engine.vllm import forcing
    from oasiskv.engine.vllm.worker import current

    engine, prompts = dict(job["engine"]), [Prompt(**prompt) for prompt in job["prompts"]]
    if any(prompt.forced for prompt in prompts):
        engine["logits_processors"] = [forcing.ForceTokens]
    llm = LLM(**engine)
    started = time.monotonic()
    for index, prompt in enumerate(prompts):
        forced = {forcing.FORCED_TOKENS: prompt.forced, forcing.FORCED_NAME: str(index)} if prompt.forced else None
        params = SamplingParams(
            temperature=0, max_tokens=prompt.max_tokens, ignore_eos=prompt.forced is not None, extra_args=forced
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt.token_ids}, params)
    results = {str(index): Result(text="", token_times=[]) for index in range(len(prompts))}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            result, completion = results[output.request_id], output.outputs[0]
            result.text = completion.text
            result.token_times += [time.monotonic() - started] * (len(completion.token_ids) - len(result.token_times))
    backend = current()
    return {
        "results": [asdict(result) for result in results.values()],
        "counts": {} if backend is None or backend.runtime is None else backend.runtime.counts(),
        "log_probs": [
            _save(Path(job["folder"], f"{index}.npy"), forcing.recorded(str(index)).numpy())
            for index, prompt in enumerate(prompts)
            if prompt.forced
        ],
    }


def _save(path: Path, array: Any) -> str:
    import numpy as np

    np.save(path, array)
    return str(path)


def main() -> None:
    """Do the job of the command line."""
    end_with_parent()
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    content = work(job)
    path.with_name("results.json").write_text(json.dumps(content))
    # Nothing is left to be done, and an engine takes seconds to say goodbye.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
