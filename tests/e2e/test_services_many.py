"""Two prefill and two decode services as processes: other ranks to decode, and a drafter on that side alone.

They share two staging services with the directory between them. No test's prompts begin like another's.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from oasiskv.cli.services_file import Process
from oasiskv.cli.testing import (
    LOCAL,
    NUM_TOKENS,
    address,
    complete,
    eagle3,
    file_text,
    metric,
    prompts,
    running,
    write_model,
)
from oasiskv.protos.generation.v1 import generation_pb2
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc

pytestmark = pytest.mark.timeout(1200)

BLOCK_BYTES = 3 * 3 * 16 * 2 * 32 * 4
"""3 layers, 3 KV heads, 16 tokens, K and V of 32 in float32."""


@dataclass(frozen=True, kw_only=True)
class Services:
    prefills: list[Process]
    """Each has one rank, and room in its engine for 112 blocks."""
    wide: Process
    """Decodes with three ranks, without a drafter."""
    drafting: Process
    """Decodes with one rank, and a drafter that the prefill services do not have."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("many")
    model = write_model(folder / "model")
    drafting = {"tp_size": 1, "arguments": {"speculative_config": eagle3(model)}}
    changes = {"decode-1": {"decode": {"engine": drafting}}}
    text = file_text(model, tp_size=3, rest="[prefill.engine.arguments]\nkv_cache_memory_bytes = 4194304\n")
    with running(folder, text, changes, stagings=2, prefills=2, decodes=2) as processes:
        end = time.monotonic() + 60
        for process in processes.values():  # one that is ready has shown the path from one prefill service at least
            while process.role == "decode" and metric(process, "oasiskv_decode_prefills", 'state="verified"') < 2:
                assert time.monotonic() < end
                time.sleep(0.1)
        yield Services(
            prefills=[processes["prefill-0"], processes["prefill-1"]],
            wide=processes["decode-0"],
            drafting=processes["decode-1"],
        )


def handed_over(process: Process) -> float:
    """Return how many prompts a decode service had computed elsewhere."""
    return metric(process, "oasiskv_decode_handovers_total", 'outcome="handed_over"')


def loaded_tokens(services: Services) -> float:
    """Return how many tokens of prompts the prefill services found in staging."""
    return sum(metric(process, "oasiskv_prefill_loaded_tokens_total") for process in services.prefills)


def test_prompts_go_where_their_blocks_are_and_give_the_tokens_of_one_engine(services: Services) -> None:
    def counts() -> list[float]:
        handed = [metric(process, "oasiskv_prefill_handovers_total") for process in services.prefills]
        choices = [metric(services.wide, "oasiskv_decode_prefill_choices_total", reason) for reason in ("", "only")]
        return [sum(handed), handed_over(services.wide), loaded_tokens(services), *choices]

    asked, before = prompts(), counts()
    for prompt in asked:
        whole = complete(services.wide, prompt, **LOCAL)
        assert [complete(services.wide, prompt) for _ in range(2)] == [whole, whole]
    prefilled, handed, loaded, choices, only = (new - old for new, old in zip(counts(), before, strict=True))
    assert prefilled == handed == choices == 2 * len(asked)
    # The second time a prompt comes, all of it but its end is in one of the two, which is found.
    assert loaded == sum((len(prompt) - 1) // 16 * 16 for prompt in asked)
    assert only == 0


def test_blocks_that_one_decode_service_had_computed_are_found_for_another(services: Services) -> None:
    (prompt,), before = prompts(300, seed=1), loaded_tokens(services)
    sparse = complete(services.wide, prompt)
    assert loaded_tokens(services) == before
    assert complete(services.drafting, prompt).split("w")[1] == sparse.split("w")[1]
    assert loaded_tokens(services) == before + 288


def test_a_drafter_on_the_decode_side_alone_looks_ahead_and_decides_nothing(services: Services) -> None:
    process, asked = services.drafting, prompts(seed=2)
    before = handed_over(process)
    texts = [complete(process, prompt) for prompt in asked]
    assert [complete(process, prompt) for prompt in asked] == texts
    # It begins with an empty context, so it may see ahead to other blocks than one that saw the prompt.
    whole = [complete(process, prompt, **LOCAL) for prompt in asked]
    assert [text.split("w")[1] for text in texts] == [text.split("w")[1] for text in whole]
    assert handed_over(process) == before + 2 * len(asked)
    assert metric(process, "oasiskv_lookahead_draft_total") > 0


def test_a_prefill_service_waits_for_nobody_to_take_what_it_staged(services: Services) -> None:
    process, asked = services.prefills[0], prompts(*[347] * 8, seed=4)
    sampling = generation_pb2.Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    with grpc.insecure_channel(address(process)) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        answers = []
        for number, ids in enumerate(asked):
            prompt = generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=ids))
            request = prefill_pb2.PrefillRequest(request_id=f"untaken {number}", prompt=prompt, sampling=sampling)
            answers.append(stub.Prefill(request, timeout=120))
    # Together they are more than the engine has room for.
    needed = sum(len(ids) // 16 for ids in asked) * BLOCK_BYTES
    assert needed > metric(process, "oasiskv_prefill_kv_capacity_bytes", 'place="engine"') > 0
    assert len({answer.handover.handle for answer in answers}) == len(asked)
    assert [answer.usage.prompt_tokens for answer in answers] == [len(ids) for ids in asked]
    assert metric(process, "oasiskv_prefill_inflight") == 0
