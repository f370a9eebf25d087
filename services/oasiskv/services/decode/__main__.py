"""Runs the decode service: `python -m oasiskv.services.decode --config FILE`; prints the ports once it listens."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from oasiskv.core.errors import ConfigError, OasisError
from oasiskv.core.service_config import DecodeConfig, read_services
from oasiskv.engine.vllm.handover_core import HandoverCore
from oasiskv.engine.vllm.http import http_server
from oasiskv.engine.vllm.served import ServedEngine
from oasiskv.engine.vllm.settings import sparse_layout
from oasiskv.protos.decode.v1 import decode_pb2_grpc
from oasiskv.protos.inference.v2 import inference_pb2_grpc
from oasiskv.services.clients.link import StagingLink, StagingLinks
from oasiskv.services.clients.session import SessionConfig
from oasiskv.services.decode.metrics import DecodeCollector
from oasiskv.services.decode.oip import Oip
from oasiskv.services.decode.oip_grpc import SERVICE_NAME as OIP_SERVICE_NAME
from oasiskv.services.decode.oip_grpc import OipServicer
from oasiskv.services.decode.oip_rest import router as router_of
from oasiskv.services.decode.router import Router
from oasiskv.services.decode.service import DecodeService
from oasiskv.services.decode.servicer import SERVICE_NAME, DecodeServicer
from oasiskv.services.rpc.server import RpcServer, ServerConfig
from oasiskv.services.serving import Front, cancelled, serve, signals
from oasiskv.services.tracing import start_tracing

MESSAGE_BYTES = 64 * 2**20
"""A prompt of ten million tokens."""


async def run(config: DecodeConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is under way.

    Raises:
        OasisError: The engine did not start or ended by itself, or an address cannot be had.
    """
    received = signals()
    router = Router(config)
    kv = config.fingerprint
    layout = sparse_layout(config.engine.lookahead, kv.block_size, kv.head_dim, kv.dtype_bytes)

    def is_long(num_tokens: int) -> bool:
        can_be_sparse = layout.may_switch(num_tokens // config.fingerprint.block_size)
        return can_be_sparse and num_tokens > config.local_prompt_tokens

    async with contextlib.AsyncExitStack() as resources:
        front = Front("decode", config.metrics_address)
        resources.push_async_callback(front.close)
        engine = await ServedEngine.start(
            config.engine,
            config.fingerprint,
            # Without prefill services vLLM's own client stays in its place.
            (lambda core: HandoverCore(core, router, is_long)) if config.prefills else None,
        )
        resources.callback(engine.stop)
        if config.prefills:
            router.read_probe = engine.read_probe
            router.links = StagingLinks(partial(_link, config, engine))
            await resources.enter_async_context(cancelled(router.run()))
        service = DecodeService(config, engine, router)
        front.serve(service, DecodeCollector(config, service, router))
        servicer = DecodeServicer(service, router, config.revision)
        listen = ServerConfig(
            address=config.address, tls=config.tls, max_call_s=config.max_call_s, max_message_bytes=MESSAGE_BYTES
        )
        server = await RpcServer.start(
            listen,
            lambda it: decode_pb2_grpc.add_DecodeServicer_to_server(servicer, it),
            (SERVICE_NAME,),
            metrics=front.metrics,
        )
        resources.push_async_callback(server.stop, grace_s=1.0)
        oip = Oip(service, config.model_name or config.engine.model, config.max_call_s)
        servers, where = [server], ""
        if config.oip_address:
            plain = replace(listen, address=config.oip_address, tls=None)
            servers.append(await _serve_oip(plain, oip, front))
            resources.push_async_callback(servers[1].stop, grace_s=1.0)
            where = f", OIP on port {servers[1].port}"
        for each in servers:
            await each.set_serving(False)
        http = http_server(
            engine,
            config.http_address,
            service.check_room,
            model_name=config.model_name,
            arguments=config.http_arguments,
            routers=(router_of(oip),),
        )
        http_port = await resources.enter_async_context(http)
        print(f"oasiskv decode listens on port {server.port}, HTTP on port {http_port}{where}{front.where}", flush=True)
        await serve(service, servers, received, config.drain_s)


def _link(config: DecodeConfig, engine: ServedEngine, address: str) -> StagingLink:
    """Return the engine's link to a staging service, whose address is its name among the ways of the workers."""
    session = SessionConfig(
        address=address,
        fingerprint=config.fingerprint,
        name=f"decode-{os.getpid()}",
        may_write=False,
        tls=config.tls,
    )
    return StagingLink(session, partial(engine.attach_staging, way=address))


async def _serve_oip(listen: ServerConfig, oip: Oip, front: Front) -> RpcServer:
    """Answer the Open Inference Protocol over gRPC."""
    servicer = OipServicer(oip)
    return await RpcServer.start(
        listen,
        lambda it: inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, it),
        (OIP_SERVICE_NAME,),
        metrics=front.metrics,
    )


def main() -> int:
    """Read the configuration and serve."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.services.decode", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file")
    path: Path = parser.parse_args().config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = read_services(path.read_text()).decode
        if config is None:
            raise ConfigError(f"decode: expected this table in {path}, got none")
        start_tracing("oasiskv-decode")
        asyncio.run(run(config))
    except (OasisError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
