"""The Open Inference Protocol over gRPC; decides nothing."""

from typing import Any

import grpc

from oasiskv.core.errors import InvalidRequestError
from oasiskv.protos.inference.v2 import inference_pb2 as pb
from oasiskv.protos.inference.v2 import inference_pb2_grpc
from oasiskv.services.decode import oip
from oasiskv.services.decode.oip import ModelNotServedError, Oip, Scalar, Tensor
from oasiskv.services.rpc.status import ERROR_KEY

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class OipServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """One method per call; `EdgeInterceptor` turns what they raise into status codes."""

    def __init__(self, front: Oip) -> None:
        """Speak for a service."""
        self._front = front

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Answer as the contract says."""
        return pb.ServerLiveResponse(live=self._front.is_live)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Answer as the contract says."""
        return pb.ServerReadyResponse(ready=self._front.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Answer as the contract says."""
        await self._check_model(request.name, request.version, context)
        return pb.ModelReadyResponse(ready=self._front.is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Answer as the contract says."""
        return pb.ServerMetadataResponse(name=oip.SERVER_NAME, version=oip.server_version(), extensions=oip.EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Answer as the contract says."""
        await self._check_model(request.name, request.version, context)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=self._front.model_name,
            versions=[oip.VERSION],
            platform=oip.PLATFORM,
            inputs=[tensor(name=name, datatype="BYTES", shape=[-1]) for name in oip.INPUTS],
            outputs=[tensor(name=name, datatype=kind, shape=[-1]) for name, kind in oip.OUTPUTS.items()],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Answer as the contract says."""
        await self._check_model(request.model_name, request.model_version, context)
        parameters = {name: _scalar(name, value) for name, value in request.parameters.items()}
        wanted = [output.name for output in request.outputs]
        completions = await self._front.infer(_tensors(request), parameters, wanted)
        response = pb.ModelInferResponse(model_name=self._front.model_name, model_version=oip.VERSION, id=request.id)
        for name, elements in oip.columns(completions, wanted).items():
            output = response.outputs.add(name=name, datatype=oip.OUTPUTS[name], shape=[len(elements)])
            if request.raw_input_contents:
                response.raw_output_contents.append(oip.pack(elements))
            elif oip.OUTPUTS[name] == "BYTES":
                output.contents.bytes_contents.extend(elements)
            else:
                output.contents.int_contents.extend(elements)
        return response

    async def _check_model(self, name: str, version: str, context: Context) -> None:
        try:
            self._front.check_model(name, version)
        except ModelNotServedError as error:
            metadata = ((ERROR_KEY, InvalidRequestError.__name__),)
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error), metadata)


def _tensors(request: pb.ModelInferRequest) -> list[Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(f"raw_input_contents: expected {len(request.inputs)}, got {len(raw)}")
    tensors = []
    for index, tensor in enumerate(request.inputs):
        elements = list(tensor.contents.bytes_contents)
        if raw:
            if elements:
                raise InvalidRequestError(f"inputs.{tensor.name}.contents: expected none beside raw_input_contents")
            elements = oip.unpack("raw_input_contents", raw[index])
        tensors.append(Tensor(name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape), elements=elements))
    return tensors


def _scalar(name: str, parameter: pb.InferParameter) -> Scalar:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequestError(f"parameters.{name}: expected a value, got none")
    value: Scalar = getattr(parameter, kind)
    return value
