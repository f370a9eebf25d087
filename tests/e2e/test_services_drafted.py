"""Services as processes with a drafter on both sides: prefill, decode, and decode with all KV in the engine.

`oasiskv bench` measures the first two here; that its commands start services of their own is tested in `tests/soak`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli import disagg_services, threshold
from oasiskv.cli.main import main
from oasiskv.cli.services_file import Process
from oasiskv.cli.testing import (
    LOCAL,
    NUM_TOKENS,
    VOCAB_SIZE,
    complete,
    eagle3,
    file_text,
    metric,
    prompts,
    running,
    write_model,
)
from oasiskv.engine.testing import EngineProcess, random_requests

pytestmark = pytest.mark.timeout(600)

NUM_LAYERS = 4
"""Three of the model, one of the drafter."""
PART_BYTES = 3 * 16 * 2 * 32 * 4
"""One layer of a block: 3 KV heads, 16 tokens, K and V of 32 in float32."""
PART_MIB = PART_BYTES / 2**20
MARGIN = 1e-3
"""Two logits closer than this may change places where sums of float32 run in another order."""


@dataclass(frozen=True, kw_only=True)
class Services:
    model: Path
    prefill: Process
    decode: Process
    dense: Process
    """Brings all KV into its engine."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("drafted")
    model = write_model(folder / "model")
    both: dict[str, Any] = {"engine": {"arguments": {"speculative_config": eagle3(model)}}}
    dense = {"decode": {"engine": {**both["engine"], "lookahead": {"handover_mode": "dense"}}}}
    changes: dict[str, dict[str, Any]] = {"prefill": {"prefill": both}, "decode-0": {"decode": both}, "decode-1": dense}
    with running(folder, file_text(model, num_layers=NUM_LAYERS), changes, decodes=2) as processes:
        yield Services(
            model=model, prefill=processes["prefill"], decode=processes["decode-0"], dense=processes["decode-1"]
        )


Serving = Callable[[Any, int], "contextlib.AbstractContextManager[Process]"]


@pytest.fixture
def serving(services: Services) -> Serving:
    """Return what stands in the place of `disagg_services.serving`."""

    @contextlib.contextmanager
    def running_already(launch: Any, concurrency: int) -> Iterator[Process]:
        assert Path(launch.model.path) == services.model
        assert concurrency >= 1
        yield services.decode

    return running_already


def handed_over(process: Process) -> float:
    """Return how many prompts a decode service had computed elsewhere."""
    return metric(process, "oasiskv_decode_handovers_total", 'outcome="handed_over"')


def test_a_drafter_whose_kv_crosses_gives_the_tokens_of_one_engine(services: Services) -> None:
    decode, asked = services.decode, prompts()
    handed, drafted = handed_over(decode), metric(decode, "oasiskv_lookahead_draft_total")
    loaded = metric(services.prefill, "oasiskv_prefill_loaded_tokens_total")
    for prompt in asked:
        whole = complete(decode, prompt, **LOCAL)
        assert [complete(decode, prompt) for _ in range(2)] == [whole, whole]
    assert handed_over(decode) - handed == 2 * len(asked)
    # Each answer's first token is the prompt's and its second the first sparse step's, which looks ahead by itself.
    num_drafted = metric(decode, "oasiskv_lookahead_draft_total") - drafted
    assert num_drafted == 3 * len(asked) * (NUM_TOKENS - 2)
    # The second time, the drafter's KV came from staging to the prefill service too.
    num_loaded = metric(services.prefill, "oasiskv_prefill_loaded_tokens_total") - loaded
    assert num_loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in asked)


def test_a_prompt_that_parts_from_another_at_a_blocks_end_shares_what_is_the_same_in_all_layers(
    services: Services,
) -> None:
    decode = services.decode
    first, other = prompts(250, 250, seed=5)
    parting = [*first[:176], *other[176:]]
    complete(decode, first)
    loaded = metric(services.prefill, "oasiskv_prefill_loaded_tokens_total")
    assert complete(decode, parting) == complete(decode, parting, **LOCAL)
    # The drafter's last row of the block before depends on the token behind it.
    assert metric(services.prefill, "oasiskv_prefill_loaded_tokens_total") - loaded == 160


