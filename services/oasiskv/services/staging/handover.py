"""Gives what a draining service holds in memory to another one, so that its readers need not compute it again."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from oasiskv.core.errors import CorruptBlockError, OasisError
from oasiskv.core.service_config import TlsConfig
from oasiskv.protos.staging.v1 import staging_pb2 as pb
from oasiskv.services.clients.staging import StagingClient
from oasiskv.services.rpc.server import MESSAGE_OVERHEAD_BYTES
from oasiskv.services.staging.service import StagingService

logger = logging.getLogger(__name__)
BATCH_BYTES = 32 * 2**20
TTL_MS = 60_000


async def hand_over(service: StagingService, address: str, tls: TlsConfig | None) -> int:
    """Stage the sealed blocks in memory at another service, those used last first; return how many it took.

    Ends early, with a line in the log, when that service has no more room or does not answer. Readers of this service
    are served meanwhile, and nothing here changes.

    Args:
        service: The one that drains.
        address: `host:port` of the other.
        tls: Certificate of this process, as for its own port.
    """
    shape = service.config.fingerprint
    message_bytes = max(4 * 2**20, shape.part_bytes + MESSAGE_OVERHEAD_BYTES)
    step = max(1, BATCH_BYTES // shape.block_bytes)
    num_taken = 0
    async with StagingClient(address, tls=tls, max_message_bytes=message_bytes) as client:
        try:
            request = pb.RegisterPeerRequest(
                fingerprint=pb.Fingerprint(**asdict(shape)), name="draining staging", access=pb.ACCESS_STREAM
            )
            peer_id: str = (await client.call(client.stub.RegisterPeer, request)).peer_id
            keys = service.leases.blocks.sealed_keys()
            for start in range(0, len(keys), step):
                num_taken += await _stage(service, client, peer_id, keys[start : start + step])
        except OasisError as error:
            logger.warning("%s took %d blocks and no more: %s", address, num_taken, error)
            return num_taken
    logger.info("%s took %d blocks", address, num_taken)
    return num_taken


async def _stage(service: StagingService, client: StagingClient, peer_id: str, block_keys: Sequence[bytes]) -> int:
    located = await client.call(client.stub.Locate, pb.LocateRequest(peer_id=peer_id, block_keys=block_keys))
    wanted = [key for key, tier in zip(block_keys, located.tiers, strict=True) if not tier]
    with service.leases.temporary_owner() as owner:
        # Each for itself: one may have been evicted since.
        keys = [key for key in wanted if service.leases.find(key) is not None]
        block_ids = service.leases.blocks.adopt(owner, keys)
        if not keys:
            return 0
        request = pb.AllocateRequest(peer_id=peer_id, num_blocks=len(keys), ttl_ms=TTL_MS)
        lease_id: str = (await client.call(client.stub.Allocate, request)).lease_id
        try:

            def parts() -> Iterator[tuple[int, int, bytes]]:
                for index, block_id in enumerate(block_ids):
                    for part in range(service.config.fingerprint.num_parts):
                        yield index, part, service.memory.parts[block_id, part].tobytes()

            await client.put(peer_id, lease_id, parts())
            num_taken = 0
            for index, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
                # The checksums of its writer: what has changed here since is refused there.
                sums = service.memory.checksums[block_id].tolist()
                block = pb.SealedBlock(block_index=index, block_key=key, checksums=sums)
                seal = pb.SealRequest(peer_id=peer_id, lease_id=lease_id, blocks=[block])
                try:
                    await client.call(client.stub.Seal, seal)
                    num_taken += 1
                except CorruptBlockError as error:
                    logger.error("a block is not handed over: %s", error)
            return num_taken
        finally:
            release = pb.ReleaseRequest(peer_id=peer_id, lease_ids=[lease_id])
            await asyncio.shield(client.call(client.stub.Release, release))
