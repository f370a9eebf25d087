"""`oasiskv trace record` with a real engine: what it takes down is what the backend selected, and can be replayed."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli.main import main
from oasiskv.core.trace import load_trace
from oasiskv.engine.testing import write_tiny_model

pytestmark = pytest.mark.timeout(300)


def test_a_run_of_a_model_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model", num_layers=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(model)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"w{index}" for index in np.random.default_rng(0).integers(0, 256, 400)))
    out = tmp_path / "traces" / "words.npz"
    command = ["trace", "record", "--model", str(model), "--context", "200", "--steps", "40", "--budget-blocks", "4"]
    assert main([*command, "--text", str(text), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "source    recorded from model reading words.txt, float32 on a CPU" in printed
    trace = load_trace(out)
    assert trace.blocks.shape == (41, 3, 2, 4)
    assert (trace.num_tokens, trace.num_prompt_blocks) == (200, 12)
    assert (trace.blocks[1:, ..., 0] == 0).all(), "the sink block has the best score"
    # The text moves on, so selections do; and blocks that were completed on the way are found.
    assert len(np.unique(trace.blocks[1:].reshape(40, -1), axis=0)) > 20
    assert trace.blocks.max() > 12
    assert main(["trace", "stats", str(out)]) == 0
    assert capsys.readouterr().out == printed
