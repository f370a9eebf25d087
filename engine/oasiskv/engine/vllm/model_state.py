"""Model runner V2's hooks: it asks the model's class for a `ModelState`, which sees every batch before the pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from oasiskv.core.errors import UnsupportedError
from oasiskv.engine.vllm.worker import current


class RejectDraftsV2(RejectionSampler):
    """Model runner V2's rejection sampler, for drafts that are never accepted; see `sampling`."""

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample each request's next token from the logits of its normal token, and count its drafts as rejected."""
        starts = input_batch.cu_num_logits[:-1].long()
        count = input_batch.num_reqs
        undrafted = replace(
            input_batch,
            expanded_idx_mapping=input_batch.idx_mapping,
            expanded_local_pos=torch.zeros_like(input_batch.expanded_local_pos[:count]),
            logits_indices=input_batch.logits_indices[starts],
            cu_num_logits=torch.arange(count + 1, dtype=torch.int32, device=logits.device),
            cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
        )
        output: Any = self.sampler(logits[starts], undrafted)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(count),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        # Runner and drafter expect room for accepted drafts beside the token.
        tokens = torch.nn.functional.pad(output.sampled_token_ids, (0, 1))
        return replace(output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)


class JoinBackground(NoopOffloader):
    """vLLM's own places to order a side stream against full graphs: those of its weight offloader, which is off."""

    def sync_prev_onload(self) -> None:
        """Note that a graph is captured or replayed next: a replay runs no layer of ours in Python."""
        backend = current()
        if backend is not None and backend.runtime is not None:
            backend.runtime.begin_replay()

    def join_after_forward(self) -> None:
        """Order the end of the graph after the background forked inside it."""
        backend = current()
        if backend is not None and backend.runtime is not None:
            backend.runtime.end_pass()


class LookaheadModelState(DefaultModelState):
    """vLLM's own state, which also tells the backend of every batch."""

    def __init__(self, *args: Any) -> None:
        """Take the offloader's place in captures.

        Raises:
            UnsupportedError: weights are offloaded.
        """
        super().__init__(*args)
        if type(get_offloader()) not in (NoopOffloader, JoinBackground):
            raise UnsupportedError("--cpu-offload-gb: expected 0, got weight offloading; or serve without OasisKV")
        set_offloader(JoinBackground())

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Plan the step; runs on real batches only, after the block tables are in place."""
        super().preprocess_state(input_batch, block_tables, kv_cache_config, num_computed_tokens)
        backend = current()
        assert backend is not None
        backend.begin_step(input_batch.req_ids, input_batch.query_start_loc, input_batch.seq_lens, block_tables[0])

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """Reject every draft."""
        drafter = self.vllm_config.speculative_config
        return None if drafter is None else (sampler, RejectDraftsV2(sampler, drafter, self.device))


def install(vllm_config: VllmConfig) -> None:
    """Give the model's class our state: register a subclass of it in its place, in this process.

    Raises:
        UnsupportedError: the model brings a state of its own.
    """
    model_class, architecture = ModelRegistry.resolve_model_cls(
        vllm_config.model_config.architectures, vllm_config.model_config
    )
    if (state := getattr(model_class, "get_model_state_cls", None)) is not None:
        if state() is LookaheadModelState:
            return
        raise UnsupportedError(
            f"model: expected vLLM's default model state, got that of {architecture}; serve this model without OasisKV"
        )
    hooks = {"get_model_state_cls": classmethod(lambda cls: LookaheadModelState), "__module__": model_class.__module__}
    ModelRegistry.register_model(architecture, type(model_class.__name__, (model_class,), hooks))
