"""Prompts through an engine inside this process, which is started for them alone; `oasiskv.cli.offline` starts it.

The command line names a file with the job; the results go beside it.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oasiskv.core.errors import UnsupportedError
from oasiskv.engine.vllm.api_server import end_with_parent


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


def work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do a job in this process and return the content of its results.

    With `trace`, a path, what its only request selects goes there, with `source` to say where it comes from.
    """
    from vllm import LLM, SamplingParams

    from oasiskv.core.trace import save_trace
    from oasiskv.engine.vllm import forcing
    from oasiskv.engine.vllm.worker import current

    engine, prompts = dict(job["engine"]), [Prompt(**prompt) for prompt in job["prompts"]]
    if any(prompt.forced for prompt in prompts):
        engine["logits_processors"] = [forcing.ForceTokens]
    llm = LLM(**engine)
    recorder = _recorder() if job.get("trace") else None
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
    if recorder is not None:
        save_trace(recorder.trace(len(prompts[0].token_ids), job["source"]), Path(job["trace"]))
    return {
        "results": [asdict(result) for result in results.values()],
        "counts": {} if backend is None or backend.runtime is None else backend.runtime.counts(),
        "log_probs": [
            _save(Path(job["folder"], f"{index}.npy"), forcing.recorded(str(index)).numpy())
            for index, prompt in enumerate(prompts)
            if prompt.forced
        ],
    }


def _recorder() -> Any:
    from oasiskv.engine.record import Recorder
    from oasiskv.engine.vllm.worker import current

    backend = current()
    if backend is None or backend.runtime is None:
        raise UnsupportedError("trace: expected an engine with the backend in this process, got another")
    return Recorder(backend.runtime)


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
