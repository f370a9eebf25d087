"""What `oasiskv run` prints, from numbers that are known."""

import itertools
import json
from pathlib import Path

import pytest

from oasiskv.cli import demo
from oasiskv.cli.demo import Question, Reply, find_text, table
from oasiskv.cli.launch import Request, prepare
from oasiskv.core.needle import Needle

COUNTS = {
    "predicted_blocks": 100.0,
    "hit_blocks": 70.0,
    "fetched_blocks": 20.0,
    "deferred_blocks": 10.0,
    "late_blocks": 3.0,
    "wasted_blocks": 2.0,
    "sparse_steps": 12.0,
    "load_bytes": 3 * 2**20,
    "store_bytes": 2 * 2**30,
    "finished_engine_blocks": 75.0,
    "finished_dense_blocks": 390.0,
}
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}


def lines(tmp_path: Path, ours: str, **more: float) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    launch = prepare(Request(model=str(tmp_path)), "cpu", print)
    question = Question(needle=Needle(), content="", token_ids=list(range(6200)))
    sparse = Reply(text=ours, first_token_s=10.0, tokens_per_s=3.0)
    dense = Reply(text="It is 48213.", first_token_s=0.04, tokens_per_s=4.0)
    counts = {f"oasiskv_{name}_total": value for name, value in (COUNTS | more).items()}
    return list(table(launch, question, sparse, dense, counts))


def test_the_table_has_every_number_of_both_engines(tmp_path: Path) -> None:
    found = lines(tmp_path, "It is 48213.")
    words = [line.split() for line in found]
    assert ["the", "fact", "(48213)", "found", "found"] in words
    assert ["engine", "blocks", "held", "75", "390"] in words
    assert ["first", "token,", "s", "10.00", "0.04"] in words
    assert ["then", "tokens/s", "3.0", "4.0"] in words
    text = "\n".join(found)
    assert "blocks predicted 100 = hit 70 + fetched 20 + deferred 10, over 12 sparse steps" in text
    assert "late 3, wasted 2" in text
    assert "moved: 3.0 MiB from host memory to the engine, 2.0 GiB to host memory" in text


def test_the_table_says_what_came_from_staging_where_services_share_the_work(tmp_path: Path) -> None:
    moved = {"handover_bytes": 8 * 2**20, "admitted_bytes": 2**20, "missed_bytes": 2**21}
    found = lines(tmp_path, "It is 48213.", **moved)
    assert ["KV", "at", "admission", "1.0", "MiB", "8.0", "MiB,", "all", "of", "it"] in [line.split() for line in found]
    assert "from staging: 1.0 MiB at admission and 2.0 MiB later, of 8.0 MiB" in found
    assert "admission" not in "".join(lines(tmp_path, "It is 48213."))


def test_a_missed_fact_is_said(tmp_path: Path) -> None:
    assert ["the", "fact", "(48213)", "missed", "found"] in [line.split() for line in lines(tmp_path, "It is 482.")]


def test_the_counters_are_read_once_the_request_is_over_and_they_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTLE_POLL_S", 0)
    steps = [(0, 5.0), (0, 5.0), (1, 5.0), (1, 9.0), (1, 9.0), (1, 10.0)]
    reads = iter([{demo.FINISHED: 2.0 + finished, "oasiskv_hit_blocks_total": hits} for finished, hits in steps])
    found = demo.read_settled(lambda: next(reads), {demo.FINISHED: 2.0, "oasiskv_hit_blocks_total": 1.0})
    assert found == {demo.FINISHED: 3.0, "oasiskv_hit_blocks_total": 9.0}
    assert len(list(reads)) == 1


def test_counters_that_never_stand_still_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTLE_POLL_S", 0)
    monkeypatch.setattr(demo, "SETTLE_TIMEOUT_S", 0.01)
    reads = itertools.count()
    found = demo.read_settled(lambda: {demo.FINISHED: float(next(reads))}, {demo.FINISHED: 0.0})
    assert found == {demo.FINISHED: float(next(reads) - 1)}


@pytest.mark.parametrize(("device", "is_eager"), [("cpu", True), ("cuda", False)])
def test_both_engines_capture_graphs_on_a_gpu_and_neither_on_a_cpu(device: str, is_eager: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    launch = prepare(Request(model=str(tmp_path)), device, print)
    assert ("--enforce-eager" in launch.arguments) == is_eager
    assert demo._dense_engine(launch)["enforce_eager"] == is_eager


def test_the_committed_text_is_found() -> None:
    assert len(find_text().read_text()) > 100_000
