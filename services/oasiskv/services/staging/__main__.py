"""Runs the staging tier: `python -m oasiskv.services.staging --config FILE`; prints the port once it answers."""

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oasiskv.core.errors import ConfigError, OasisError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.core.host_memory import check_fits, host_memory_limit
from oasiskv.core.lease_limits import LeaseConfig
from oasiskv.core.service_config import TABLES, TlsConfig, build
from oasiskv.services import rdma
from oasiskv.services.nixl import net_devices
from oasiskv.services.rpc.metrics import ServerMetrics
from oasiskv.services.rpc.server import MESSAGE_OVERHEAD_BYTES, RpcServer, ServerConfig
from oasiskv.services.staging.config import StagingConfig
from oasiskv.services.staging.data_plane import DataPlane
from oasiskv.services.staging.directory import DirectoryConfig
from oasiskv.services.staging.disk_file import DiskConfig, DiskFile
from oasiskv.services.staging.fabric import choose
from oasiskv.services.staging.handover import hand_over
from oasiskv.services.staging.memory import REQUIRED_PAGES, MemorySocket, StagingMemory
from oasiskv.services.staging.metrics import StagingCollector
from oasiskv.services.staging.service import StagingService
from oasiskv.services.staging.servicer import SERVICE_NAME, UNLIMITED, add_to_server
from oasiskv.services.tracing import start_tracing

logger = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005
"""Longest that the event loop waits for a thread that hashes; Python's own 5 ms came before each of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What the configuration file says: tables `staging`, `fingerprint`, `server`; also those of optional parts.

    These are `leases`, `disk`, `directory` and `tls`. A file for all services has tables for the others too, which are
    passed over here.
    """

    staging: StagingConfig
    """What is held, and for whom."""

    server: ServerConfig
    """Where the service listens."""

    host_limit_bytes: int | None = None
    """Most bytes that the pool may take; None for the limit of the control group alone."""

    drain_s: float = 30.0
    """Seconds that leases get to end, and their blocks to reach the disk, after SIGTERM, before they are lost."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: One is out of its range.
        """
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s: expected a number of at least 0, got {self.drain_s}")