def test_kv_that_crossed_whole_gives_the_tokens_of_stock_vllm(services: Services, stock: EngineProcess) -> None:
    # Oracle A: nothing is left out. The budget covers the last prompt, which so stays where it is in any mode.
    requests = random_requests([201, 347, 256, 60], NUM_TOKENS, vocab_size=VOCAB_SIZE, prompt_seed=3, logprobs=2)
    engine = {"model": str(services.model), "skip_tokenizer_init": True, "max_model_len": 1024, "block_size": 32}
    num_ties, expected = 0, stock.run(engine, requests)
    loaded = metric(services.dense, "oasiskv_loaded_bytes_total")
    for process, some in ((services.dense, slice(0, 4)), (services.decode, slice(3, 4))):
        before = handed_over(process)
        for request, output in zip(requests[some], expected.outputs[some], strict=True):
            got = [int(word) for word in complete(process, request["prompt"]).split("w")[1:]]
            (theirs,) = output["completions"]
            where = next((i for i, (a, b) in enumerate(zip(got, theirs["tokens"], strict=True)) if a != b), None)
            if where is not None:
                likeliest = sorted((value for _, value in theirs["logprobs"][where]), reverse=True)
                assert likeliest[0] - likeliest[1] < MARGIN
                num_ties += 1
        assert handed_over(process) - before == len(requests[some]) - 1
    assert num_ties <= 1
    assert metric(services.dense, "oasiskv_switches_total") == 0
    num_blocks = sum(len(request["prompt"]) // 16 for request in requests[:3])
    assert metric(services.dense, "oasiskv_loaded_bytes_total") - loaded == num_blocks * NUM_LAYERS * PART_BYTES


def test_bench_disagg_counts_what_crosses(
    services: Services, serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(disagg_services, "serving", serving)
    command = ["bench", "disagg", "--model", str(services.model), "--context", "390", "--tokens", "20"]
    command += ["--requests", "2", "--concurrency", "1", "--modes", "capped-0.1", "--no-plots"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("disagg-services-")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["mode"], row["requests"], row["handovers"]) == ("capped-0.1", 2, 2)
    # 24 complete blocks and an active one; a budget of 6, so 6 to 18 blocks of a layer at first, and 2 pages, the
    # active block and the map.
    assert row["full_mib"] == pytest.approx(25 * NUM_LAYERS * PART_MIB)
    assert (6 + 4) * NUM_LAYERS * PART_MIB <= row["admitted_mib"] <= (18 + 4) * NUM_LAYERS * PART_MIB
    assert row["total_mib"] == row["admitted_mib"] + row["missed_mib"]
    assert sum(row["network_mb_per_s"]) == pytest.approx(2 * row["total_mib"] * 2**20 / 1e6, rel=0.01)
    assert row["ttft_s"] > 0
    assert "capped-0.1" in capsys.readouterr().out


def test_bench_threshold_answers_prompts_both_ways(
    services: Services, serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(threshold, "serving", serving)
    handed = handed_over(services.decode)
    command = ["bench", "threshold", "--model", str(services.model), "--lengths", "60", "200", "390"]
    assert main([*command, "--repeats", "2", "--budget-blocks", "6", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert [row["length"] for row in report["rows"]] == [60, 200, 390]
    short, *rest = report["rows"]
    # The budget covers the short one, which so is never handed over.
    assert (short["remote_first_s"], short["remote_second_s"]) == (None, None)
    for row in report["rows"]:
        assert 0 < row["local_first_s"] <= row["local_second_s"]
    for row in rest:
        assert 0 < row["remote_first_s"] <= row["remote_second_s"]
    assert handed_over(services.decode) - handed == 2 * 3
    assert report["suggested"] in (0, 200, 390)
    assert f"local_prompt_tokens = {report['suggested']} " in capsys.readouterr().out
