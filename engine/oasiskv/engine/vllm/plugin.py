"""vLLM's entry point to OasisKV: makes the connector and the KV cache spec known in every process, and nothing else.

A server without OasisKV's connector in its configuration runs stock vLLM. What switches the backend on in a worker is
the worker class, see `worker`.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from oasiskv.engine.vllm import manager
from oasiskv.engine.vllm.settings import CONNECTOR

_is_registered = False


def register() -> None:
    """Register with vLLM; safe to call again."""
    global _is_registered
    if _is_registered:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "oasiskv.engine.vllm.connector", CONNECTOR)
    manager.install()
    _is_registered = True
