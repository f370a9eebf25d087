"""Replays a trace through a real staging service, in a process that `oasiskv bench disagg` starts where the link ends.

The command line names a file with the job. One line of JSON per run goes to the file that the job names. Bytes are
those that really crossed; whoever reads them knows by which factor the shape was made smaller.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, OasisError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.trace import SelectionTrace, load_trace
from oasiskv.engine.replay import Replay, Step, fetch_dense, handover_layout, replay_shape, stage_prompt
from oasiskv.engine.state import CacheShape
from oasiskv.engine.vllm.api_server import end_with_parent
from oasiskv.services.clients.blocks import SessionBlocks
from oasiskv.services.clients.session import Lease, SessionConfig, StagingSession

TIMEOUT_S = 120.0
"""Of each chunk of a transfer: a slow link is what is measured, and not a failure."""

DENSE = "dense"
"""Mode of an engine without the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that all replay the trace, one way."""

    name: str
    settings: Mapping[str, Any]
    """Of the backend."""
    num_requests: int
    concurrency: int
    """Requests at a time; each begins this fraction of its length after the one before."""
    num_steps: int
    window_steps: int
    """Steps over which bytes are summed up for the series."""
    num_host_blocks: int | None = None
    """Host memory of all of them; None for all their KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is to do."""

    trace: str
    address: str
    """Of the staging service."""
    head_dim: int
    runs: Sequence[Run]
    results: str


def fingerprint_of(trace: SelectionTrace, shape: CacheShape) -> Fingerprint:
    """Return what the staged blocks of a replay are."""
    return Fingerprint(
        model_hash="replay of a trace",
        dtype="bfloat16",
        block_size=trace.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )


def config_of(trace: SelectionTrace, settings: Mapping[str, Any]) -> LookaheadConfig:
    """Return the backend's settings for a trace."""
    fixed = {"budget_blocks": trace.budget_blocks, "sink_blocks": trace.num_sinks}
    return LookaheadConfig.from_mapping({**fixed, "min_cap": 1, **settings})


class Stager:
    """The prompt of a trace in staging, and ways to read it."""

    def __init__(self, trace: SelectionTrace, shape: CacheShape, address: str) -> None:
        """Put the prompt there by shared memory, if that can be had, since only reads are measured.

        Raises:
            OasisError: Staging cannot be had, or is too small.
        """
        self._shape = shape
        self._config = SessionConfig(
            address=address,
            fingerprint=fingerprint_of(trace, shape),
            name="replay",
            may_write=True,
            timeout_s=TIMEOUT_S,
        )
        self._writer = StagingSession(self._config)
        blocks = SessionBlocks(self._writer, shape)
        try:
            config = config_of(trace, {})
            num_blocks = handover_layout(trace, config, shape).num_blocks
            self._keys = [b"block %d" % index for index in range(num_blocks)]
            import numpy as np

            lease = self._writer.allocate(num_blocks).result()
            receipt = stage_prompt(trace, config, shape, blocks, lease.token)
            sums = np.frombuffer(receipt, np.uint64).reshape(num_blocks, -1)
            self._writer.seal(lease, range(num_blocks), self._keys, sums).result()
        except BaseException:
            blocks.close()
            raise
        self._blocks = blocks

    def open(self) -> "Reader":
        """Return a way that never maps the memory, as a host elsewhere has it."""
        config = replace(self._config, may_write=False, locality="remote")
        return Reader(StagingSession(config), self._shape, self._keys)

    def close(self) -> None:
        """Give the prompt up."""
        self._blocks.close()


class Reader:
    """One decode host's way to the prompt."""

    def __init__(self, session: StagingSession, shape: CacheShape, keys: Sequence[bytes]) -> None:
        self._session = session
        self._keys = keys
        self.blocks = SessionBlocks(session, shape)
        self.path, self.path_reason = session.path, session.path_reason
        self._leases: dict[str, Lease] = {}

    def lease(self, request_id: str) -> str:
        """Take the prompt for a request, and return what it is read under."""
        self._leases[request_id] = self._session.lease(self._keys, min_blocks=len(self._keys)).result()
        return self._leases[request_id].token

    def release(self, request_id: str) -> None:
        """Give the prompt of a request back."""
        self._session.release(self._leases.pop(request_id))


