from oasiskv.protos.generation.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _generation_pb2.Prompt
    sampling: _generation_pb2.Sampling
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[_generation_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "logprobs", "finish_reason", "usage")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("is_ready", "is_draining", "num_requests", "num_requests_total", "num_failed_total", "num_prompt_tokens_total", "num_completion_tokens_total", "num_handovers_total", "num_recomputed_total", "admitted_bytes_total", "missed_bytes_total", "full_bytes_total", "revision", "kv_paths")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_HANDOVERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISSED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FULL_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_PATHS_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    is_draining: bool
    num_requests: int
    num_requests_total: int
    num_failed_total: int
    num_prompt_tokens_total: int
    num_completion_tokens_total: int
    num_handovers_total: int
    num_recomputed_total: int
    admitted_bytes_total: int
    missed_bytes_total: int
    full_bytes_total: int
    revision: str
    kv_paths: _containers.RepeatedCompositeFieldContainer[KvPath]
    def __init__(self, is_ready: _Optional[bool] = ..., is_draining: _Optional[bool] = ..., num_requests: _Optional[int] = ..., num_requests_total: _Optional[int] = ..., num_failed_total: _Optional[int] = ..., num_prompt_tokens_total: _Optional[int] = ..., num_completion_tokens_total: _Optional[int] = ..., num_handovers_total: _Optional[int] = ..., num_recomputed_total: _Optional[int] = ..., admitted_bytes_total: _Optional[int] = ..., missed_bytes_total: _Optional[int] = ..., full_bytes_total: _Optional[int] = ..., revision: _Optional[str] = ..., kv_paths: _Optional[_Iterable[_Union[KvPath, _Mapping]]] = ...) -> None: ...

class KvPath(_message.Message):
    __slots__ = ("prefill", "is_ready", "is_verified", "revision", "reason")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    IS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    is_ready: bool
    is_verified: bool
    revision: str
    reason: str
    def __init__(self, prefill: _Optional[str] = ..., is_ready: _Optional[bool] = ..., is_verified: _Optional[bool] = ..., revision: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
