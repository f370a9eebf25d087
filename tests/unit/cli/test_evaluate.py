"""The numbers of `oasiskv eval`, against a plain loop over steps and tokens."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from oasiskv.cli import evaluate, main
from oasiskv.cli.evaluate import Score, compare, score
from oasiskv.cli.offline import Results
from oasiskv.cli.plan import ModelShape, Pools
from oasiskv.core.errors import ConfigError


def log_softmax(values: np.ndarray) -> np.ndarray:
    return np.asarray(values - np.log(np.exp(values).sum(-1, keepdims=True)))


def test_the_scores_equal_a_plain_loop_and_leave_out_the_first_step() -> None:
    rng = np.random.default_rng(0)
    dense, sparse = (log_softmax(rng.standard_normal((6, 11))) for _ in range(2))
    tokens = [3, 0, 10, 4, 4, 7]
    found = score([compare(dense, sparse, tokens)])
    steps = range(1, 6)
    agree = sum(int(dense[step].argmax() == sparse[step].argmax()) for step in steps) / 5
    kl = sum(math.exp(a) * (a - b) for step in steps for a, b in zip(dense[step], sparse[step], strict=True)) / 5
    assert found.dense_perplexity == pytest.approx(math.exp(-sum(dense[step][tokens[step]] for step in steps) / 5))
    assert found.sparse_perplexity == pytest.approx(math.exp(-sum(sparse[step][tokens[step]] for step in steps) / 5))
    assert found.agreement == pytest.approx(agree)
    assert found.kl_divergence == pytest.approx(kl)


def test_equal_runs_agree_wholly() -> None:
    dense = log_softmax(np.random.default_rng(1).standard_normal((4, 5)))
    found = score([compare(dense, dense, [0, 1, 2, 3])])
    assert found == Score(
        dense_perplexity=found.dense_perplexity,
        sparse_perplexity=found.dense_perplexity,
        agreement=1.0,
        kl_divergence=0.0,
    )


def test_windows_count_by_their_steps() -> None:
    surprise = [(np.zeros(1), np.zeros(1), np.array([True]), np.zeros(1))]
    surprise += [(np.ones(3), np.ones(3), np.array([False] * 3), np.ones(3))]
    found = score(surprise)
    assert (found.agreement, found.kl_divergence) == (0.25, 0.75)
    assert found.dense_perplexity == pytest.approx(math.exp(0.75))


def test_windows_are_spread_from_the_beginning_of_the_text_to_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Tokenizer:
        def __call__(self, text: str) -> "Tokenizer":
            self.input_ids = [int(word) for word in text.split()]
            return self

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **kwargs: Tokenizer())
    path = tmp_path / "text"
    path.write_text(" ".join(map(str, range(100))))
    windows = evaluate.make_windows("model", path, context=10, steps=5, windows=3)
    assert [window.token_ids[0] for window in windows] == [0, 42, 85]
    assert windows[-1].forced == [95, 96, 97, 98, 99]
    assert all(len(window.token_ids) == 10 for window in windows)
    assert len(evaluate.make_windows("model", path, context=10, steps=5, windows=86)) == 86
    with pytest.raises(ConfigError, match=r"^--windows: expected at most 86"):
        evaluate.make_windows("model", path, context=10, steps=5, windows=1_000_000)


@pytest.mark.parametrize("max_model_len", [320, 704, 4160])
@pytest.mark.parametrize("windows", [1, 2, 5])
def test_all_windows_fit_the_engine_together_also_in_the_largest_blocks(windows: int, max_model_len: int) -> None:
    shape = ModelShape(num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", max_positions=8192)
    pools = Pools(shape=shape, block_size=16, num_workers=1, max_model_len=max_model_len, max_num_seqs=windows)
    num_blocks = evaluate.engine_bytes(pools) // (8 * pools.block_bytes)
    assert num_blocks >= windows * -(-max_model_len // 128) + 1


@pytest.mark.parametrize(("num_sparse", "code"), [(43, 1), (44, 0)])
def test_a_comparison_of_which_too_little_was_sparse_is_a_failure(
    num_sparse: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").touch()
    scores = [Score(dense_perplexity=9.0, sparse_perplexity=9.0, agreement=1.0, kl_divergence=0.0)] * 3
    monkeypatch.setattr(evaluate, "find_device", lambda: "cpu")
    monkeypatch.setattr(evaluate, "make_windows", lambda *_: [])
    monkeypatch.setattr(
        evaluate, "_measure", lambda *_: (Results(results=[], counts={"sparse_rows": num_sparse}), scores)
    )
    assert main.main(["eval", "quick", "--model", str(tmp_path), "--windows", "2", "--steps", "24"]) == code
    told = capsys.readouterr()
    assert f"{100 * num_sparse / 46:.1f} % of 46 decode steps" in told.out
    assert told.err.endswith("error: sparse steps: expected at least 95 %\n") == (code == 1)
