"""The plain HTTP port: what its probes say of a process that starts, serves, is stuck, or is gone."""

import asyncio
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from oasiskv.core.errors import ConfigError
from oasiskv.services.rpc import status_port
from oasiskv.services.rpc.status_port import Status, StatusPort


def ask(port: int, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


@pytest.mark.parametrize(
    ("is_alive", "is_ready", "codes"), [(True, True, (200, 200)), (True, False, (200, 503)), (False, True, (503, 503))]
)
def test_probes_say_whether_a_process_is_alive_and_ready(
    is_alive: bool, is_ready: bool, codes: tuple[int, int]
) -> None:
    async def scenario() -> None:
        registry = CollectorRegistry()
        Gauge("toy", "A toy", registry=registry).set(3)
        status = Status(is_alive=is_alive, is_ready=is_ready, facts={"role": "toy", "reasons": ["x"]})
        port = StatusPort("127.0.0.1:0", registry, lambda: status)
        try:
            got = [await asyncio.to_thread(ask, port.port, path) for path in ("/livez", "/readyz")]
            assert tuple(code for code, _ in got) == codes
            assert json.loads(got[1][1]) == {
                "is_alive": is_alive,
                "is_ready": is_ready,
                "role": "toy",
                "reasons": ["x"],
            }
            assert "toy 3.0" in (await asyncio.to_thread(ask, port.port, "/metrics"))[1]
            assert (await asyncio.to_thread(ask, port.port, "/other"))[0] == 404
        finally:
            await asyncio.to_thread(port.close)

    asyncio.run(scenario())


def test_a_stuck_event_loop_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_port, "ANSWER_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        status = Status(is_alive=True, is_ready=True, facts={})
        port = StatusPort("127.0.0.1:0", CollectorRegistry(), lambda: status)
        with ThreadPoolExecutor(1) as thread:
            code, body = thread.submit(ask, port.port, "/livez").result(20)  # keeps the loop from doing anything
        assert code == 503
        assert "did not answer" in json.loads(body)["reasons"][0]
        await asyncio.to_thread(port.close)

    asyncio.run(scenario())


def test_an_address_that_cannot_be_had_is_refused_and_a_closed_port_is_free() -> None:
    async def scenario() -> None:
        status = Status(is_alive=True, is_ready=True, facts={})
        port = StatusPort("127.0.0.1:0", CollectorRegistry(), lambda: status)
        address = f"127.0.0.1:{port.port}"
        for wrong in (address, "127.0.0.1:x", "127.0.0.1"):
            with pytest.raises(ConfigError, match=r"^metrics_address"):
                StatusPort(wrong, CollectorRegistry(), lambda: status)
        port.close()
        StatusPort(address, CollectorRegistry(), lambda: status).close()

    asyncio.run(scenario())
