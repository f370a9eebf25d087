"""What `oasiskv run` prints, from numbers that are known."""

import json
from pathlib import Path

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


def lines(tmp_path: Path, ours: str) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    launch = prepare(Request(model=str(tmp_path)), "cpu", print)
    question = Question(needle=Needle(), content="", token_ids=list(range(6200)))
    sparse = Reply(text=ours, first_token_s=10.0, tokens_per_s=3.0)
    dense = Reply(text="It is 48213.", first_token_s=10.0, tokens_per_s=4.0)
    counts = {f"oasiskv_{name}_total": value for name, value in COUNTS.items()}
    return list(table(launch, question, sparse, dense, counts))


def test_the_table_has_every_number_of_both_engines(tmp_path: Path) -> None:
    found = lines(tmp_path, "It is 48213.")
    words = [line.split() for line in found]
    assert ["the", "fact", "(48213)", "found", "found"] in words
    assert ["engine", "blocks", "held", "75", "390"] in words
    assert ["then", "tokens/s", "3.0", "4.0"] in words
    text = "\n".join(found)
    assert "blocks predicted 100 = hit 70 + fetched 20 + deferred 10, over 12 sparse steps" in text
    assert "late 3, wasted 2" in text
    assert "moved: 3.0 MiB from host memory to the engine, 2.0 GiB to host memory" in text


def test_a_missed_fact_is_said(tmp_path: Path) -> None:
    assert ["the", "fact", "(48213)", "missed", "found"] in [line.split() for line in lines(tmp_path, "It is 482.")]


def test_the_committed_text_is_found() -> None:
    assert len(find_text().read_text()) > 100_000
