"""vLLM's entry point to OasisKV: makes the connector and the KV cache spec known in every process, and nothing else.

A server without OasisKV's connector in its configuration runs stock vLLM. What switches the backend on in a worker is
the worker class, see `worker`.
"""

import logging

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from oasiskv.engine.vllm import manager
from oasiskv.engine.vllm.names import CONNECTOR

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


class _ToVllm(logging.Handler):
    """Hands records to vLLM's own logger: vLLM may set its level and its handlers after the plugins are loaded."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def _share_log() -> None:
    """Send what OasisKV logs where vLLM's own log goes, at the level that vLLM's has."""
    ours = logging.getLogger("oasiskv")
    ours.setLevel(logging.DEBUG)
    ours.propagate = False
    ours.addHandler(_ToVllm())
