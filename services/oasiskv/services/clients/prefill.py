"""Calls a prefill service."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from oasiskv.core.generation import Handover, Sampling
from oasiskv.core.service_config import TlsConfig
from oasiskv.protos.generation.v1 import generation_pb2
from oasiskv.protos.prefill.v1 import prefill_pb2 as pb
from oasiskv.protos.prefill.v1 import prefill_pb2_grpc
from oasiskv.services.generation import FINISH_REASONS, logprobs_of, sampling_message
from oasiskv.services.rpc.status import error_of
from oasiskv.services.rpc.tls import channel_credentials

MESSAGE_BYTES = 64 * 2**20
REASONS = {value: name for name, value in FINISH_REASONS.items()}


class PrefillClient:
    """A channel to one service; every call has a deadline and raises the errors that the contract names."""

    def __init__(self, address: str, *, tls: TlsConfig | None = None, tls_name: str = "") -> None:
        """Prepare; the first call connects.

        Args:
            address: `host:port`.
            tls: This process's certificate; None to speak in the clear.
            tls_name: Whom the service's certificate must name; empty for the host of the address.
        """
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
        ]
        if tls_name and tls is not None:
            options.append(("grpc.ssl_target_name_override", tls_name.strip("[]")))
        self.address = address
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, channel_credentials(tls), options)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def prefill(self, request_id: str, ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Handover:
        """Have a prompt computed; cancelling this ends the request there.

        Raises:
            OasisError: As the contract says.
        """
        request = pb.PrefillRequest(
            request_id=request_id,
            prompt=generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=ids)),
            sampling=sampling_message(sampling),
        )
        try:
            response: pb.PrefillResponse = await self._stub.Prefill(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        return Handover(
            first_token_id=response.first_token_id,
            first_logprobs=logprobs_of(response.first_logprobs),
            finish_reason=REASONS.get(response.finish_reason),
            handle=response.handover.handle,
            num_tokens=response.handover.num_tokens,
            num_blocks=response.handover.num_blocks,
            budget_blocks=response.handover.budget_blocks,
            summary=response.handover.summary,
            summary_dtype=response.handover.summary_dtype or "auto",  # a peer from before there was another
        )

    async def probe(self, timeout_s: float) -> tuple[Handover, bytes]:
        """Have a block of random bytes staged; return how to take it over and the digest of its bytes.

        Raises:
            OasisError: As the contract says.
        """
        try:
            response: pb.ProbeResponse = await self._stub.Probe(pb.ProbeRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        handover = Handover(
            first_token_id=0,
            handle=response.handle,
            num_blocks=1,
            budget_blocks=response.budget_blocks,
            summary=response.summary,
            summary_dtype=response.summary_dtype or "auto",
        )
        return handover, response.digest

    async def stats(self, timeout_s: float) -> pb.StatsResponse:
        """Return the service's counts.

        Raises:
            OasisError: It does not answer.
        """
        try:
            response: pb.StatsResponse = await self._stub.Stats(pb.StatsRequest(), timeout=timeout_s)
            return response
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
