"""Translates between the messages of the prefill contract and `service`; decides nothing."""

from typing import Any

import grpc

from oasiskv.protos.generation.v1 import generation_pb2
from oasiskv.protos.prefill.v1 import prefill_pb2 as pb
from oasiskv.protos.prefill.v1 import prefill_pb2_grpc
from oasiskv.services.generation import FINISH_REASONS, logprobs_message, prompt_of, sampling_of
from oasiskv.services.prefill.service import PrefillService
from oasiskv.services.rpc.callers import require_operator

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Prefill"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """One method per call; `EdgeInterceptor` turns what they raise into status codes."""

    def __init__(self, service: PrefillService, staging: str, handle_ttl_ms: int, revision: str = "") -> None:
        self._service = service
        self._revision = revision
        self._staging = staging
        self._handle_ttl_ms = handle_ttl_ms

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        sampling = sampling_of(request.sampling)
        first, ids = await self._service.prefill(request.request_id, prompt_of(request.prompt), sampling)
        response = pb.PrefillResponse(
            first_token_id=first.first_token_id,
            usage=generation_pb2.Usage(prompt_tokens=len(ids), completion_tokens=1),
        )
        if first.first_logprobs:
            response.first_logprobs.CopyFrom(logprobs_message(first.first_logprobs))
        if request.prompt.WhichOneof("prompt") != "token_ids":
            response.prompt_token_ids.extend(ids)
        if first.finish_reason is not None:
            response.finish_reason = FINISH_REASONS[first.finish_reason]
            return response
        response.handover.CopyFrom(
            pb.Handover(
                handle=first.handle,
                ttl_ms=self._handle_ttl_ms,
                staging=self._staging,
                num_tokens=first.num_tokens,
                num_blocks=first.num_blocks,
                budget_blocks=first.budget_blocks,
                summary=first.summary,
                summary_dtype=first.summary_dtype,
            )
        )
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(num_aborted=self._service.abort(request.request_ids))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        require_operator(context, ())
        return pb.DrainResponse(num_requests=self._service.drain())

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        probe, digest = await self._service.probe()
        return pb.ProbeResponse(
            handle=probe.handle,
            digest=digest,
            budget_blocks=probe.budget_blocks,
            summary=probe.summary,
            summary_dtype=probe.summary_dtype,
        )

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        counts = self._service.counts
        return pb.StatsResponse(
            is_ready=self._service.is_ready,
            is_draining=self._service.is_draining,
            num_requests=self._service.num_requests,
            num_waiting_tokens=self._service.num_waiting_tokens,
            num_requests_total=counts.num_requests,
            num_failed_total=counts.num_failed,
            num_prompt_tokens_total=counts.num_prompt_tokens,
            staged_bytes_total=counts.staged_bytes,
            staging=self._staging,
            revision=self._revision,
        )
