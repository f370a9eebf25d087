"""Draft tokens that only look ahead: every one is rejected, and the token is sampled as if there had been no draft.

The target's logits of the normal token go through vLLM's own sampler, so that the distribution is exactly that without
a drafter, at any temperature and with every sampling feature.
"""

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class RejectDrafts(RejectionSampler):
    """Model runner V1's rejection sampler, for drafts that are never accepted."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample each request's next token from the logits of its normal token.

        Args:
            metadata: Where each request's logits lie.
            draft_probs: Ignored.
            logits: `[num_drafts + num_requests, vocab_size]`.
            sampling_metadata: Of the requests.

        Returns:
            One token per request.
        """
        ends = metadata.cu_num_sampled_tokens.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        output: Any = self.sampler(logits=logits[starts], sampling_metadata=sampling_metadata)
        assert isinstance(output, SamplerOutput)
        return output
