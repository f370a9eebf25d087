"""vLLM's entry point to OasisKV: makes the connector and the KV cache spec known in every process, and nothing else.

A server without OasisKV's connector in its configuration runs stock vLLM. What switches the backend on in a worker is
the worker class, see `worker`.
"""

import logging

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
    _share_log()
    _is_registered = True


def _share_log() -> None:
    """Send what OasisKV logs where vLLM's own log goes, at the same level."""
    ours, theirs = logging.getLogger("oasiskv"), logging.getLogger("vllm")
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        ours.addHandler(handler)
