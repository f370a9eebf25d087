from oasiskv.protos.generation.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _generation_pb2.Prompt
    sampling: _generation_pb2.Sampling
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Union[_generation_pb2.Prompt, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token_id", "first_logprobs", "finish_reason", "handover", "prompt_token_ids", "usage")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    first_logprobs: _generation_pb2.TokenLogprobs
    finish_reason: _generation_pb2.FinishReason
    handover: Handover
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    usage: _generation_pb2.Usage
    def __init__(self, first_token_id: _Optional[int] = ..., first_logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., handover: _Optional[_Union[Handover, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class Handover(_message.Message):
    __slots__ = ("handle", "ttl_ms", "staging", "num_tokens", "num_blocks", "budget_blocks", "summary", "summary_dtype")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    handle: str
    ttl_ms: int
    staging: str
    num_tokens: int
    num_blocks: int
    budget_blocks: int
    summary: str
    summary_dtype: str
    def __init__(self, handle: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., staging: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., budget_blocks: _Optional[int] = ..., summary: _Optional[str] = ..., summary_dtype: _Optional[str] = ...) -> None: ...

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

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("handle", "digest", "budget_blocks", "summary", "summary_dtype")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    handle: str
    digest: bytes
    budget_blocks: int
    summary: str
    summary_dtype: str
    def __init__(self, handle: _Optional[str] = ..., digest: _Optional[bytes] = ..., budget_blocks: _Optional[int] = ..., summary: _Optional[str] = ..., summary_dtype: _Optional[str] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("is_ready", "is_draining", "num_requests", "num_waiting_tokens", "num_requests_total", "num_failed_total", "num_prompt_tokens_total", "staged_bytes_total", "staging", "revision")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    is_draining: bool
    num_requests: int
    num_waiting_tokens: int
    num_requests_total: int
    num_failed_total: int
    num_prompt_tokens_total: int
    staged_bytes_total: int
    staging: str
    revision: str
    def __init__(self, is_ready: _Optional[bool] = ..., is_draining: _Optional[bool] = ..., num_requests: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_requests_total: _Optional[int] = ..., num_failed_total: _Optional[int] = ..., num_prompt_tokens_total: _Optional[int] = ..., staged_bytes_total: _Optional[int] = ..., staging: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...