def main() -> None:
    """Do the job of the command line."""
    end_with_parent()
    values = json.loads(Path(sys.argv[1]).read_text())
    job = Job(**{**values, "runs": [Run(**run) for run in values["runs"]]})
    trace = load_trace(Path(job.trace))
    shape = replay_shape(trace, job.head_dim)
    stager = Stager(trace, shape, job.address)
    try:
        with Path(job.results).open("a") as results:
            for run in job.runs:
                row = measure(trace, shape, stager, run)
                results.write(json.dumps(row) + "\n")
                results.flush()
    finally:
        stager.close()


def measure(trace: SelectionTrace, shape: CacheShape, stager: Stager, run: Run) -> dict[str, Any]:
    """Do one run and return what it came to: means per request, in bytes of the replay's own shape.

    Raises:
        OasisError: A block did not come.
    """
    if not 1 <= run.num_steps <= trace.num_steps or not 1 <= run.concurrency <= run.num_requests:
        raise ConfigError(
            f"runs: expected 1 to {trace.num_steps} steps and no more requests at a time than in all, got {run}"
        )
    short = replace(trace, blocks=trace.blocks[: run.num_steps + 1])
    reader = stager.open()
    closing: Any = reader.blocks
    try:
        if run.settings["handover_mode"] == "dense":
            steps = list(_dense_steps(short, shape, reader, run))
            counts: dict[str, float] = {}
        else:
            replay = Replay(short, config_of(trace, run.settings), shape, run.concurrency, run.num_host_blocks)
            replay.attach(reader.blocks)
            closing = replay
            steps = list(_steps(replay, reader, run))
            counts = replay.counts()
        return _row(run, reader, steps, counts)
    finally:
        closing.close()


def _begins(run: Run) -> dict[int, int]:
    """Return which request begins in which step."""
    return {number * run.num_steps // run.concurrency: number for number in range(run.num_requests)}


def _steps(replay: Replay, reader: Reader, run: Run) -> Iterator[Step]:
    begins, step = _begins(run), 0
    num_ended = 0
    while num_ended < run.num_requests:
        names = [f"request {begins[step]}"] if step in begins else []
        done = replay.step([(name, reader.lease(name)) for name in names])
        for name in done.ended:
            reader.release(name)
        num_ended += len(done.ended)
        step += 1
        yield done


def _dense_steps(trace: SelectionTrace, shape: CacheShape, reader: Reader, run: Run) -> Iterator[Step]:
    begins = _begins(run)
    idle = Step(
        seconds=0.0,
        admitted_bytes=0,
        first_set_bytes=0,
        missed_bytes=0,
        host_bytes=0,
        held_bytes=0,
        num_requests=1,
        ended=(),
    )
    for step in range(max(begins) + run.num_steps):
        if step not in begins:
            yield idle
            continue
        yield fetch_dense(trace, shape, reader.blocks, reader.lease("request"))
        reader.release("request")


def _row(run: Run, reader: Reader, steps: Sequence[Step], counts: Mapping[str, float]) -> dict[str, Any]:
    admissions = [step for step in steps if step.admitted_bytes]
    others = [step.seconds for step in steps if not step.admitted_bytes]

    def each(name: str) -> float:
        total: int = sum(getattr(step, name) for step in steps)
        return total / run.num_requests

    width = run.window_steps
    windows = [steps[first : first + width] for first in range(0, len(steps), width)]
    return {
        **{name: value for name, value in asdict(run).items() if name != "settings"},
        "path": reader.path,
        "path_reason": reader.path_reason,
        "admitted_bytes": each("admitted_bytes"),
        "first_set_bytes": each("first_set_bytes"),
        "missed_bytes": each("missed_bytes"),
        "kept_bytes": sum(step.host_bytes for step in steps) / sum(step.num_requests for step in steps),
        "held_bytes": sum(step.held_bytes for step in steps) / sum(step.num_requests for step in steps),
        "held_peak_bytes": max(step.held_bytes for step in steps),
        "admission_s": statistics.median(step.seconds for step in admissions),
        "step_ms": 1e3 * statistics.median(others) if others else None,
        "counts": {name: counts[name] for name in ("predicted", "hit", "fetched", "deferred") if name in counts},
        "network": [sum(step.admitted_bytes + step.missed_bytes for step in window) for window in windows],
        "host": [max(step.held_bytes for step in window) for window in windows],
    }


if __name__ == "__main__":
    try:
        main()
    except OasisError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
