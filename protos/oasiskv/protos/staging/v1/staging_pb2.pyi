from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Access(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_UNSPECIFIED: _ClassVar[Access]
    ACCESS_STREAM: _ClassVar[Access]
    ACCESS_MAP_READ: _ClassVar[Access]
    ACCESS_MAP_WRITE: _ClassVar[Access]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_UNSPECIFIED: _ClassVar[BlockStatus]
    BLOCK_STATUS_INTACT: _ClassVar[BlockStatus]
    BLOCK_STATUS_ABSENT: _ClassVar[BlockStatus]
    BLOCK_STATUS_NOT_READ: _ClassVar[BlockStatus]
    BLOCK_STATUS_IO_ERROR: _ClassVar[BlockStatus]
    BLOCK_STATUS_CORRUPT: _ClassVar[BlockStatus]
ACCESS_UNSPECIFIED: Access
ACCESS_STREAM: Access
ACCESS_MAP_READ: Access
ACCESS_MAP_WRITE: Access
TIER_UNSPECIFIED: Tier
TIER_HOST: Tier
TIER_DISK: Tier
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_INTACT: BlockStatus
BLOCK_STATUS_ABSENT: BlockStatus
BLOCK_STATUS_NOT_READ: BlockStatus
BLOCK_STATUS_IO_ERROR: BlockStatus
BLOCK_STATUS_CORRUPT: BlockStatus

class Fingerprint(_message.Message):
    __slots__ = ("model_hash", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "tp_size", "layout", "kv_revision")
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_REVISION_FIELD_NUMBER: _ClassVar[int]
    model_hash: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_size: int
    layout: str
    kv_revision: int
    def __init__(self, model_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tp_size: _Optional[int] = ..., layout: _Optional[str] = ..., kv_revision: _Optional[int] = ...) -> None: ...

class RegisterPeerRequest(_message.Message):
    __slots__ = ("fingerprint", "name", "access")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: Fingerprint
    name: str
    access: Access
    def __init__(self, fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., name: _Optional[str] = ..., access: _Optional[_Union[Access, str]] = ...) -> None: ...

class RegisterPeerResponse(_message.Message):
    __slots__ = ("peer_id", "peer_ttl_ms", "max_lease_ttl_ms", "max_blocks", "memory_socket", "num_blocks", "block_bytes", "num_parts", "part_bytes", "epoch")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SOCKET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    peer_ttl_ms: int
    max_lease_ttl_ms: int
    max_blocks: int
    memory_socket: str
    num_blocks: int
    block_bytes: int
    num_parts: int
    part_bytes: int
    epoch: str
    def __init__(self, peer_id: _Optional[str] = ..., peer_ttl_ms: _Optional[int] = ..., max_lease_ttl_ms: _Optional[int] = ..., max_blocks: _Optional[int] = ..., memory_socket: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_parts: _Optional[int] = ..., part_bytes: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("peer_id", "num_blocks", "ttl_ms", "block_keys")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    num_blocks: int
    ttl_ms: int
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., block_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "block_ids", "num_held_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl_ms: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_held_blocks: int
    def __init__(self, lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_held_blocks: _Optional[int] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("peer_id", "lease_id", "blocks", "columns")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_id: str
    blocks: _containers.RepeatedCompositeFieldContainer[SealedBlock]
    columns: SealedColumns
    def __init__(self, peer_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[SealedBlock, _Mapping]]] = ..., columns: _Optional[_Union[SealedColumns, _Mapping]] = ...) -> None: ...

class SealedColumns(_message.Message):
    __slots__ = ("block_indices", "block_keys", "checksums")
    BLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_indices: _containers.RepeatedScalarFieldContainer[int]
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    checksums: bytes
    def __init__(self, block_indices: _Optional[_Iterable[int]] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class SealedBlock(_message.Message):
    __slots__ = ("block_index", "block_key", "checksums")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    block_key: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_index: _Optional[int] = ..., block_key: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ("block_ids",)
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("peer_id", "block_keys")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("peer_id", "keys", "handle", "min_blocks", "ttl_ms", "wait_blocks")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    keys: BlockKeys
    handle: str
    min_blocks: int
    ttl_ms: int
    wait_blocks: int
    def __init__(self, peer_id: _Optional[str] = ..., keys: _Optional[_Union[BlockKeys, _Mapping]] = ..., handle: _Optional[str] = ..., min_blocks: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., wait_blocks: _Optional[int] = ...) -> None: ...

class BlockKeys(_message.Message):
    __slots__ = ("block_keys",)
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("lease_id", "ttl_ms", "num_blocks", "block_statuses")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATUSES_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl_ms: int
    num_blocks: int
    block_statuses: _containers.RepeatedScalarFieldContainer[BlockStatus]
    def __init__(self, lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_statuses: _Optional[_Iterable[_Union[BlockStatus, str]]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("peer_id", "lease_ids", "ttl_ms")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl_ms: int
    def __init__(self, peer_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("ttl_ms", "lost_lease_ids")
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    lost_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ttl_ms: _Optional[int] = ..., lost_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("peer_id", "lease_ids", "handles")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    handles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[str]] = ..., handles: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class FetchDescriptorsRequest(_message.Message):
    __slots__ = ("peer_id", "lease_id", "block_indices", "in_columns")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    IN_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_id: str
    block_indices: _containers.RepeatedScalarFieldContainer[int]
    in_columns: bool
    def __init__(self, peer_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., block_indices: _Optional[_Iterable[int]] = ..., in_columns: _Optional[bool] = ...) -> None: ...

class BlockDescriptor(_message.Message):
    __slots__ = ("block_index", "block_id", "generation", "checksums")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    block_id: int
    generation: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_index: _Optional[int] = ..., block_id: _Optional[int] = ..., generation: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchDescriptorsResponse(_message.Message):
    __slots__ = ("blocks", "columns")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockDescriptor]
    columns: BlockColumns
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockDescriptor, _Mapping]]] = ..., columns: _Optional[_Union[BlockColumns, _Mapping]] = ...) -> None: ...

