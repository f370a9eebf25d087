"""A drafter that runs when its drafts are of use: while some request is sparse.

An EAGLE-3 head of one layer makes K and V of a token from the token and the target's hidden states alone. So in a step
without a sparse request they are written, and the lookahead query of its layer is published, without the head's
attention, its MLP and its logits: what it drafts later is what it would have drafted had it run.
"""

import logging
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from oasiskv.engine.vllm.layers import is_query_fp8
from oasiskv.engine.vllm.worker import WorkerBackend

logger = logging.getLogger(__name__)


class LeanDrafter:
    """Takes the place of a speculator's `propose` in model runner V2.

    Args:
        speculator: vLLM's, with its model loaded.
        backend: This process's.
    """

    def __init__(self, speculator: EagleSpeculator, backend: WorkerBackend) -> None:
        self._speculator = speculator
        self._backend = backend
        self._full = speculator.propose
        (self._layer,) = speculator.model.model.layers
        self._attention = self._layer.self_attn.attn

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Draft a token for each request, or return placeholders that nobody looks ahead with."""
        if options.get("dummy_run") or self._backend.needs_drafts() or not aux_hidden_states:
            return self._full(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                *args,
                **options,
            )
        speculator = self._speculator
        prepare_prefill_inputs(
            speculator.last_token_indices,
            speculator.current_draft_step,
            speculator.input_buffers,
            input_batch,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            speculator.max_num_reqs,
        )
        count = input_batch.num_tokens
        hidden = speculator.model.combine_hidden_states(torch.cat([states[:count] for states in aux_hidden_states], -1))
        self._keep(hidden, slot_mappings[self._attention.layer_name][:count])
        drafts = speculator.draft_tokens[: input_batch.num_reqs]
        drafts.zero_()
        return drafts

    def _keep(self, hidden: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write K and V of the step's tokens, and publish their queries.

        Args:
            hidden: `[num_tokens, hidden_size]`: the target's states as the head takes them.
            slot_mapping: `int64[num_tokens]`: where K and V go.
        """
        buffers, model, layer = self._speculator.input_buffers, self._speculator.model, self._layer
        count = len(hidden)
        embeds = layer.input_layernorm(model.model.embed_input_ids(buffers.input_ids[:count]))
        hidden, _ = layer._residual_norm(hidden_states=hidden)
        attention, own = layer.self_attn, self._attention
        qkv, _ = attention.qkv_proj(torch.cat([embeds, hidden], -1))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        query, key = attention.rotary_emb(buffers.positions[:count], query, key)
        if is_query_fp8(own):
            query, _ = own.query_quant(query, own._q_scale)
        self._backend.pass_drafter_by(own.layer_name, query.view(count, own.num_heads, own.head_size))
        # No step stands behind the pass as far as the attention is concerned: the backend has nothing to complete.
        with set_forward_context(None, self._speculator.vllm_config, num_tokens=count):
            own.impl.do_kv_cache_update(
                own,
                key.view(count, own.num_kv_heads, own.head_size),
                value.view(count, own.num_kv_heads, own.head_size),
                own.kv_cache,
                slot_mapping,
            )


def install(runner: Any, backend: WorkerBackend) -> None:
    """Let the runner's drafter run only when its drafts are of use, if it is of the kind that allows that."""
    speculator = runner.speculator
    if (
        isinstance(speculator, EagleSpeculator)
        and type(speculator.model) is Eagle3LlamaForCausalLM
        and len(speculator.model.model.layers) == 1
        and speculator.dp_size == 1
        and speculator.acceptance_estimator is None
    ):
        speculator.propose = LeanDrafter(speculator, backend).propose
    elif speculator is not None:
        logger.info("the drafter runs in every step: only EAGLE-3 heads of one layer can be left out")
