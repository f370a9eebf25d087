"""Real engines on a GPU that hand requests over: tokens are those of one engine, resident bytes those that were staged.

Staging is a folder of files here. Blocks that were not fetched when a request began are missed later, while graphs run.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

LENGTHS = (201, 347, 1000, 2500, 520, 1777)
NUM_TOKENS = 48
LOST = 3
SETTINGS = {"budget_blocks": 8, "switch": "early", "host_pool_bytes": "512MiB", "debug_poison": True, "handover": True}
CASES: dict[str, dict[str, Any]] = {
    "eager": {"is_graph": False, "settings": {"debug_verify": True}},
    "eager, eagle3": {"is_graph": False, "settings": {"debug_verify": True}, "drafter": "eagle3"},
    "joined": {"settings": {"signal": "joined"}},
    "flags, ngram": {"settings": {"signal": "flags"}, "drafter": "ngram"},
    "flags, eagle3": {"settings": {"signal": "flags"}, "drafter": "eagle3"},
}
TWO: dict[str, Any] = {"sender": CASES["joined"] | {"drafter": "eagle3"}, "receiver": CASES["flags, eagle3"]}
LIMIT_S = 240.0
WORKER, DTYPE, BACKEND = "oasiskv.engine.vllm.cuda.Worker", "bfloat16", "FLASH_ATTN"


class Engine:
    """An engine in this process; after its steps every resident byte is compared with the host and with staging."""

    def __init__(self, models: dict[str, str], folder: str, case: dict[str, Any]) -> None:
        from vllm import LLM

        from oasiskv.engine.vllm.worker import current

        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options: dict[str, Any] = {"compilation_config": graphs}
        if not case.get("is_graph", True):
            options = {"enforce_eager": True}
        if (drafter := case.get("drafter")) is not None:
            given = {"prompt_lookup_max": 3} if drafter == "ngram" else {"model": models[drafter]}
            options["speculative_config"] = {"method": drafter, "num_speculative_tokens": 1} | given
        self._llm = LLM(
            models["target"],
            skip_tokenizer_init=True,
            block_size=16,
            dtype=DTYPE,
            disable_cascade_attn=True,
            enable_prefix_caching=False,
            max_model_len=8192,
            max_num_seqs=8,
            gpu_memory_utilization=0.06,
            kv_cache_memory_bytes=2**30,
            attention_config={"backend": BACKEND},
            worker_cls=WORKER,
            kv_transfer_config={
                "kv_connector": "OasisKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": SETTINGS | case["settings"],
            },
            **options,
        )
        self.engine = self._llm.llm_engine
        worker = current()
        assert worker is not None
        assert worker.runtime is not None
        self.runtime = worker.runtime
        self._folder = pathlib.Path(folder)
        self._staged: dict[str, Any] = {}
        self._step = 0
        self.num_compared = 0
        """Resident bytes that were compared with what was staged."""
        self.wrong: list[str] = []

    def attach(self) -> None:
        """Give the worker a way to the folder."""
        maker = "oasiskv.engine.testing:StagedFolder"
        self._llm.collective_rpc("attach_staging", args=(maker, {"folder": str(self._folder)}))

    def add(self, index: int, prompt: list[int], num_tokens: int, lease: dict[str, str] | None = None) -> None:
        """Let a request begin with the next step."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": lease} if lease else None
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> dict[int, tuple[list[int], str]]:
        """Run a step, if there is something to do, and return tokens and reason of the requests that ended."""
        if not self.engine.has_unfinished_requests():
            time.sleep(0.01)
            return {}
        ended = {}
        for output in self.engine.step():
            if output.finished:
                answer = output.outputs[0]
                ended[int(output.request_id.split("-")[0])] = (list(answer.token_ids), str(answer.finish_reason))
        self._check()
        return ended

    def answer(self, requests: list[dict[str, Any]]) -> tuple[list[list[int]], list[str]]:
        """Answer requests, each of which comes two steps after the one before."""
        begun, ended, until = 0, dict[int, tuple[list[int], str]](), time.monotonic() + LIMIT_S
        for step in range(sys.maxsize):
            while begun < len(requests) and begun * 2 <= step:
                self.add(begun, **requests[begun])
                begun += 1
            ended |= self.step()
            if len(ended) == len(requests):
                break
            assert time.monotonic() < until, f"only {sorted(ended)} ended"
        tokens, reasons = zip(*(ended[index] for index in range(len(requests))), strict=True)
        return list(tokens), list(reasons)

    def take(self, index: int) -> str:
        """Say what became of a prompt's way to staging."""
        state: str = self._llm.collective_rpc("take_handover", args=(str(index),))[0][0]
        return state

    def result(self) -> dict[str, Any]:
        """Return what was found, and what is left."""
        self.engine.step()
        scheduler = self.engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        host = scheduler.kv_cache_manager.coordinator.single_type_managers[0].ledger._host
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), host.num_blocks - host.num_free
        counts = self.runtime.counts(wait=True)
        return {"num_compared": self.num_compared, "wrong": self.wrong[:5], "used": used, "counts": counts}

    def _check(self) -> None:
        """Compare what is resident with the host in every step, and with staging in each fourth."""
        import torch

        from oasiskv.core.errors import CorruptBlockError

        if WORKER.endswith("cuda.Worker"):
            torch.cuda.synchronize()
        self._step += 1
        try:
            self.runtime.check_invariants()
        except CorruptBlockError as error:
            self.wrong.append(f"step {self._step}: {error}")
        if self._step % 4:
            return
        runtime, inbox = self.runtime, self.runtime.inbox
        for request_id, slot in runtime._slot_of.items():
            if request_id not in runtime._sparse or slot not in inbox._leases or inbox.is_failed(slot):
                continue
            for layer in range(runtime.shape.num_layers):
                self._compare(inbox._leases[slot], slot, layer)

    def _compare(self, lease: str, slot: int, layer: int) -> None:
        import torch

        sets = self.runtime.sets
        resident = sets.resident[layer, slot].cpu()
        held = self.runtime._kv_caches[layer][sets.slot_ids[slot].long()].cpu()
        num_blocks = self.runtime.inbox.fetched._rooms[slot].num_blocks
        for head, blocks in enumerate(resident.tolist()):
            for place, index in enumerate(blocks):
                if 0 <= index < num_blocks:  # later ones were computed here
                    unit = self._read(f"{lease}-{index}-{layer}.pt")[head]
                    self.num_compared += unit.nbytes
                    if not torch.equal(held[place, head].view(torch.uint8), unit.view(torch.uint8)):
                        self.wrong.append(f"step {self._step}: request {lease} layer {layer} head {head} block {index}")

    def _read(self, name: str) -> Any:
        import torch

        if name not in self._staged:
            self._staged[name] = torch.load(self._folder / name)
        return self._staged[name]


