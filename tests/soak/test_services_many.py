"""Two prefill and two decode services as processes, and a drafter on the decode side alone."""

import json
from pathlib import Path

import pytest

from oasiskv.cli.testing import LOCAL, PROMPTS, complete, file_text, metric, running, write_model
from oasiskv.engine.testing import write_tiny_eagle3

pytestmark = pytest.mark.timeout(1200)


def test_two_of_each_with_other_ranks_give_the_tokens_of_one_engine_and_share_prefixes(tmp_path: Path) -> None:
    text = file_text(write_model(tmp_path / "model"), tp_size=3)
    with running(tmp_path, text, prefills=2, decodes=2) as processes:
        prefills = [process for process in processes if process.role == "prefill"]
        decodes = [process for process in processes if process.role == "decode"]
        for prompt in PROMPTS:
            whole = complete(decodes[0], prompt, **LOCAL)
            assert [complete(decode, prompt) for decode in decodes] == [whole, whole]
        handed = [metric(process, "oasiskv_prefill_handovers_total") for process in prefills]
        assert sum(handed) == 2 * len(PROMPTS)
        # The second time a prompt comes, all of it but its end is in staging.
        loaded = sum(metric(process, "oasiskv_prefill_loaded_tokens_total") for process in prefills)
        assert loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)


@pytest.mark.parametrize(("side", "num_layers"), [("decode.engine", 3), ("engine", 4)])
def test_a_drafter_on_the_decode_side_alone_or_on_both_looks_ahead(tmp_path: Path, side: str, num_layers: int) -> None:
    model = write_model(tmp_path / "model")
    draft = json.dumps(str(write_tiny_eagle3(tmp_path / "eagle3", model)))
    rest = f"[{side}.arguments.speculative_config]\nmethod = 'eagle3'\nmodel = {draft}\nnum_speculative_tokens = 1\n"
    with running(tmp_path, file_text(model, num_layers=num_layers, rest=rest)) as processes:
        (process,) = [process for process in processes if process.role == "decode"]
        texts = [complete(process, prompt) for prompt in PROMPTS]
        assert [complete(process, prompt) for prompt in PROMPTS] == texts
        whole = [complete(process, prompt, **LOCAL) for prompt in PROMPTS]
        if side == "engine":  # the same drafter saw the same tokens
            assert texts == whole
        else:
            assert [text.split("w")[1] for text in texts] == [text.split("w")[1] for text in whole]
        assert metric(process, "oasiskv_decode_handovers_total") == 2 * len(PROMPTS)
        assert metric(process, "oasiskv_lookahead_draft_total") > 0
