"""`oasiskv bench disagg` with a real staging service: its figures are those that the trace itself says."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.cli.main import main
from oasiskv.core.trace import SelectionTrace, save_trace, trace_stats

pytestmark = pytest.mark.timeout(200)

NUM_TOKENS, NUM_STEPS, NUM_LAYERS, BUDGET = 16 * 60, 24, 2, 8
BLOCK_GIB = 36 * 8 * 16 * 2 * 128 * 2 / 2**30
"""A block of the model whose bytes are told, all layers."""


def write_trace(path: Path) -> SelectionTrace:
    """Write a trace whose heads select alike and move on a little in each step."""
    random = np.random.default_rng(0)
    blocks = np.zeros((NUM_STEPS + 1, NUM_LAYERS, 8, BUDGET), np.uint16)
    for step, layer, head in np.ndindex(*blocks.shape[:3]):
        first = 1 + step + 2 * layer + head % 2
        blocks[step, layer, head, 1:] = random.permutation(np.arange(first, first + BUDGET - 1))
    trace = SelectionTrace(num_tokens=NUM_TOKENS, block_size=16, num_sinks=1, source="made by a test", blocks=blocks)
    save_trace(trace, path)
    return trace


@dataclass
class Done:
    trace: SelectionTrace
    report: dict[str, Any]
    out: str
    err: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("disagg")
    trace = write_trace(folder / "trace.npz")
    command = ["bench", "disagg", "--traces", str(folder / "trace.npz"), "--no-plots", "--out", str(folder / "results")]
    command += ["--requests", "3", "--concurrency", "2", "--links", "1", "--host-less", "2"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    assert code == 0, err.getvalue()
    (found,) = (folder / "results").iterdir()
    return Done(trace, json.loads(found.read_text()), out.getvalue(), err.getvalue())


def test_what_crosses_is_what_the_trace_selects(done: Done) -> None:
    stats, report = trace_stats(done.trace), done.report
    rows = {row["mode"]: row for row in report["rows"]}
    assert list(rows) == ["dense", "full", "partial", "capped-0.1", "capped-0.05", "capped-0.05, host/2"]
    full_gib = 60 * BLOCK_GIB
    beside_gib = (4 + 2) * BLOCK_GIB  # summary pages, the active block's place and the map
    beside_gib -= BLOCK_GIB  # the prompt ends with a block, so none is active
    for row in rows.values():
        assert row["path"] != "mapped"
        assert row["full_gib"] == pytest.approx(full_gib)
        assert row["total_gib"] == pytest.approx(row["admitted_gib"] + row["missed_gib"])
        total_gb = 3 * row["total_gib"] * 2**30 / 1e9
        assert sum(row["network_gb_per_s"]) * row["window_s"] == pytest.approx(total_gb, rel=1e-3)
    assert rows["dense"]["total_gib"] == pytest.approx(full_gib)
    assert rows["dense"]["host_gib"] == 0
    assert rows["full"]["total_gib"] == pytest.approx(full_gib + beside_gib)
    for name in ("partial", "capped-0.1", "capped-0.05"):
        row = rows[name]
        assert row["first_set_gib"] == pytest.approx(stats.first_union * BLOCK_GIB)
        assert row["admitted_gib"] == pytest.approx(stats.first_union * BLOCK_GIB + beside_gib)
        assert row["total_x"] == pytest.approx(rows["full"]["total_gib"] / row["total_gib"])
        assert row["host_gib"] < rows["full"]["host_gib"]
    # Without a cap every block that the trace ever selects comes, once; with a cap some never do.
    partial = rows["partial"]
    assert partial["first_set_gib"] + partial["missed_gib"] == pytest.approx(stats.touched * BLOCK_GIB)
    assert partial["counts"]["deferred"] == 0 < rows["capped-0.05"]["counts"]["deferred"]
    assert rows["capped-0.05"]["total_gib"] <= partial["total_gib"]
    # All KV takes 61 blocks and one more for the tokens to come, and so does the one that is half way through.
    limited = rows["capped-0.05, host/2"]
    assert limited["host_peak_gib"] <= 62 * BLOCK_GIB < rows["capped-0.05"]["host_peak_gib"] * 2
    assert limited["total_gib"] >= rows["capped-0.05"]["total_gib"]
    assert limited["counts"] == rows["capped-0.05"]["counts"]
    (described,) = report["traces"]
    assert described["drift"] == stats.drift
    assert "These are statistics of a trace, not results of a model." in done.out
    assert "no result of a model" in report["what"]


def test_an_admission_is_not_faster_than_its_link(done: Done) -> None:
    rows = {row["mode"]: row for row in done.report["links"]}
    if not rows:
        assert "so links are not shaped on this machine" in done.err
        pytest.skip(f"no shaped link on this host: {done.err}")
    assert list(rows) == ["dense", "full", "capped-0.05"]
    assert {row["link"] for row in rows.values()} == {"1 Gb/s"}
    # 60 blocks and 5 beside them are 0.15 GB, of which a quarter passes as a burst.
    assert rows["full"]["admission_s"] > 0.7
