"""Runs the prefill service: `python -m oasiskv.services.prefill --config FILE`; prints the port once it listens."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path

from oasiskv.core.errors import ConfigError, OasisError
from oasiskv.core.service_config import PrefillConfig, read_services
from oasiskv.engine.vllm.served import ServedEngine
from oasiskv.protos.prefill.v1 import prefill_pb2_grpc
from oasiskv.services.clients.link import StagingLink
from oasiskv.services.clients.session import SessionConfig
from oasiskv.services.prefill.metrics import PrefillCollector
from oasiskv.services.prefill.service import PrefillService
from oasiskv.services.prefill.servicer import SERVICE_NAME, PrefillServicer
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.serving import Front, cancelled, serve, signals
from oasiskv.services.tracing import start_tracing

MESSAGE_BYTES = 64 * 2**20
"""A prompt of ten million tokens."""


async def run(config: PrefillConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is under way.

    Raises:
        OasisError: The engine did not start or ended by itself, or an address cannot be had.
    """
    received = signals()
    async with contextlib.AsyncExitStack() as resources:
        front = Front("prefill", config.metrics_address)
        resources.push_async_callback(front.close)
        engine = await ServedEngine.start(config.engine, config.fingerprint)
        resources.callback(engine.stop)
        session = SessionConfig(
            address=config.staging,
            fingerprint=config.fingerprint,
            name=f"prefill-{os.getpid()}",
            may_write=True,
            tls=config.tls,
            ttl_s=config.handle_ttl_s,
        )
        link = StagingLink(session, engine.attach_staging)
        await resources.enter_async_context(cancelled(link.run()))
        service = PrefillService(config, engine, link)
        front.serve(service, PrefillCollector(config, service))
        servicer = PrefillServicer(service, config.staging, round(config.handle_ttl_s * 1000), config.revision)
        listen = ServerConfig(
            address=config.address, tls=config.tls, max_call_s=config.max_call_s, max_message_bytes=MESSAGE_BYTES
        )
        server = await RpcServer.start(
            listen,
            lambda it: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, it),
            (SERVICE_NAME,),
            metrics=front.metrics,
        )
        resources.push_async_callback(server.stop, grace_s=1.0)
        await server.set_serving(False)
        print(f"oasiskv prefill listens on port {server.port}{front.where}", flush=True)
        await serve(service, (server,), received, config.drain_s)


def main() -> int:
    """Read the configuration and serve."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.services.prefill", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    path: Path = parser.parse_args().config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = read_services(path.read_text()).prefill
        if config is None:
            raise ConfigError(f"prefill: expected this table in {path}, got none")
        start_tracing("oasiskv-prefill")
        asyncio.run(run(config))
    except (OasisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
