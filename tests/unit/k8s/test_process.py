import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from oasiskv.operator import process
from oasiskv.operator.__main__ import main, options
from oasiskv.operator.logs import JsonFormatter
from oasiskv.operator.process import Process
from oasiskv.operator.testing_fake import FakeApi
from oasiskv.operator.web import Web


def test_the_command_line_says_where_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "system")
    made, level = options(["--namespace=a", "--namespace=b", "--namespace=a", "--read-nodes", "--lease=l"])
    assert (made.namespaces, made.reads_nodes, level) == (("a", "b"), True, "info")
    assert (made.lease, made.lease_namespace) == ("l", "system")
    whole, _ = options([])
    assert (whole.namespaces, whole.reads_nodes) == ((), False)
    assert options(["--resync-seconds=5"])[0].kinds_s == 5


def test_without_an_account_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["operator"])
    monkeypatch.setattr("oasiskv.operator.logs.configure", lambda level: None)
    assert main() == 2
    assert capsys.readouterr().err.startswith("error: KUBECONFIG: expected a file")


def test_what_is_logged_is_json_with_its_fields() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "wrote %s", "args": ("x",), "kind": "Pod"})
    said = json.loads(JsonFormatter().format(record))
    assert (said["level"], said["logger"], said["message"], said["kind"]) == ("info", "a", "wrote x", "Pod")
    assert said["time"].endswith("+00:00")
    assert said.keys() == {"time", "level", "logger", "message", "kind"}


def asked(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_says_why_not() -> None:
    async def main() -> None:
        reasons = {"alive": "", "ready": "waits"}
        web = Web(lambda: reasons["alive"], lambda: reasons["ready"], CollectorRegistry())
        (address, *_) = await web.start("127.0.0.1:0")
        assert await asyncio.to_thread(asked, address, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(asked, address, "/readyz") == (503, "waits\n")
        reasons |= {"alive": "stuck", "ready": ""}
        assert await asyncio.to_thread(asked, address, "/healthz") == (503, "stuck\n")
        assert await asyncio.to_thread(asked, address, "/readyz") == (200, "ok\n")
        assert (await asyncio.to_thread(asked, address, "/metrics"))[0] == 200
        await web.stop()

    asyncio.run(main())


def with_process(test: Callable[[Process, FakeApi], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with FakeApi() as api:
            connect = api.client._connect
            monkeypatch.setattr("oasiskv.operator.client.Client.__init__.__defaults__", (connect, lambda *_: None))
            made = Process(options([])[0])
            try:
                await test(made, api)
            finally:
                await made._store.stop()
                await made._asks.close()
                await made._client.close()

    asyncio.run(main())


def test_a_watch_that_says_nothing_for_long_is_no_life(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(made: Process, api: FakeApi) -> None:
        assert made._why_dead() == ""
        made._store.start()
        await made._store.look_for_kinds()
        assert made._why_dead() == ""
        monkeypatch.setattr(process, "STALL_S", -1.0)
        assert made._why_dead().startswith("watch of ConfigMap: expected news within -1 s, got none for")

    with_process(test, monkeypatch)
