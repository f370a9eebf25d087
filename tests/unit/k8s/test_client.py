import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest

from oasiskv.operator import client as client_module
from oasiskv.operator.client import (
    ApiError,
    BusyError,
    Client,
    ConflictError,
    ExpiredError,
    NotFoundError,
    RefusedError,
    login,
)
from oasiskv.operator.reflector import Reflector
from oasiskv.operator.resources import CHILDREN, PODS
from oasiskv.operator.testing_fake import FakeApi

MAPS = CHILDREN["ConfigMap"]


def with_api(test: Callable[[FakeApi], Awaitable[None]]) -> None:
    async def main() -> None:
        async with FakeApi() as api:
            await test(api)

    asyncio.run(main())


def config_map(name: str = "a", value: str = "1", labels: Any = None) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "llm", "labels": labels or {"oasiskv.io/service": "chat"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": value}}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, RefusedError),
        (401, BusyError),
        (403, RefusedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, ExpiredError),
        (422, RefusedError),
        (429, BusyError),
        (500, BusyError),
        (503, BusyError),
    ],
)
def test_each_answer_is_the_error_that_says_what_can_be_done(code: int, kind: type[ApiError]) -> None:
    async def test(api: FakeApi) -> None:
        api.fail("GET", "/configmaps/a", code, headers={"Retry-After": "7"})
        with pytest.raises(kind, match=f"GET .*/configmaps/a: expected success, got {code}: told to fail") as caught:
            await api.client.get(MAPS.path("llm", "a"))
        assert getattr(caught.value, "retry_after_s", 7.0) == 7.0
        assert caught.value.retryable is (kind in (BusyError, ConflictError, ExpiredError))

    with_api(test)


def test_a_field_that_the_installed_definition_lacks_is_refused_and_not_tried_for_ever() -> None:
    error = client_module._error(500, {"message": f"{client_module.TYPED}: .spec.x: field not declared"}, "PATCH x", 0)
    assert isinstance(error, RefusedError)


def test_a_server_that_does_not_answer_is_busy() -> None:
    async def main() -> None:
        gone = Client(lambda: kopf.ConnectionInfo(server="http://127.0.0.1:9"))
        with pytest.raises(BusyError, match="GET /x: expected an answer, got"):
            await gone.get("/x")
        await gone.close()

    asyncio.run(main())


def test_without_an_account_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BusyError, match="KUBECONFIG"):
        login()


def test_requests_are_counted_by_verb_and_answer() -> None:
    async def test(api: FakeApi) -> None:
        counted: list[tuple[str, int]] = []
        server = api.client._server
        client = Client(lambda: kopf.ConnectionInfo(server=server), lambda verb, code: counted.append((verb, code)))
        await client.apply(MAPS.path("llm", "a"), config_map())
        await client.delete(MAPS.path("llm", "a"), "uid-1")
        with pytest.raises(NotFoundError):
            await client.get(MAPS.path("llm", "a"))
        await client.close()
        assert counted == [("PATCH", 200), ("DELETE", 200), ("GET", 404)]

    with_api(test)


class Watched:
    """A reflector that is running, and what it said."""

    def __init__(self, api: FakeApi) -> None:
        self.said: list[tuple[str, str | None, str | None]] = []
        self.reflector = Reflector(
            api.client, MAPS.path(), lambda made: made["data"]["k"], self._changed, MAPS.selector
        )
        self._task = asyncio.create_task(self.reflector.run())

    def _changed(self, key: tuple[str, str], before: str | None, now: str | None) -> None:
        self.said.append((key[1], before, now))

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def test_a_copy_follows_what_happens() -> None:
    async def test(api: FakeApi) -> None:
        api.put(config_map())
        api.put(config_map("other", labels={"app": "x"}))
        watched = Watched(api)
        await watched.reflector.is_synced.wait()
        assert watched.said == [("a", None, "1")]
        api.put(config_map(value="2"))
        api.put(config_map("b", "x" * 300_000))
        await watched.until(lambda: len(watched.said) == 3)
        api.remove(MAPS.path("llm", "a"))
        await watched.until(lambda: len(watched.said) == 4)
        assert watched.said[1:] == [("a", "1", "2"), ("b", None, "x" * 300_000), ("a", "2", None)]
        assert set(watched.reflector.items) == {("llm", "b")}
        await watched.stop()

    with_api(test)


@pytest.mark.parametrize("code", [410, 500, 429, 403])
def test_a_watch_that_fails_misses_nothing(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasiskv.operator.reflector.FIRST_PAUSE_S", 0.01)

    async def test(api: FakeApi) -> None:
        api.put(config_map())
        api.put(config_map("b"))
        watched = Watched(api)
        await watched.reflector.is_synced.wait()
        api.fail("GET", "/configmaps", code, left=2)
        api.cut()
        api.remove(MAPS.path("llm", "a"))
        api.put(config_map("c"))
        await watched.until(lambda: set(watched.reflector.items) == {("llm", "b"), ("llm", "c")})
        assert api.failures[0].left == 0
        await watched.stop()

    with_api(test)


def test_an_answer_to_a_write_counts_at_once_but_does_not_bring_back_what_was_deleted() -> None:
    async def test(api: FakeApi) -> None:
        api.is_silent = True
        watched = Watched(api)
        await watched.reflector.is_synced.wait()
        first = api.put(config_map())
        watched.reflector.put(first)
        assert watched.reflector.items == {("llm", "a"): "1"}
        later = api.put(config_map(value="2"))
        watched.reflector.drop(("llm", "a"), int(later["metadata"]["resourceVersion"]))
        watched.reflector.put(first)
        assert watched.reflector.items == {}
        # What was made again is newer than what was deleted.
        watched.reflector.put(api.put(config_map(value="3")))
        assert watched.reflector.items == {("llm", "a"): "3"}
        watched.reflector.drop(("llm", "a"), 1)
        assert watched.reflector.items == {("llm", "a"): "3"}
        await watched.stop()

    with_api(test)


def test_an_object_that_is_not_understood_does_not_end_the_watch() -> None:
    async def test(api: FakeApi) -> None:
        broken = config_map("broken")
        del broken["data"]
        api.put(broken)
        watched = Watched(api)
        await watched.reflector.is_synced.wait()
        api.put(config_map())
        await watched.until(lambda: watched.said == [("a", None, "1")])
        await watched.stop()

    with_api(test)


def test_a_silent_watch_is_given_up_and_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "IDLE_S", 0.05)
    monkeypatch.setattr("oasiskv.operator.reflector.FIRST_PAUSE_S", 0.01)

    async def test(api: FakeApi) -> None:
        api.is_silent = True
        watched = Watched(api)
        await watched.reflector.is_synced.wait()
        api.put(config_map())
        await watched.until(lambda: len(api.calls) > 3)
        assert watched.said == []
        before_s = watched.reflector.last_news_s
        api.is_silent = False
        await watched.until(lambda: watched.said == [("a", None, "1")])
        assert watched.reflector.last_news_s > before_s
        # Nothing was listed again for it.
        assert sum(call == ("GET", MAPS.path()) for call in api.calls) > 3
        await watched.stop()

    with_api(test)


def test_paths_are_those_of_the_api_server() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert CHILDREN["Deployment"].path("llm", "a", "status") == "/apis/apps/v1/namespaces/llm/deployments/a/status"
