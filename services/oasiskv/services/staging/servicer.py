"""Translates between the messages of the staging contract and `service`; decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np

from oasiskv.core.errors import ConfigError, InvalidRequestError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.tiers import BlockStatus, Tier
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.protos.staging.v1 import staging_pb2_grpc
from oasiskv.services.rpc.callers import require_operator
from oasiskv.services.staging.data_plane import DataPlane, until_ended
from oasiskv.services.staging.keys import MAX_KEYS, Tenants, check_count, check_keys
from oasiskv.services.staging.service import Access, Part, PartRange, SealRequest, StagingService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Staging"].full_name
UNLIMITED = frozenset({f"/{SERVICE_NAME}/Watch", f"/{SERVICE_NAME}/Attach"})
# What a writer that is gone has sent may still be in the network or in this host's buffers.
LATE_WRITE_S = 1.0
ACCESS = {
    pb.ACCESS_STREAM: Access.STREAM,
    pb.ACCESS_MAP_READ: Access.MAP_READ,
    pb.ACCESS_MAP_WRITE: Access.MAP_WRITE,
}
TIERS = {None: pb.TIER_UNSPECIFIED, Tier.HOST: pb.TIER_HOST, Tier.DISK: pb.TIER_DISK}
STATUSES = {
    BlockStatus.INTACT: pb.BLOCK_STATUS_INTACT,
    BlockStatus.ABSENT: pb.BLOCK_STATUS_ABSENT,
    BlockStatus.NOT_READ: pb.BLOCK_STATUS_NOT_READ,
    BlockStatus.IO_ERROR: pb.BLOCK_STATUS_IO_ERROR,
    BlockStatus.CORRUPT: pb.BLOCK_STATUS_CORRUPT,
}
Context = grpc.aio.ServicerContext[Any, Any]


def add_to_server(service: StagingService, data_plane: DataPlane, server: grpc.aio.Server) -> None:
    """Let a server answer for a service."""
    staging_pb2_grpc.add_StagingServicer_to_server(StagingServicer(service, data_plane), server)


class StagingServicer(staging_pb2_grpc.StagingServicer):
    """One method per call; `EdgeInterceptor` turns what they raise into status codes."""

    def __init__(self, service: StagingService, data_plane: DataPlane) -> None:
        self._service = service
        self._data_plane = data_plane
        self._leases = service.leases
        self._tenants = Tenants(service.config.tenants)

    async def RegisterPeer(self, request: pb.RegisterPeerRequest, context: Context) -> pb.RegisterPeerResponse:
        if request.access not in ACCESS:
            raise InvalidRequestError(f"access: expected one of Access, got {request.access}")
        access = ACCESS[request.access]
        peer_id = self._service.register_peer(_fingerprint(request.fingerprint), request.name, access)
        config = self._service.config
        return pb.RegisterPeerResponse(
            peer_id=peer_id,
            peer_ttl_ms=_ms(config.leases.peer_ttl_s),
            max_lease_ttl_ms=_ms(config.leases.max_ttl_s),
            max_blocks=config.leases.max_blocks_per_peer,
            memory_socket=config.memory_socket if access is not Access.STREAM and config.hands_memory_over else "",
            num_blocks=config.leases.num_blocks,
            block_bytes=config.fingerprint.block_bytes,
            num_parts=config.fingerprint.num_parts,
            part_bytes=config.fingerprint.part_bytes,
            epoch=self._service.epoch,
        )

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        ttl_s = request.ttl_ms / 1000
        keys = request.block_keys
        lease_id, block_ids = await self._service.allocate(request.peer_id, request.num_blocks, ttl_s, keys)
        num_held = sum(self._service.leases.is_sealed(block_id) for block_id in block_ids)
        return pb.AllocateResponse(
            lease_id=lease_id, ttl_ms=self._granted_ms(ttl_s), block_ids=block_ids, num_held_blocks=num_held
        )

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:
        # Before anything is made of them: what a message has room for would keep everybody waiting for seconds.
        num_blocks = len(self._leases.writable(request.peer_id, request.lease_id))
        check_count("blocks", len(request.blocks) + len(request.columns.block_indices), num_blocks)
        blocks = [
            SealRequest(block_index=block.block_index, block_key=key, checksums=block.checksums)
            for block, key in zip(
                request.blocks, self._inside(context, [one.block_key for one in request.blocks]), strict=True
            )
        ]
        if request.HasField("columns"):
            blocks += self._from_columns(request.columns, self._inside(context, request.columns.block_keys))
        return pb.SealResponse(block_ids=await self._service.seal(request.peer_id, request.lease_id, blocks))

    async def Locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        held = self._service.locate(request.peer_id, self._inside(context, request.block_keys))
        return pb.LocateResponse(tiers=[TIERS[tier] for tier in held])

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        ttl_s = request.ttl_ms / 1000
        statuses: list[BlockStatus] = []
        match request.WhichOneof("blocks"):
            case "keys":
                keys = self._inside(context, request.keys.block_keys)
                lease_id, block_ids, statuses = await self._service.lease(
                    request.peer_id, keys, request.min_blocks, ttl_s, request.wait_blocks
                )
            case "handle":
                lease_id, block_ids = self._leases.accept(request.peer_id, request.handle, request.min_blocks, ttl_s)
            case _:
                raise InvalidRequestError("blocks: expected keys or a handle, got neither")
        return pb.LeaseResponse(
            lease_id=lease_id,
            ttl_ms=self._granted_ms(ttl_s),
            num_blocks=len(block_ids),
            block_statuses=[STATUSES[status] for status in statuses],
        )

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        ttl_s = request.ttl_ms / 1000
        lost = self._leases.renew(request.peer_id, request.lease_ids or None, ttl_s)
        return pb.RenewResponse(ttl_ms=self._granted_ms(ttl_s), lost_lease_ids=lost)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        num_released = self._leases.release(request.peer_id, request.lease_ids, request.handles)
        return pb.ReleaseResponse(num_released=num_released)

    async def FetchDescriptors(
        self, request: pb.FetchDescriptorsRequest, context: Context
    ) -> pb.FetchDescriptorsResponse:
        num_blocks = len(self._leases.readable(request.peer_id, request.lease_id))
        check_count("block_indices", len(request.block_indices), num_blocks)
        found = self._service.describe(request.peer_id, request.lease_id, request.block_indices)
        if request.in_columns:
            columns = pb.BlockColumns(
                block_ids=found.block_ids.astype("<u8").tobytes(),
                generations=found.generations.astype("<u8").tobytes(),
                checksums=found.checksums.astype("<u8").tobytes(),
            )
            return pb.FetchDescriptorsResponse(columns=columns)
        rows = zip(
            found.block_indices,
            found.block_ids.tolist(),
            found.generations.tolist(),
            found.checksums.tolist(),
            strict=True,
        )
        return pb.FetchDescriptorsResponse(
            blocks=[
                pb.BlockDescriptor(block_index=index, block_id=block_id, generation=generation, checksums=sums)
                for index, block_id, generation, sums in rows
            ]
        )

    async def Handoff(self, request: pb.HandoffRequest, context: Context) -> pb.HandoffResponse:
        ttl_s = request.ttl_ms / 1000
        handle = self._leases.offer(request.peer_id, request.lease_id, ttl_s)
        return pb.HandoffResponse(handle=handle, ttl_ms=self._granted_ms(ttl_s))

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutResponse:
        owner: tuple[str, str] | None = None
        num_parts = 0
        async for request in requests:
            given = (request.peer_id, request.lease_id)
            owner = owner or given
            if given not in (owner, ("", "")):
                raise InvalidRequestError("lease_id: expected that of the first message, got another")
            part = Part(
                block_index=request.block_index, part=request.part, data=request.data, checksum=request.checksum
            )
            self._service.put(*owner, part)
            num_parts += 1
        return pb.PutResponse(num_parts=num_parts)

    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetResponse]:
        check_count("ranges", len(request.ranges), MAX_KEYS)
        ranges = [
            PartRange(block_index=wanted.block_index, first_part=wanted.first_part, num_parts=wanted.num_parts)
            for wanted in request.ranges
        ]
        async for part in self._service.get(request.peer_id, request.lease_id, ranges):
            yield pb.GetResponse(block_index=part.block_index, part=part.part, data=part.data, checksum=part.checksum)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        require_operator(context, self._service.config.drained_by)
        return pb.DrainResponse(num_leases=self._service.drain())

    async def Find(self, request: pb.FindRequest, context: Context) -> pb.FindResponse:
        check_keys(request.block_keys)
        holders, is_complete = await self._service.directory.find(self._inside(context, request.block_keys))
        return pb.FindResponse(
            holders=[
                pb.Holder(
                    service_id=holder.service_id,
                    address=holder.address,
                    num_prefix_blocks=holder.num_prefix_blocks,
                    num_blocks=holder.load.num_blocks,
                    num_free_blocks=holder.load.num_free_blocks,
                    num_leases=holder.load.num_leases,
                    is_draining=holder.load.is_draining,
                )
                for holder in holders
            ],
            is_complete=is_complete,
        )

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        self._leases.expire()
        counts = self._leases.counts()
        tiers = self._service.tiers
        return pb.StatsResponse(
            epoch=self._service.epoch,
            is_draining=self._service.is_draining,
            num_blocks=self._service.config.leases.num_blocks,
            num_free_blocks=self._leases.num_free,
            num_cached_blocks=self._leases.num_cached,
            num_fenced_blocks=counts.num_fenced_blocks,
            num_peers=counts.num_peers,
            num_leases=counts.num_leases,
            num_sealed_total=tiers.num_sealed,
            num_evicted_total=tiers.num_left - self._service.num_corrupt_blocks,
            num_expired_leases_total=counts.num_expired_total,
            num_corrupt_blocks_total=self._service.num_corrupt_blocks,
            transport=self._data_plane.transport.name,
            transport_reason=self._data_plane.transport.reason,
            num_links=counts.num_links,
            memory_reason=self._service.memory.reason,
            disk_reason=self._service.disk_tier.reason if self._service.disk_tier else "",
            num_disk_blocks=tiers.disk.num_slots,
            num_held_disk_blocks=tiers.disk.num_held,
            num_unwritten_blocks=tiers.num_unwritten,
            num_lost_blocks_total=tiers.num_lost,
            num_disk_errors_total=self._service.num_disk_errors,
        )

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.AttachResponse]:
        self._service.require_mapping(request.peer_id)  # before somebody else can make a process start
        offer = await self._data_plane.offer()
        may_write = self._service.open_link(request.peer_id)
        try:
            yield pb.AttachResponse(
                agent_metadata=offer.metadata,
                blocks_address=offer.blocks_address,
                generations_address=offer.generations_address,
                transport=self._data_plane.transport.name,
            )
            await until_ended(offer)
        finally:
            loop = asyncio.get_running_loop()
            loop.call_later(LATE_WRITE_S if may_write else 0.0, self._leases.close_link, request.peer_id)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        changes, prefix = self._service.changes, self._prefix(context)
        sequence = request.sequence if request.epoch == self._service.epoch else None
        while True:
            for change in changes.after(sequence):
                yield pb.WatchResponse(
                    epoch=self._service.epoch,
                    sequence=change.sequence,
                    is_snapshot_start=change.is_snapshot_start,
                    sealed_keys=self._tenants.outside(prefix, change.sealed_keys),
                    removed_keys=self._tenants.outside(prefix, change.removed_keys),
                )
                sequence = change.sequence
            if sequence is not None:
                await changes.wait(sequence)

    def _prefix(self, context: Context) -> bytes:
        return self._tenants.prefix(context.auth_context().get("x509_common_name"))

    def _inside(self, context: Context, block_keys: Sequence[bytes]) -> Sequence[bytes]:
        return self._tenants.inside(self._prefix(context), block_keys)

    def _from_columns(self, columns: pb.SealedColumns, block_keys: Sequence[bytes]) -> list[SealRequest]:
        num_parts = self._service.config.fingerprint.num_parts
        num_blocks = len(columns.block_indices)
        if len(block_keys) != num_blocks:
            raise InvalidRequestError(f"block_keys: expected {num_blocks}, got {len(block_keys)}")
        if len(columns.checksums) != num_blocks * num_parts * 8:
            expected = num_blocks * num_parts * 8
            raise InvalidRequestError(f"checksums: expected {expected} bytes, got {len(columns.checksums)}")
        sums = np.frombuffer(columns.checksums, "<u8").astype(np.uint64).reshape(num_blocks, num_parts)
        return [
            SealRequest(block_index=block_index, block_key=block_key, checksums=row)
            for block_index, block_key, row in zip(columns.block_indices, block_keys, sums, strict=True)
        ]

    def _granted_ms(self, ttl_s: float) -> int:
        return _ms(self._service.config.leases.granted_ttl(ttl_s))


def _fingerprint(message: pb.Fingerprint) -> Fingerprint:
    try:
        return Fingerprint(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})
    except ConfigError as error:
        raise InvalidRequestError(f"fingerprint.{error}") from error


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