def prompts() -> list[list[int]]:
    import random

    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


def going_on(first: list[list[int]]) -> list[dict[str, Any]]:
    """Return the requests whose KV was staged, after their first tokens."""
    return [
        {"prompt": prompt + first[i][:1], "num_tokens": NUM_TOKENS - 1, "lease": {"oasiskv_lease": str(i)}}
        for i, prompt in enumerate(prompts())
    ]


def run_alone(models: dict[str, str], folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts without staging, stage them, go on from what is staged, and go on again where some is lost."""
    engine = Engine(models, folder, case)
    single, _ = engine.answer([{"prompt": prompt, "num_tokens": NUM_TOKENS} for prompt in prompts()])
    engine.attach()
    staging = [{"prompt": it, "num_tokens": 2, "lease": {"oasiskv_stage": str(i)}} for i, it in enumerate(prompts())]
    first, _ = engine.answer(staging)
    until = time.monotonic() + LIMIT_S
    for index in range(len(LENGTHS)):
        while (state := engine.take(index)) == "under way":
            assert time.monotonic() < until
            time.sleep(0.01)
        assert state == "staged"
    rest, reasons = engine.answer(going_on(first))
    joined = [one[:1] + more for one, more in zip(first, rest, strict=True)]
    result = {"single": single, "joined": joined, "reasons": reasons} | engine.result()
    (pathlib.Path(folder) / f"{LOST}.lost-after-8").touch()
    engine.attach()
    tokens, reasons = engine.answer(going_on(first))
    return result | {"lost": {"rest": rest, "tokens": tokens, "reasons": reasons} | engine.result()}


def run_sender(models: dict[str, str], folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts, then stage them while the receiver decodes; a file for each says its first token."""
    engine = Engine(models, folder, case)
    single, _ = engine.answer([{"prompt": prompt, "num_tokens": NUM_TOKENS} for prompt in prompts()])
    engine.attach()
    until = time.monotonic() + LIMIT_S
    while not (pathlib.Path(folder) / "up").exists():
        assert time.monotonic() < until, "no receiver"
        time.sleep(0.05)
    todo, ended, told = list(enumerate(prompts())), dict[int, tuple[list[int], str]](), set[int]()
    while len(told) < len(LENGTHS):
        assert time.monotonic() < until
        if todo:
            index, prompt = todo.pop(0)
            engine.add(index, prompt, 2, {"oasiskv_stage": str(index)})
        ended |= engine.step()
        for index in ended.keys() - told:
            if (state := engine.take(index)) != "under way":
                assert state == "staged"
                told.add(index)
                path = pathlib.Path(folder) / f"begun-{index}.part"
                path.write_text(json.dumps(ended[index][0][0]))
                path.rename(path.with_suffix(".json"))
    return {"single": single} | engine.result()


def run_receiver(models: dict[str, str], folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Go on with what the sender staged, as it comes."""
    engine = Engine(models, folder, case)
    engine.attach()
    (pathlib.Path(folder) / "up").touch()
    begun, ended, until = dict[int, int](), dict[int, tuple[list[int], str]](), time.monotonic() + LIMIT_S
    while len(ended) < len(LENGTHS):
        assert time.monotonic() < until, f"only {sorted(ended)} of {sorted(begun)} ended"
        for index, prompt in enumerate(prompts()):
            path = pathlib.Path(folder) / f"begun-{index}.json"
            if index not in begun and path.exists():
                begun[index] = json.loads(path.read_text())
                lease = {"oasiskv_lease": str(index)}
                engine.add(index, [*prompt, begun[index]], NUM_TOKENS - 1, lease)
        ended |= engine.step()
    joined = [[begun[index], *ended[index][0]] for index in range(len(LENGTHS))]
    return {"joined": joined, "reasons": [ended[index][1] for index in range(len(LENGTHS))]} | engine.result()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from oasiskv.engine.testing import write_tiny_eagle3, write_tiny_model

    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "hidden_size": 256, "num_layers": 4}
    target = write_tiny_model(folder / "target", architecture="llama", max_positions=8192, **sizes)
    return {"target": str(target), "eagle3": str(write_tiny_eagle3(folder / "eagle3", target))}


class Processes:
    """Engines that run at the same time on one GPU, each in a process of its own."""

    def __init__(self, models: dict[str, str], folder: pathlib.Path) -> None:
        self._models = models
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._results: dict[str, dict[str, Any]] = {}

    def start(self, name: str, role: str, folder: str, case: dict[str, Any]) -> None:
        staged = self._folder / folder
        staged.mkdir(exist_ok=True)
        own = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_BATCH_INVARIANT": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        with self._path(name, "out").open("wb") as out, self._path(name, "log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, __file__, json.dumps([role, self._models, str(staged), case])],
                env=os.environ | own,
                stdout=out,
                stderr=log,
            )

    def result(self, name: str) -> dict[str, Any]:
        """Wait for an engine."""
        if name not in self._results:
            status = self._processes[name].wait(timeout=2 * LIMIT_S)
            assert status == 0, self._path(name, "log").read_text()[-3000:]
            self._results[name] = json.loads(self._path(name, "out").read_text().splitlines()[-1])
        return self._results[name]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _path(self, name: str, suffix: str) -> pathlib.Path:
        return self._folder / f"{name}.{suffix}"


@pytest.fixture(scope="module")
def processes(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(models, tmp_path_factory.mktemp("staged"))
    try:
        for name, case in CASES.items():
            processes.start(name, "alone", f"staged by {name}", case)
        for role, case in TWO.items():
            processes.start(role, role, "staged by the sender", case)
        yield processes
    finally:
        processes.close()


def check_went_on(got: dict[str, Any], single: list[list[int]]) -> None:
    assert got["wrong"] == []
    assert got["joined"] == single
    assert got["reasons"] == ["length"] * len(LENGTHS)
    assert got["num_compared"] > 10 * 2**20
    assert got["used"] == [0, 0]
    counts = got["counts"]
    assert counts["handovers"] == len(LENGTHS)
    assert counts["missed"] > 500
    assert 0 < counts["admitted_bytes"] < counts["handover_bytes"] / 2
    assert counts["predicted"] == counts["hit"] + counts["fetched"] + counts["deferred"]


@pytest.mark.parametrize("name", CASES)
def test_requests_that_are_handed_over_give_the_tokens_of_one_engine(processes: Processes, name: str) -> None:
    got = processes.result(name)
    check_went_on(got, got["single"])


@pytest.mark.parametrize("name", CASES)
def test_a_request_whose_blocks_are_lost_ends_with_an_error_and_leaves_others_alone(
    processes: Processes, name: str
) -> None:
    lost = processes.result(name)["lost"]
    others = [index for index in range(len(LENGTHS)) if index != LOST]
    assert [reason for index, reason in enumerate(lost["reasons"]) if index != LOST] == ["length"] * len(others)
    assert lost["reasons"][LOST] == "error"
    assert [lost["tokens"][index] for index in others] == [lost["rest"][index] for index in others]
    tokens, whole = lost["tokens"][LOST], lost["rest"][LOST]
    assert len(tokens) < len(whole)
    assert tokens == whole[: len(tokens)]
    assert lost["wrong"] == []
    assert lost["used"] == [0, 0]


def test_two_engines_on_one_gpu_hand_requests_over_while_both_run(processes: Processes) -> None:
    sender, receiver = processes.result("sender"), processes.result("receiver")
    assert sender["wrong"] == []
    assert sender["used"] == [0, 0]
    assert sender["counts"]["staged_bytes"] > 0
    check_went_on(receiver, sender["single"])


if __name__ == "__main__":
    role, models_of, staged_in, case_of = json.loads(sys.argv[1])
    run = {"alone": run_alone, "sender": run_sender, "receiver": run_receiver}[role]
    print(json.dumps(run(models_of, staged_in, case_of)), flush=True)
    os._exit(0)