class BlockColumns(_message.Message):
    __slots__ = ("block_ids", "generations", "checksums")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    generations: bytes
    checksums: bytes
    def __init__(self, block_ids: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class HandoffRequest(_message.Message):
    __slots__ = ("peer_id", "lease_id", "ttl_ms")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_id: str
    ttl_ms: int
    def __init__(self, peer_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class HandoffResponse(_message.Message):
    __slots__ = ("handle", "ttl_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    handle: str
    ttl_ms: int
    def __init__(self, handle: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("peer_id", "lease_id", "block_index", "part", "data", "checksum")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_id: str
    block_index: int
    part: int
    data: bytes
    checksum: int
    def __init__(self, peer_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., block_index: _Optional[int] = ..., part: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("num_parts",)
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    num_parts: int
    def __init__(self, num_parts: _Optional[int] = ...) -> None: ...

class PartRange(_message.Message):
    __slots__ = ("block_index", "first_part", "num_parts")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    first_part: int
    num_parts: int
    def __init__(self, block_index: _Optional[int] = ..., first_part: _Optional[int] = ..., num_parts: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("peer_id", "lease_id", "ranges")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    lease_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[PartRange]
    def __init__(self, peer_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[PartRange, _Mapping]]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("block_index", "part", "data", "checksum")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    part: int
    data: bytes
    checksum: int
    def __init__(self, block_index: _Optional[int] = ..., part: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_leases",)
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    num_leases: int
    def __init__(self, num_leases: _Optional[int] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("block_keys",)
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("holders", "is_complete")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    is_complete: bool
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("service_id", "address", "num_prefix_blocks", "num_blocks", "num_free_blocks", "num_leases", "is_draining")
    SERVICE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    service_id: str
    address: str
    num_prefix_blocks: int
    num_blocks: int
    num_free_blocks: int
    num_leases: int
    is_draining: bool
    def __init__(self, service_id: _Optional[str] = ..., address: _Optional[str] = ..., num_prefix_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_leases: _Optional[int] = ..., is_draining: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("epoch", "is_draining", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_fenced_blocks", "num_peers", "num_leases", "num_sealed_total", "num_evicted_total", "num_expired_leases_total", "num_corrupt_blocks_total", "num_disk_blocks", "num_held_disk_blocks", "num_unwritten_blocks", "num_lost_blocks_total", "num_disk_errors_total", "transport", "transport_reason", "num_links", "memory_reason", "disk_reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FENCED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEALED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_ERRORS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_LINKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_REASON_FIELD_NUMBER: _ClassVar[int]
    DISK_REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    is_draining: bool
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_fenced_blocks: int
    num_peers: int
    num_leases: int
    num_sealed_total: int
    num_evicted_total: int
    num_expired_leases_total: int
    num_corrupt_blocks_total: int
    num_disk_blocks: int
    num_held_disk_blocks: int
    num_unwritten_blocks: int
    num_lost_blocks_total: int
    num_disk_errors_total: int
    transport: str
    transport_reason: str
    num_links: int
    memory_reason: str
    disk_reason: str
    def __init__(self, epoch: _Optional[str] = ..., is_draining: _Optional[bool] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_fenced_blocks: _Optional[int] = ..., num_peers: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_sealed_total: _Optional[int] = ..., num_evicted_total: _Optional[int] = ..., num_expired_leases_total: _Optional[int] = ..., num_corrupt_blocks_total: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., num_held_disk_blocks: _Optional[int] = ..., num_unwritten_blocks: _Optional[int] = ..., num_lost_blocks_total: _Optional[int] = ..., num_disk_errors_total: _Optional[int] = ..., transport: _Optional[str] = ..., transport_reason: _Optional[str] = ..., num_links: _Optional[int] = ..., memory_reason: _Optional[str] = ..., disk_reason: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("peer_id",)
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    def __init__(self, peer_id: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("agent_metadata", "blocks_address", "generations_address", "transport")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    blocks_address: int
    generations_address: int
    transport: str
    def __init__(self, agent_metadata: _Optional[bytes] = ..., blocks_address: _Optional[int] = ..., generations_address: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "is_snapshot_start", "sealed_keys", "removed_keys")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_START_FIELD_NUMBER: _ClassVar[int]
    SEALED_KEYS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    is_snapshot_start: bool
    sealed_keys: _containers.RepeatedScalarFieldContainer[bytes]
    removed_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., is_snapshot_start: _Optional[bool] = ..., sealed_keys: _Optional[_Iterable[bytes]] = ..., removed_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...
