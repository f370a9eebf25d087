"""Prompts through an engine in a process of its own: the dense answers that `run` and `eval` compare with.

The process is `oasiskv.engine.vllm.offline`.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from oasiskv.cli.log import LogReader
from oasiskv.core.errors import EngineFailedError
from oasiskv.engine.vllm.offline import Prompt, Result


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

    def __init__(
        self, engine: Mapping[str, Any], prompts: Sequence[Prompt], environment: Mapping[str, str], **more: str
    ) -> None:
        """Prepare a job.

        Args:
            engine: Arguments of vLLM's `LLM`.
            prompts: Run together, as the engine batches them.
            environment: Of the process.
            more: What else the job says, see `oasiskv.engine.vllm.offline.work`.
        """
        self._engine = dict(engine)
        self._prompts = list(prompts)
        self._more = more
        self._environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._folder = tempfile.TemporaryDirectory(prefix="oasiskv-")
        self._process: subprocess.Popen[str] | None = None
        self._log = LogReader()
        self._tail: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._read, name="offline-log", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        job = {"folder": self._folder.name, "engine": self._engine, "prompts": [asdict(p) for p in self._prompts]}
        job |= self._more
        path = Path(self._folder.name, "job.json")
        path.write_text(json.dumps(job))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oasiskv.engine.vllm.offline", str(path)],
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
