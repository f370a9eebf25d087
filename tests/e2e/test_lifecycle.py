"""Requests that come, wait, are preempted, grow, share and go: what they give back, and which tokens they get."""

import json
from pathlib import Path
from typing import Any

import pytest

from oasiskv.engine.testing import (
    EngineProcess,
    Reply,
    random_requests,
    random_traffic,
    write_tiny_eagle3,
    write_tiny_model,
)

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
SPARSE = {"budget_blocks": 6, "debug_verify": True, "debug_poison": True}
DENSE = {"budget_blocks": 64}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lifecycle") / "model"
    model = write_tiny_model(folder)
    drafter = write_tiny_eagle3(folder.with_name("eagle3"), model)
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1},
    }


@pytest.fixture(params=["v1", "v2"])
def process(request: pytest.FixtureRequest) -> EngineProcess:
    process: EngineProcess = request.getfixturevalue("backend" if request.param == "v1" else "backend_v2")
    return process


def assert_all_given_back(reply: Reply) -> None:
    assert reply.pool_after == reply.pool_before
    assert reply.pool_after["ledger_requests"] == 0
    assert reply.counts["predicted"] == reply.counts["hit"] + reply.counts["fetched"] + reply.counts["deferred"]


def test_dense_requests_go_on_with_the_same_tokens_after_preemption(
    process: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([37, 201, 300], 40)
    through = process.run(engine, requests, settings=DENSE)
    preempted = process.run(engine, requests, settings=DENSE, preempt_at=[5, 17, 18])
    assert all(output["was_preempted"] for output in preempted.outputs)
    assert preempted.tokens == through.tokens
    assert_all_given_back(preempted)


def test_sparse_requests_become_sparse_again_after_preemption(process: EngineProcess, engine: dict[str, Any]) -> None:
    requests = random_requests([201, 300], 40)
    through = process.run(engine, requests, settings=SPARSE)
    preempted = process.run(engine, requests, settings=SPARSE, preempt_at=[15, 16, 30], sample=True)
    assert [len(tokens) for tokens in preempted.tokens] == [40, 40]
    assert preempted.counts["switches"] > through.counts["switches"] == 2
    # The forced preemption comes before the step, so fourteen steps had given their tokens at least.
    for mine, theirs in zip(preempted.tokens, through.tokens, strict=True):
        assert mine[:14] == theirs[:14]
    assert all(request["is_sparse"] for request in preempted.steps[-2]["requests"].values())
    assert_all_given_back(preempted)


def test_a_pool_too_small_for_all_preempts_and_serves_all(backend: EngineProcess, engine: dict[str, Any]) -> None:
    # Dense up to 9 blocks of a request's context, so five of them outgrow 36 blocks in mid-decode.
    requests = random_requests([40, 60, 80, 100, 120], 90)
    pool = {"num_gpu_blocks_override": 37, "max_model_len": 256}
    reply = backend.run(engine | pool, requests, settings=SPARSE, sample=True)
    assert any(output["was_preempted"] for output in reply.outputs)
    assert [len(tokens) for tokens in reply.tokens] == [90] * 5
    assert reply.counts["switches"] >= 5
    assert_all_given_back(reply)


def test_requests_wait_for_host_memory(backend: EngineProcess, engine: dict[str, Any]) -> None:
    host_block_bytes = 3 * 2 * BLOCK * 2 * 32 * 4  # two layers and the drafter's, two KV heads, K and V
    settings = SPARSE | {"host_pool_bytes": 66 * host_block_bytes}
    requests = random_requests([400] * 6, 30)
    reply = backend.run(engine, requests, settings=settings, sample=True)
    # 27 blocks each: two fit into 66, three do not.
    assert max(len(step["requests"]) for step in reply.steps) == 2
    assert [len(tokens) for tokens in reply.tokens] == [30] * 6
    assert_all_given_back(reply)


def test_an_aborted_request_gives_back_everything_in_each_of_its_phases(
    process: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([300] * 5, 40)
    # In prefill by chunks of 128, at its end, at the switch, right after it, while sparse.
    for request, step in zip(requests, (1, 6, 12, 15, 30), strict=True):
        request["abort_at"] = step
    requests += random_requests([77], 60, prompt_seed=1)
    chunked = engine | {"max_num_batched_tokens": 128}
    reply = process.run(chunked, requests, settings=SPARSE)
    lengths = [len(output["completions"][0]["tokens"]) if output["completions"] else 0 for output in reply.outputs]
    assert lengths[5] == 60
    assert all(length < 40 for length in lengths[:5])
    assert lengths[4] > 0
    assert_all_given_back(reply)


def test_prefill_in_chunks_beside_decoding_requests_changes_no_tokens(
    backend: EngineProcess, engine: dict[str, Any]
) -> None:
    # No drafter: the drafts of EAGLE-3 depend on the chunks, in stock vLLM too, and with them what is fetched.
    undrafted = {key: value for key, value in engine.items() if key != "speculative_config"}
    requests = random_requests([37, 333, 90, 210], 40)
    at_once = backend.run(undrafted, requests, settings=SPARSE)
    arriving = [request | {"at": 3 * index} for index, request in enumerate(requests)]
    chunked = backend.run(undrafted | {"max_num_batched_tokens": 64}, arriving, settings=SPARSE)
    assert chunked.tokens == at_once.tokens
    assert_all_given_back(chunked)


def test_a_seeded_request_draws_the_same_tokens_however_its_prompt_is_cut(
    process: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([37, 333, 90, 210], 20, temperature=0.9, seed=5)
    at_once = process.run(engine, requests, settings=DENSE)
    chunked = process.run(engine | {"max_num_batched_tokens": 64}, requests, settings=DENSE)
    assert chunked.tokens == at_once.tokens
    assert_all_given_back(chunked)


def test_a_sparse_request_gets_the_same_tokens_alone_and_among_others(
    process: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([37, 333, 90, 210], 40)
    together = process.run(engine, requests, settings=SPARSE)
    for index, request in enumerate(requests):
        assert process.run(engine, [request], settings=SPARSE).tokens[0] == together.tokens[index]


def test_steps_beyond_the_positions_of_the_drafter_look_ahead_with_each_token_s_own_query(
    backend: EngineProcess, engine: dict[str, Any], tmp_path: Path
) -> None:
    model = Path(engine["model"])
    drafter = write_tiny_eagle3(tmp_path / "short", model)
    config = json.loads((drafter / "config.json").read_text()) | {"max_position_embeddings": 320}
    (drafter / "config.json").write_text(json.dumps(config))
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1}
    # The first one outgrows the drafter after twenty tokens, and vLLM leaves it out for both until the first one ends.
    requests = random_requests([300], 60) + random_requests([201], 100, prompt_seed=1)
    reply = backend.run(engine | {"speculative_config": speculative}, requests, settings=SPARSE)
    assert [len(tokens) for tokens in reply.tokens] == [60, 100]
    assert 70 <= reply.counts["source_self"] <= 84
    assert reply.counts["source_draft"] > 60
    assert_all_given_back(reply)


def test_several_completions_of_one_sparse_prompt(process: EngineProcess, engine: dict[str, Any]) -> None:
    requests = random_requests([201, 45], 30, n=3, temperature=1.0, seed=3)
    reply = process.run(engine, requests, settings=SPARSE)
    assert [len(output["completions"]) for output in reply.outputs] == [3, 3]
    assert len({tuple(tokens) for tokens in reply.tokens}) == 6
    assert reply.counts["switches"] == 3
    assert_all_given_back(reply)


def test_random_traffic_with_aborts_and_preemptions_is_all_accounted_for(
    process: EngineProcess, engine: dict[str, Any]
) -> None:
    requests, preempt_at = random_traffic(40, seed=4)
    pool = {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 256}
    reply = process.run(engine | pool, requests, settings=SPARSE | {"debug_hold_layers": 4}, preempt_at=preempt_at)
    for request, output in zip(requests, reply.outputs, strict=True):
        lengths = [len(completion["tokens"]) for completion in output["completions"]]
        assert "abort_at" in request or lengths == [request["params"]["max_tokens"]]
    assert sum(output["was_preempted"] for output in reply.outputs) > 4
    assert reply.counts["switches"] > 10
    assert_all_given_back(reply)
