"""Two prefill and two decode services as processes, the latter with other ranks, with and without a drafter."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oasiskv.cli.testing import LOCAL, complete, eagle3, file_text, metric, prompts, running, write_model

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("has_drafter", [False, True])
def test_two_of_each_with_other_ranks_give_the_same_tokens_and_share_prefixes(
    tmp_path: Path, has_drafter: bool
) -> None:
    model, asked = write_model(tmp_path / "model"), prompts()
    both = {"engine": {"arguments": {"speculative_config": eagle3(model)}}} if has_drafter else {}
    changes = {f"{role}-{index}": {role: both} for role in ("prefill", "decode") for index in range(2)}
    text = file_text(model, tp_size=3, num_layers=4 if has_drafter else 3)
    with running(tmp_path, text, changes, prefills=2, decodes=2) as processes:
        prefills = [process for process in processes.values() if process.role == "prefill"]
        decodes = [process for process in processes.values() if process.role == "decode"]
        whole = [complete(decodes[0], prompt, **LOCAL) for prompt in asked]
        for prompt, expected in zip(asked, whole, strict=True):
            assert [complete(decode, prompt) for decode in decodes] == [expected, expected]
        handed = [metric(process, "oasiskv_prefill_handovers_total") for process in prefills]
        assert sum(handed) == 2 * len(asked)
        # The second time a prompt comes, all of it but its end is in staging.
        loaded = sum(metric(process, "oasiskv_prefill_loaded_tokens_total") for process in prefills)
        assert loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in asked)
        for decode in decodes:
            assert (metric(decode, "oasiskv_lookahead_draft_total") > 0) == has_drafter
        # Many at a time, from both: each ends with all its tokens, and no prompt is computed where it is decoded.
        many = prompts(*[250] * 12, seed=1)
        with ThreadPoolExecutor(6) as pool:
            assert len(list(pool.map(complete, decodes * 6, many))) == 12
        assert sum(metric(decode, "oasiskv_decode_handovers_total", "recomputed") for decode in decodes) == 0
        assert sum(metric(decode, "oasiskv_decode_handovers_total", "handed_over") for decode in decodes) == 6 + 12
