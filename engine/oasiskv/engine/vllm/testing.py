"""Runs vLLM engines in this process, one after the other, for tests; `engine.testing.EngineProcess` starts and asks it.

Reads one JSON job a line from standard input and answers each with a JSON line. Everything that vLLM prints goes to
standard error. Importing vLLM takes most of an engine's start, so one process serves many tests; a process of its own
for stock vLLM, since a worker with the backend registers it for the whole process.
"""

import gc
import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
WORKER = "oasiskv.engine.vllm.cpu.Worker"


def interpret_triton() -> None:
    """Let Triton's interpreter stand in for a GPU, so that model runner V2 runs here. Before vLLM is imported."""
    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        utils = SimpleNamespace()

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 0)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            import torch

            return torch.cpu

    triton.backends.backends.clear()
    triton.backends.backends["cpu"] = SimpleNamespace(compiler=None, driver=Driver)
    driver.set_active(Driver())


class Engines:
    """The engine of the last job, kept for the next one if that asks for the same."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._key = ""

    def get(self, job: dict[str, Any]) -> Any:
        """Return the job's engine, which may be the running one."""
        names = ("engine", "settings", "reject_drafts", "kv_scales")
        key = json.dumps([job.get(name) for name in names], sort_keys=True)
        if self._key != key or self.llm is None:
            self.close()
            self.llm, self._key = make_engine(job), key
        return self.llm

    def close(self) -> None:
        """End the engine and forget what it left in the process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def engine_options(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the job's engine, over small defaults."""
    options = {"enforce_eager": True, "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**28}
    options |= job["engine"]
    if (settings := job.get("settings")) is not None:
        transfer = {"kv_connector": "OasisKVConnector", "kv_role": "kv_both"}
        transfer |= {"kv_connector_extra_config": {"host_pool_bytes": "64MiB"} | settings}
        options = {"kv_transfer_config": transfer, "worker_cls": WORKER} | options
    if options.pop("custom_logits_processor", False):
        is_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
        options["logits_processors"] = [custom_logits_processor_v2() if is_v2 else custom_logits_processor()]
    return options


def make_engine(job: dict[str, Any]) -> Any:
    """Start the job's engine."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if job.get("settings") is not None:
        watch_profile()
    llm = LLM(disable_log_stats=False, **engine_options(job))
    # Done by the first engine, and vLLM does not do it twice in one process.
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    if (scales := job.get("kv_scales")) is not None:
        set_kv_scales(llm, *scales)
    if job.get("reject_drafts"):
        from oasiskv.engine.vllm.sampling import RejectDrafts

        runner = core(llm).model_executor.driver_worker.worker.model_runner
        runner.rejection_sampler = RejectDrafts(runner.sampler, runner.speculative_config, runner.device)
    return llm


def watch_profile() -> None:
    """Let workers note whether the backend's tensors are there when vLLM looks at how much memory is left."""
    from oasiskv.engine.vllm.cpu import Worker

    if "determine_available_memory" in vars(Worker):
        return
    look = Worker.determine_available_memory

    def note_and_look(self: Any) -> int:
        self.profiled_sets = self.backend._sets
        return look(self)

    Worker.determine_available_memory = note_and_look


def set_kv_scales(llm: Any, key_scale: float, value_scale: float) -> None:
    """Give every layer the scales that a checkpoint may bring for an fp8 cache; only tests set them so."""
    config = core(llm).model_executor.driver_worker.worker.vllm_config
    for layer in config.compilation_config.static_forward_context.values():
        layer._k_scale.fill_(key_scale)
        layer._v_scale.fill_(value_scale)
        layer._k_scale_float, layer._v_scale_float = key_scale, value_scale


def custom_logits_processor() -> type:
    """Return a processor that forbids odd token ids to requests that say so."""
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class EvenTokensOnly(LogitsProcessor):
        def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
            self._rows: dict[int, bool] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            def read(params: Any, *_: Any) -> bool | None:
                return (params.extra_args or {}).get("even_tokens_only")

            process_dict_updates(self._rows, batch_update, read)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            logits[list(self._rows), 1::2] = float("-inf")
            return logits

    return EvenTokensOnly


def custom_logits_processor_v2() -> type:
    """Return the same processor for model runner V2, which has another interface for them."""
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

    class EvenTokensOnly(LogitsProcessor):
        def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
            self._is_even_only = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            is_even_only = bool((sampling_params.extra_args or {}).get("even_tokens_only"))
            self._is_even_only[req_idx] = is_even_only
            return is_even_only

        def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
            rows = self._is_even_only[ctx.expanded_idx_mapping.long()]
            logits[rows.nonzero().squeeze(1), 1::2] = float("-inf")
            return logits

    return EvenTokensOnly


def core(llm: Any) -> Any:
    """Return the engine's core, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def sampling_params(values: dict[str, Any]) -> Any:
    """Build sampling parameters: greedy and of the full length unless said otherwise."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    values = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | values
    if (structure := values.pop("structured_outputs", None)) is not None:
        values["structured_outputs"] = StructuredOutputsParams(**structure)
    if (bias := values.get("logit_bias")) is not None:
        values["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, **values)


def prompt_of(llm: Any, request: dict[str, Any]) -> Any:
    """Return a request's token ids, those of a chat by the model's template."""
    if (chat := request.get("chat")) is not None:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.apply_chat_template(
            chat, tools=request.get("tools"), add_generation_prompt=True, return_dict=False
        )
        return {"prompt_token_ids": list(ids)}
    return {"prompt_token_ids": request["prompt"]}


class Run:
    """One job's requests, stepped by hand, so that the scheduler can be looked at between any two steps."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        self.llm, self.job = llm, job
        self.engine, self.scheduler = llm.llm_engine, core(llm).scheduler
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.ledger = getattr(self.manager, "ledger", None)
        self.completions: dict[str, dict[int, Any]] = {}
        self.prompt_logprobs: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.steps: list[dict[str, Any]] = []
        self.preempted: set[str] = set()

    def run(self) -> dict[str, Any]:
        """Run to the end and return all but `facts` of a reply."""
        before, counts = self.pool(), self.counts()
        requests = [{"id": str(index)} | request for index, request in enumerate(self.job["requests"])]
        step = 0
        while self.engine.has_unfinished_requests() or any(request.get("at", 0) >= step for request in requests):
            for request in requests:
                if request.get("at", 0) == step:
                    self.add(request)
                if request.get("abort_at") == step:
                    self.engine.abort_request([request["id"]])
            if step in self.job.get("preempt_at", ()):
                self.preempted |= {name(request) for request in self.scheduler.running}
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            for output in self.engine.step():
                self.keep(output)
            if self.job.get("staged"):
                # Not imported for others: an engine that is off must not have it.
                from oasiskv.engine.testing import StagedFolder

                StagedFolder.tick()
            if self.job.get("sample"):
                self.steps.append(self.sample())
            step += 1
        reply = {
            "outputs": [self.output(request["id"]) for request in requests],
            "steps": self.steps,
            "num_steps": step,
            "pool_before": before,
            "pool_after": self.pool(),
        }
        reply["counts"] = {key: value - counts.get(key, 0) for key, value in self.counts().items()}
        return reply

    def add(self, request: dict[str, Any]) -> None:
        """Hand a request to the engine; a refusal becomes its output."""
        lora = None
        if (path := request.get("lora")) is not None:
            from vllm.lora.request import LoRARequest

            lora = LoRARequest("adapter", 1, path)
        try:
            params = sampling_params(request.get("params", {}))
            self.engine.add_request(request["id"], prompt_of(self.llm, request), params, lora_request=lora)
        except Exception as error:
            self.errors[request["id"]] = f"{type(error).__name__}: {error}"

    def output(self, request_id: str) -> dict[str, Any]:
        """Return what a request got."""
        if request_id in self.errors:
            return {"error": self.errors[request_id]}
        completions = sorted(self.completions.get(request_id, {}).items())
        return {
            "prompt_logprobs": logprobs(self.prompt_logprobs.get(request_id)),
            "was_preempted": request_id in self.preempted,
            "completions": [
                {
                    "tokens": list(completion.token_ids),
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "logprobs": logprobs(completion.logprobs),
                }
                for _, completion in completions
            ],
        }

    def keep(self, output: Any) -> None:
        """Keep the latest of each completion; the engine tells of those of one request one by one."""
        self.prompt_logprobs[output.request_id] = output.prompt_logprobs
        kept = self.completions.setdefault(output.request_id, {})
        kept.update((completion.index, completion) for completion in output.outputs)

    def sample(self) -> dict[str, Any]:
        """Return what every running request holds after a step."""
        rows = {}
        for request in self.scheduler.running:
            blocks = self.manager.req_to_blocks[request.request_id]
            rows[name(request)] = {
                "num_computed": request.num_computed_tokens,
                "drafts": list(request.spec_token_ids),
                "held": sum(not block.is_null for block in blocks),
                "is_sparse": self.ledger is not None and self.ledger.is_sparse(request.request_id),
            }
        self.preempted |= {name(request) for request in self.scheduler.waiting if request.num_preemptions}
        pool = self.pool()
        held = {"host_held": self.ledger._host.num_blocks - pool["host_free"]} if self.ledger is not None else {}
        return {"requests": rows, "free": pool["free"]} | held

    def pool(self) -> dict[str, Any]:
        """Return what is free and what the ledger still knows."""
        pool = {"free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}
        if self.ledger is not None:
            pool["host_free"] = self.ledger._host.num_free
            pool["ledger_requests"] = len(self.ledger._requests) + len(self.ledger._expected)
        return pool

    def counts(self) -> dict[str, float]:
        """Return the backend's counters after checking its working sets; none for workers elsewhere."""
        # Not imported for this: an engine that is off must not have it.
        worker = sys.modules.get("oasiskv.engine.vllm.worker")
        backend = worker and worker.current()
        if backend is None or backend.runtime is None:
            return {}
        backend.runtime.check_invariants()
        return dict(backend.runtime.counts())


def name(request: Any) -> str:
    """Return the id that the job gave the request; vLLM adds to it, and children of n > 1 share it."""
    return request.request_id.split("_")[-1].rsplit("-", 1)[0]


def logprobs(positions: Any) -> list[Any] | None:
    """Return token and logprob of each entry of each position."""
    if positions is None:
        return None
    return [position and [[token, entry.logprob] for token, entry in position.items()] for position in positions]


def answer(engines: Engines, job: dict[str, Any]) -> dict[str, Any]:
    """Answer one job.

    Returns:
        What `engine.testing.Reply` holds; or `start_error`: the error that kept the engine, or its mere configuration,
        from being made, and that error's causes.
    """
    try:
        if job.get("only_configure"):
            configure(job)
            return {}
        llm = engines.get(job)
    except Exception as error:
        traceback.print_exc()
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return {"start_error": causes}
    if (folder := job.get("staged")) is not None:
        llm.collective_rpc("attach_staging", args=("oasiskv.engine.testing:StagedFolder", {"folder": folder}))
    reply = Run(llm, job).run() | {"facts": facts(llm)}
    reply["handovers"] = [llm.collective_rpc("take_handover", args=(lease,)) for lease in job.get("take", ())]
    return reply


def configure(job: dict[str, Any]) -> None:
    """Make vLLM's configuration and let the backend check it, which every process of an engine does first."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from oasiskv.engine.vllm import settings

    settings.check(EngineArgs(**engine_options(job)).create_engine_config(UsageContext.LLM_CLASS))


def facts(llm: Any) -> dict[str, Any]:
    """Return what this engine is made of."""
    engine_core = core(llm)
    worker = getattr(engine_core.model_executor, "driver_worker", None)
    found: dict[str, Any] = {"num_blocks": engine_core.scheduler.kv_cache_config.num_blocks}
    manager = engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    found["kv_cache_manager"] = type(manager).__qualname__
    found["oasiskv_modules"] = sorted(module for module in sys.modules if module.startswith("oasiskv"))
    if worker is not None:
        runner = worker.worker.model_runner
        found["runner"] = f"{type(runner).__module__}.{type(runner).__qualname__}"
        found["worker"] = f"{type(worker.worker).__module__}.{type(worker.worker).__qualname__}"
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        if (backend := getattr(worker.worker, "backend", None)) is not None:
            profiled = getattr(worker.worker, "profiled_sets", None)
            found["is_state_profiled"] = profiled is not None and profiled is backend.runtime.sets
        found["attention"] = sorted({type(layer.impl).__qualname__ for layer in layers if hasattr(layer, "impl")})
    return found


def main() -> None:
    """Answer jobs until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if "--v2" in sys.argv:
        os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        interpret_triton()
    engines = Engines()
    for line in sys.stdin:
        print(json.dumps(answer(engines, json.loads(line))), file=replies, flush=True)
    engines.close()


if __name__ == "__main__":
    main()
