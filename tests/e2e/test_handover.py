"""Requests prefilled by one vLLM engine and decoded by another get the tokens that one engine gives: invariant 8."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_eagle3, write_tiny_model

pytestmark = pytest.mark.timeout(300)

# Transfers are held back as long as they may be, and every resident unit is compared before each attention.
SPARSE: dict[str, Any] = {"budget_blocks": 6, "debug_verify": True, "debug_poison": True, "debug_hold_layers": 1}
# What a GPU does: the background asks for missed blocks, and threads beside the steps bring what requests begin with.
ASKING = SPARSE | {"handover": True}
ON_TIME = SPARSE | {"debug_hold_layers": None}
REQUESTS = [
    *random_requests([201, 347, 256, 400], 40),
    *random_requests([290], 40, prompt_seed=1, temperature=0.8, seed=7),
]
NUM_GREEDY = 4


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = write_tiny_model(tmp_path_factory.mktemp("handover") / "llama", num_layers=3)
    return {"model": str(target), "skip_tokenizer_init": True, "max_model_len": 1024, "block_size": 16}


def with_params(request: dict[str, Any], lease: dict[str, Any], **more: Any) -> dict[str, Any]:
    params = request["params"] | more | {"extra_args": {"kv_transfer_params": lease}}
    return request | {"params": params}


def prefill(
    process: EngineProcess,
    engine: dict[str, Any],
    folder: Path,
    requests: list[dict[str, Any]],
    settings: dict[str, Any] = SPARSE,
) -> Reply:
    """Prefill all requests at once into leases 0, 1, ...; each computes its prompt and one decode step."""
    folder.mkdir(exist_ok=True)
    staged = [with_params(it, {"oasiskv_stage": str(i)}, max_tokens=2) for i, it in enumerate(requests)]
    leases = [str(index) for index in range(len(requests))]
    return process.run(engine, staged, settings=settings, staged=str(folder), take=leases)


def decode(
    process: EngineProcess,
    engine: dict[str, Any],
    folder: Path,
    requests: list[dict[str, Any]],
    first: Reply,
    *,
    settings: dict[str, Any] = SPARSE,
    **job: Any,
) -> Reply:
    """Go on with all requests after their first token, two of them later than the others.

    An engine process runs no job twice; `has_changed=True` makes it another one when only the folder changed.
    """
    staged = []
    for index, request in enumerate(requests):
        at = {"at": 5 * (index % 2)}
        going_on = at | request | {"prompt": request["prompt"] + first.tokens[index][:1]}
        num_tokens = request["params"]["max_tokens"] - 1
        staged.append(with_params(going_on, {"oasiskv_lease": str(index)}, max_tokens=num_tokens))
    return process.run(engine, staged, settings=settings, staged=str(folder), **job)


def joined(first: Reply, rest: Reply) -> list[list[int]]:
    return [one[:1] + more for one, more in zip(first.tokens, rest.tokens, strict=True)]


def test_tokens_after_a_handover_are_those_of_one_engine(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    single = backend.run(engine, REQUESTS, settings=SPARSE)
    first = prefill(backend, engine, tmp_path, REQUESTS)
    assert first.handovers == [[["staged", ""]]] * len(REQUESTS)
    # Complete blocks go while the prompt is computed; an active block, a summary page and a map follow.
    num_complete = [len(request["prompt"]) // 16 for request in REQUESTS]
    layers_bytes = 3 * 2 * 16 * 2 * 32 * 4
    assert first.counts["streamed_bytes"] == sum(num_complete) * layers_bytes
    assert first.counts["staged_bytes"] > first.counts["streamed_bytes"]
    assert first.pool_after == first.pool_before
    rest = decode(backend, engine, tmp_path, REQUESTS, first)
    assert joined(first, rest)[:NUM_GREEDY] == single.tokens[:NUM_GREEDY]
    assert first.tokens[NUM_GREEDY][0] == single.tokens[NUM_GREEDY][0]
    assert rest.counts["handovers"] == len(REQUESTS)
    assert rest.counts["switches"] == 0
    assert 0 < rest.counts["admitted_bytes"] < rest.counts["handover_bytes"]
    assert rest.counts["missed_bytes"] > 0
    assert rest.pool_after == rest.pool_before
    on_time = decode(backend, engine, tmp_path, REQUESTS, first, settings=ON_TIME)
    assert on_time.tokens == rest.tokens
    assert on_time.counts["missed_bytes"] == rest.counts["missed_bytes"]


def test_a_request_whose_kv_is_lost_ends_with_an_error_and_leaves_others_alone(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    first = prefill(backend, engine, tmp_path, REQUESTS[:3])
    whole = decode(backend, engine, tmp_path, REQUESTS[:3], first)
    (tmp_path / "1.lost").touch()
    broken = decode(backend, engine, tmp_path, REQUESTS[:3], first, has_changed=True)
    assert [output["completions"][0]["finish_reason"] for output in broken.outputs] == ["length", "error", "length"]
    assert [broken.tokens[index] for index in (0, 2)] == [whole.tokens[index] for index in (0, 2)]
    assert broken.tokens[1] == []
    assert broken.pool_after == broken.pool_before


def test_a_miss_that_does_not_come_ends_its_request_after_right_tokens(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    first = prefill(backend, engine, tmp_path, REQUESTS[:3])
    whole = decode(backend, engine, tmp_path, REQUESTS[:3], first)
    # What is fetched when the request begins has been written by then; what it misses later is not there.
    (tmp_path / "1.lost-after-8").touch()
    broken = decode(backend, engine, tmp_path, REQUESTS[:3], first, has_changed=True)
    assert [output["completions"][0]["finish_reason"] for output in broken.outputs] == ["length", "error", "length"]
    assert [broken.tokens[index] for index in (0, 2)] == [whole.tokens[index] for index in (0, 2)]
    tokens = broken.tokens[1]
    assert 0 < len(tokens) < len(whole.tokens[1])
    assert tokens == whole.tokens[1][: len(tokens)]
    assert broken.pool_after == broken.pool_before


def test_a_request_comes_beside_the_steps_of_others_and_may_end_before_it_is_there(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    first = prefill(backend, engine, tmp_path, REQUESTS[:4])
    whole = decode(backend, engine, tmp_path, REQUESTS[:4], first)
    for index in (1, 2, 3):
        (tmp_path / f"{index}.slow").touch()
    (tmp_path / "3.lost-after-8").touch()
    requests = [request | {"at": at} for request, at in zip(REQUESTS, (0, 2, 4, 5), strict=False)]
    requests[2]["abort_at"] = 7
    slow = decode(backend, engine, tmp_path, requests, first, sample=True)
    reasons = [output["completions"] and output["completions"][0]["finish_reason"] for output in slow.outputs]
    assert reasons[:2] == ["length", "length"]
    assert reasons[3] == "error"
    assert slow.tokens[:2] == whole.tokens[:2]
    running = [step["requests"].keys() for step in slow.steps]
    begun = next(step for step, names in enumerate(running) if "1" in names)
    # A read ends with each step: the map, what is read whole, the first set of each of three layers.
    assert begun >= 2 + 5
    assert all("0" in names for names in running[2:begun])
    assert slow.pool_after == slow.pool_before


@pytest.mark.parametrize("mode", ["full", "partial", "capped"])
def test_a_request_holds_host_blocks_for_what_its_mode_brings(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path, mode: str
) -> None:
    long = engine | {"max_model_len": 2048}
    settings = ON_TIME | {"handover_mode": mode}
    # A random model selects other blocks with every token: after many, most of them were fetched.
    requests = [request | {"at": 0} for request in random_requests([1900, 1960], 4)]
    first = prefill(backend, long, tmp_path, requests)
    single = backend.run(long, requests, settings=settings)
    rest = decode(backend, long, tmp_path, requests, first, settings=settings, sample=True)
    assert joined(first, rest) == single.tokens
    full = sum(-(-len(request["prompt"]) // 16) for request in requests)
    held = max(step["host_held"] for step in rest.steps)
    print(f"{mode}: {held} host blocks of {full}")
    if mode == "full":
        assert full <= held <= full + 2 * 3
        assert rest.counts["missed_bytes"] == 0
    else:
        assert held < 0.6 * full
    assert rest.pool_after == rest.pool_before


def test_a_dense_engine_goes_on_from_all_blocks_and_never_becomes_sparse(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    settings, requests = SPARSE | {"handover_mode": "dense"}, REQUESTS[:NUM_GREEDY]
    single = backend.run(engine, requests, settings=settings)
    assert single.counts["switches"] == 0
    first = prefill(backend, engine, tmp_path, requests)
    rest = decode(backend, engine, tmp_path, requests, first, settings=settings, sample=True)
    assert joined(first, rest) == single.tokens
    num_blocks = sum(len(request["prompt"]) // 16 for request in requests)
    assert rest.counts["loaded_bytes"] == num_blocks * 3 * 2 * 16 * 2 * 32 * 4
    assert rest.counts["switches"] == rest.counts["admitted_bytes"] == rest.counts["missed_bytes"] == 0
    assert max(step["host_held"] for step in rest.steps) == 0
    assert rest.pool_after == rest.pool_before


@pytest.mark.parametrize("num_host_blocks", [70, 80, 100])
def test_host_memory_that_is_short_costs_bytes_but_no_token(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path, num_host_blocks: int
) -> None:
    # More memory than one request can ever need, and less than these would hold.
    host_block_bytes = 3 * 2 * 16 * 2 * 32 * 4
    first = prefill(backend, engine, tmp_path, REQUESTS[:NUM_GREEDY])
    whole = decode(backend, engine, tmp_path, REQUESTS[:NUM_GREEDY], first)
    settings = SPARSE | {"host_pool_bytes": num_host_blocks * host_block_bytes}
    short = decode(backend, engine, tmp_path, REQUESTS[:NUM_GREEDY], first, settings=settings)
    assert short.tokens == whole.tokens
    assert short.pool_after == short.pool_before


def test_requests_that_were_preempted_after_a_handover_are_computed_again(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    first = prefill(backend, engine, tmp_path, REQUESTS[:3])
    whole = decode(backend, engine, tmp_path, REQUESTS[:3], first)
    resumed = decode(backend, engine, tmp_path, REQUESTS[:3], first, preempt_at=[9])
    assert [output["was_preempted"] for output in resumed.outputs] == [True, True, True]
    assert resumed.counts["switches"] == 3
    for got, expected in zip(resumed.tokens, whole.tokens, strict=True):
        assert len(got) == len(expected)
        assert got[:3] == expected[:3]
    assert resumed.pool_after == resumed.pool_before


def test_a_prompt_whose_first_blocks_are_staged_is_computed_from_there_and_shares_them(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    # Chunks end where the blocks that are loaded do, so that sums of float32 have one order.
    chunks = engine | {"max_num_batched_tokens": 160}
    prefill(backend, chunks, tmp_path, REQUESTS[1:2])
    later = random_requests([310], 40, prompt_seed=2)[0]
    later["prompt"][:160] = REQUESTS[1]["prompt"][:160]
    single = backend.run(chunks, [later], settings=SPARSE)
    staged = [with_params(later, {"oasiskv_stage": "later", "oasiskv_prefix": ["0", 10]}, max_tokens=2)]
    loaded = backend.run(chunks, staged, settings=SPARSE, staged=str(tmp_path), take=["later"])
    assert loaded.handovers == [[["staged", ""]]]
    assert loaded.counts["loaded_bytes"] == 10 * 3 * 2 * 16 * 64 * 4
    assert loaded.tokens[0] == single.tokens[0][:2]
    assert loaded.pool_after == loaded.pool_before
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("later-*.pt")} >= set(range(10, 19))
    for index, layer in itertools.product(range(10), range(3)):
        # The lease begins with the loaded blocks.
        (tmp_path / f"0-{index}-{layer}.pt").rename(tmp_path / f"later-{index}-{layer}.pt")
    going_on = later | {"prompt": later["prompt"] + single.tokens[0][:1]}
    decoding = [with_params(going_on, {"oasiskv_lease": "later"}, max_tokens=39)]
    rest = backend.run(chunks, decoding, settings=SPARSE, staged=str(tmp_path))
    assert single.tokens[0][:1] + rest.tokens[0] == single.tokens[0]
    lost = backend.run(chunks, staged, settings=SPARSE, staged=str(tmp_path), sample=True)
    assert lost.outputs[0]["completions"][0]["finish_reason"] == "error"
    assert lost.pool_after == lost.pool_before


@pytest.mark.parametrize("step", [2, 7])
def test_a_prefill_that_was_preempted_hands_all_or_nothing_over(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path, step: int
) -> None:
    chunks = engine | {"max_num_batched_tokens": 128}
    staged = [with_params(it, {"oasiskv_stage": str(i)}, max_tokens=2) for i, it in enumerate(REQUESTS[:3])]
    leases = [str(index) for index in range(3)]
    first = backend.run(
        chunks, staged, settings=SPARSE, staged=str(tmp_path), take=leases, preempt_at=[step], sample=True
    )
    assert any(output["was_preempted"] for output in first.outputs)
    assert {state for ((state, _),) in first.handovers} <= {"staged", "PoolExhaustedError"}
    assert first.pool_after == first.pool_before
    single = backend.run(chunks, REQUESTS[:3], settings=SPARSE)
    rest = decode(backend, chunks, tmp_path, REQUESTS[:3], first)
    for index, ((state, _),) in enumerate(first.handovers):
        print(f"request {index}: {state}")
        if state == "staged":
            # A prompt that was computed again has other chunks: sums of float32 in another order.
            assert joined(first, rest)[index][:8] == single.tokens[index][:8]
        else:
            assert rest.outputs[index]["completions"][0]["finish_reason"] == "error"


def test_a_lease_too_short_for_a_working_set_is_left_alone(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    dense = {"budget_blocks": 64}
    requests = [with_params(request, {"oasiskv_lease": "nothing"}) for request in REQUESTS[:3]]
    ours = backend.run(engine, requests, settings=dense, staged=str(tmp_path))
    assert ours.tokens == backend.run(engine, REQUESTS[:3], settings=dense).tokens
    assert ours.counts["handovers"] == 0


def test_parameters_that_nobody_can_use_change_nothing(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    plain = backend.run(engine, REQUESTS[:2], settings=SPARSE, staged=str(tmp_path))
    wrongs: tuple[dict[str, Any], ...]
    wrongs = (
        {"oasiskv_lease": 7},
        {"oasiskv_stage": "a", "oasiskv_lease": "b"},
        {"oasiskv_stage": "a", "oasiskv_prefix": ["b", 99]},
    )
    for wrong in wrongs:
        requests = [with_params(request, wrong) for request in REQUESTS[:2]]
        assert backend.run(engine, requests, settings=SPARSE).tokens == plain.tokens


def test_the_drafter_s_layers_are_handed_over_like_the_others(
    engine: dict[str, Any], backend: EngineProcess, tmp_path: Path
) -> None:
    draft = write_tiny_eagle3(tmp_path / "eagle3", Path(engine["model"]))
    drafted = engine | {
        "speculative_config": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 1},
    }
    folder = tmp_path / "staged"
    first = prefill(backend, drafted, folder, REQUESTS)
    assert first.handovers == [[["staged", ""]]] * len(REQUESTS)
    rest = decode(backend, drafted, folder, REQUESTS, first)
    assert rest.counts["source_draft"] > 0.8 * rest.counts["sparse_rows"]
    on_time = decode(backend, drafted, folder, REQUESTS, first, settings=ON_TIME)
    assert on_time.tokens == rest.tokens
    assert {index for index, _ in enumerate(REQUESTS)} == {int(path.name.split("-")[0]) for path in folder.glob("*.pt")}
    assert {path.name.split("-")[2] for path in folder.glob("*.pt")} == {"0.pt", "1.pt", "2.pt", "3.pt"}
    assert rest.pool_after == rest.pool_before


@pytest.mark.parametrize("settings", [SPARSE, ASKING], ids=["called", "asked"])
def test_tokens_after_a_handover_are_those_of_one_engine_on_model_runner_v2(
    engine: dict[str, Any], backend_v2: EngineProcess, tmp_path: Path, settings: dict[str, Any]
) -> None:
    requests = random_requests([201, 347], 20)
    single = backend_v2.run(engine, requests, settings=settings)
    first = prefill(backend_v2, engine, tmp_path, requests, settings)
    assert first.handovers == [[["staged", ""]]] * len(requests)
    rest = decode(backend_v2, engine, tmp_path, requests, first, settings=settings)
    assert joined(first, rest) == single.tokens
    assert rest.counts["missed_bytes"] > 0
    assert rest.pool_after == rest.pool_before
    (tmp_path / "1.lost").touch()
    broken = decode(backend_v2, engine, tmp_path, requests, first, settings=settings, has_changed=True)
    assert [output["completions"][0]["finish_reason"] for output in broken.outputs] == ["length", "error"]
    assert broken.tokens[0] == rest.tokens[0]
    assert broken.pool_after == broken.pool_before
    (tmp_path / "1.lost").rename(tmp_path / "0.lost-after-8")
    broken = decode(backend_v2, engine, tmp_path, requests, first, settings=settings, has_changed="again")
    assert [output["completions"][0]["finish_reason"] for output in broken.outputs] == ["error", "length"]
    assert 0 < len(broken.tokens[0]) < len(rest.tokens[0])
    assert broken.tokens[0] == rest.tokens[0][: len(broken.tokens[0])]
    assert broken.tokens[1] == rest.tokens[1]
    assert broken.pool_after == broken.pool_before
