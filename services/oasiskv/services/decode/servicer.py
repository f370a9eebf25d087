"""Translates between the messages of the decode contract and `service`; decides nothing."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from oasiskv.protos.decode.v1 import decode_pb2 as pb
from oasiskv.protos.decode.v1 import decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.generation import FINISH_REASONS, logprobs_message, prompt_of, sampling_of
from oasiskv.services.rpc.callers import require_operator

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Decode"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """One method per call; `EdgeInterceptor` turns what they raise into status codes."""

    def __init__(self, service: DecodeService, router: Router, revision: str = "") -> None:
        self._service = service
        self._router = router
        self._revision = revision

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        sampling = sampling_of(request.sampling)
        answer = await self._service.begin(request.request_id, prompt_of(request.prompt), sampling)
        num_tokens = 0
        async for generated in answer.generated:
            num_tokens += len(generated.token_ids)
            response = pb.GenerateResponse(
                token_ids=generated.token_ids,
                text=generated.text,
                logprobs=[logprobs_message(entries) for entries in generated.logprobs],
            )
            if generated.finish_reason is not None:
                response.finish_reason = FINISH_REASONS[generated.finish_reason]
                usage = generation_pb2.Usage(prompt_tokens=len(answer.ids), completion_tokens=num_tokens)
                response.usage.CopyFrom(usage)
            yield response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(num_aborted=await self._service.abort(request.request_ids))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        require_operator(context, ())
        return pb.DrainResponse(num_requests=self._service.drain())

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        counts, traffic = self._service.counts, await self._service.traffic()
        return pb.StatsResponse(
            is_ready=self._service.is_ready,
            is_draining=self._service.is_draining,
            num_requests=self._service.num_requests,
            num_requests_total=counts.num_requests,
            num_failed_total=counts.num_failed,
            num_prompt_tokens_total=counts.num_prompt_tokens,
            num_completion_tokens_total=counts.num_completion_tokens,
            num_handovers_total=self._router.num_handovers,
            num_recomputed_total=self._router.num_recomputed,
            admitted_bytes_total=traffic["admitted_bytes"] + traffic["loaded_bytes"],
            missed_bytes_total=traffic["missed_bytes"],
            full_bytes_total=traffic["handover_bytes"] + traffic["loaded_bytes"],
            revision=self._revision,
            kv_paths=[
                pb.KvPath(
                    prefill=peer.client.address,
                    is_ready=peer.is_ready,
                    is_verified=peer.is_verified,
                    revision=peer.revision,
                    reason=peer.reason,
                )
                for peer in self._router.peers.all
            ],
        )
