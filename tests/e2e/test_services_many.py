"""Several staging and prefill services as processes, with the directory between them, and other ranks to decode."""

from pathlib import Path

import pytest

from oasiskv.cli.testing import LOCAL, PROMPTS, complete, file_text, metric, running, write_model

pytestmark = pytest.mark.timeout(600)


def test_prompts_go_where_their_blocks_are_and_give_the_tokens_of_one_engine(tmp_path: Path) -> None:
    text = file_text(write_model(tmp_path / "model"), tp_size=3)
    with running(tmp_path, text, stagings=2, prefills=2) as processes:
        prefills = [process for process in processes if process.role == "prefill"]
        (decode,) = [process for process in processes if process.role == "decode"]
        for prompt in PROMPTS:
            whole = complete(decode, prompt, **LOCAL)
            assert [complete(decode, prompt) for _ in range(2)] == [whole, whole]
        handed = [metric(process, "oasiskv_prefill_handovers_total") for process in prefills]
        assert sum(handed) == 2 * len(PROMPTS)
        # The second time a prompt comes, all of it but its end is in one of the two, which is found.
        loaded = sum(metric(process, "oasiskv_prefill_loaded_tokens_total") for process in prefills)
        assert loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
        assert metric(decode, "oasiskv_decode_prefill_choices_total") == 2 * len(PROMPTS)
        assert metric(decode, "oasiskv_decode_prefill_choices_total", "only") == 0
        # The other one takes part too, for whose staging there is nothing yet.
        other = prefills[handed.index(min(handed))]
        assert metric(other, "oasiskv_prefill_ready") == 1