def read_config(text: str) -> ProcessConfig:
    """Return the configuration in a TOML text.

    `pool_bytes` of `[staging]` says how much memory the blocks take; their number follows from it. `address` there
    stands for that of `[server]`, as for the other services.

    Raises:
        ConfigError: A table or key is unknown or absent, or a value is wrong; the message names it.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"config: expected TOML, got {cause}") from cause
    for name in sorted(tables.keys() - TABLES):
        raise ConfigError(f"{name}: expected one of the tables {', '.join(sorted(TABLES))}")
    staging = dict(tables.get("staging", {}))
    fingerprint = build(Fingerprint, "fingerprint", tables.get("fingerprint", {}))
    pool_bytes = staging.pop("pool_bytes", None)
    if isinstance(pool_bytes, bool) or not isinstance(pool_bytes, int) or pool_bytes < fingerprint.block_bytes:
        raise ConfigError(
            f"staging.pool_bytes: expected at least one block of {fingerprint.block_bytes} bytes, got {pool_bytes}"
        )
    num_blocks = pool_bytes // fingerprint.block_bytes
    process = {name: staging.pop(name) for name in ("drain_s", "host_limit_bytes") if name in staging}
    leases = build(
        LeaseConfig, "leases", {"max_blocks_per_peer": num_blocks} | tables.get("leases", {}), num_blocks=num_blocks
    )
    files = {name: Path(str(value)) for name, value in tables.get("tls", {}).items()}
    tls = build(TlsConfig, "tls", files) if "tls" in tables else None
    disk = build(DiskConfig, "disk", tables["disk"]) if "disk" in tables else None
    directory = build(DirectoryConfig, "directory", tables["directory"]) if "directory" in tables else None
    # A part and its fields must fit into a message; others are small.
    message_bytes = max(4 * 2**20, fingerprint.part_bytes + MESSAGE_OVERHEAD_BYTES)
    listen = dict(tables.get("server", {}))
    if "address" in staging:
        if "address" in listen:
            raise ConfigError(f"staging.address: expected it without server.address, got {staging['address']!r}")
        listen["address"] = staging.pop("address")
    if staging.get("drained_by") and tls is None:
        raise ConfigError("staging.drained_by: expected [tls], since it names certificates")
    if staging.get("tenants", "one") != "one" and tls is None:
        raise ConfigError("staging.tenants: expected [tls], since a tenant is the name in a certificate")
    server = build(ServerConfig, "server", listen, tls=tls, max_message_bytes=message_bytes)
    held = build(
        StagingConfig, "staging", staging, fingerprint=fingerprint, leases=leases, disk=disk, directory=directory
    )
    return build(ProcessConfig, "staging", process, staging=held, server=server)


async def run(config: ProcessConfig) -> None:
    """Serve until SIGTERM or SIGINT, then let leases end for `drain_s`; a second signal ends that at once.

    Raises:
        ConfigError: The pool does not fit in memory, or what the service needs cannot be had; nothing is held.
    """
    pool_bytes = config.staging.leases.num_blocks * config.staging.fingerprint.block_bytes
    # Pages of these sizes are set aside, and control groups limit them apart from memory.
    if config.staging.huge_pages not in REQUIRED_PAGES:
        check_fits(pool_bytes, host_memory_limit(user_limit_bytes=config.host_limit_bytes))
    stopping: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.put_nowait, number)
    async with contextlib.AsyncExitStack() as resources:
        staging = config.staging
        # Before the memory, which takes a while to touch: a folder that is absent is told at once.
        disk_file = DiskFile.open(staging.disk, staging.fingerprint) if staging.disk is not None else None
        closing_file = resources.enter_context(contextlib.ExitStack())
        if disk_file is not None:
            closing_file.callback(disk_file.close)
        if staging.hands_memory_over and not Path(staging.memory_socket).parent.is_dir():
            raise ConfigError(f"memory_socket: expected a path in a folder, got {staging.memory_socket!r}")
        memory = StagingMemory(staging.fingerprint, staging.leases.num_blocks, staging.huge_pages)
        resources.callback(memory.close)
        logger.info("memory: %s", memory.reason)
        service = StagingService(staging, memory, disk_file=disk_file)
        if service.disk_tier is not None:
            closing_file.pop_all()  # from here on the tier closes it
            resources.push_async_callback(service.disk_tier.stop)
            await service.disk_tier.start()
        resources.push_async_callback(service.wiper.stop)
        service.wiper.start()
        transport = choose(staging.transport, is_strict=staging.is_strict, has_tls=config.server.tls is not None)
        devices = net_devices(config.server.address)
        data_plane = DataPlane(transport, memory, is_remote=staging.locality == "remote", devices=devices)
        resources.push_async_callback(data_plane.stop)
        await data_plane.start()
        if staging.hands_memory_over:
            path = Path(config.staging.memory_socket)
            link = MemorySocket(path, memory, service.open_link, service.leases.close_link)
            await link.start()
            resources.push_async_callback(link.stop)
        server = await RpcServer.start(
            config.server,
            partial(add_to_server, service, data_plane),
            (SERVICE_NAME,),
            UNLIMITED,
            ServerMetrics((StagingCollector(service, data_plane),)),
            partial(_facts, service, data_plane, pool_bytes),
        )
        resources.push_async_callback(server.stop, grace_s=1.0)
        resources.push_async_callback(service.directory.stop)
        await service.directory.start()
        # What is there stays, the index of the disk too: no collection has to walk through it, and stop calls.
        gc.collect()
        gc.freeze()
        print(f"oasiskv staging listens on port {server.port}", flush=True)
        await stopping.get()
        await server.set_serving(False)
        await _drain(service, config, stopping)


def _facts(service: StagingService, data_plane: DataPlane, pool_bytes: int) -> dict[str, Any]:
    """Return what `/readyz` tells."""
    transport = data_plane.transport
    return {
        "role": "staging",
        "is_draining": service.is_draining,
        "num_requests": service.leases.counts().num_leases,
        "reasons": [],
        "rdma": rdma.facts(
            rdma.look(memory_bytes=pool_bytes), "stream" if transport.name == "none" else "one-sided", transport.reason
        ),
    }


async def _drain(service: StagingService, config: ProcessConfig, stopping: "asyncio.Queue[int]") -> None:
    logger.info("draining: %d leases are left", service.drain())
    try:
        async with asyncio.timeout(config.drain_s):
            if config.staging.successor and stopping.empty():
                await _hand_over(service, config, stopping)
            # What the leases held goes to disk, so that it can be found after the start of the next process.
            while (service.drain() or service.tiers.num_unwritten) and stopping.empty():
                await asyncio.sleep(0.1)
    except TimeoutError:
        logger.warning(
            "stopping with %d leases that have not ended and %d blocks that are not on disk",
            service.drain(),
            service.tiers.num_unwritten,
        )


async def _hand_over(service: StagingService, config: ProcessConfig, stopping: "asyncio.Queue[int]") -> None:
    handing_over = asyncio.create_task(hand_over(service, config.staging.successor, config.server.tls))
    try:
        while not handing_over.done() and stopping.empty():
            await asyncio.wait([handing_over], timeout=0.1)
    finally:
        handing_over.cancel()
        await asyncio.wait([handing_over])
    if not handing_over.cancelled() and handing_over.exception() is not None:
        logger.error("what is in memory was not handed over", exc_info=handing_over.exception())


def main() -> int:
    """Read the configuration and serve."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.services.staging", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    path: Path = parser.parse_args().config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        start_tracing("oasiskv-staging")
        asyncio.run(run(read_config(path.read_text())))
    except (OasisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
