"""Speaks to the API server. Every answer that is no success is one of the errors here, by what can be done about it."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, ClassVar

import aiohttp
import kopf

Object = Mapping[str, Any]
MANAGER = "oasiskv-operator"
"""Owner of the fields that the operator writes."""
PAGE = 500
"""Objects per answer to a list."""
TIMEOUT_S = 15
WATCH_S, IDLE_S = 240, 100
"""Longest watch, and longest silence in one: the API server says something every minute."""
TYPED = "failed to create typed patch object"
"""Said, with code 500, of an object with a field that the installed definition of its kind does not have."""
TOKEN_S = 60
"""How long a token is used before its file is read again."""


class ApiError(Exception):
    """The API server did not do what was asked."""

    retryable: ClassVar[bool] = False
    """Whether the same request may succeed later."""


class NotFoundError(ApiError):
    """There is no such object, or no such kind."""


class ConflictError(ApiError):
    """Somebody else was quicker; what was read is old."""

    retryable = True


class ExpiredError(ApiError):
    """The API server no longer knows the version from which to go on; list again."""

    retryable = True


class RefusedError(ApiError):
    """A rule, a role, a quota or an admission webhook forbids it; the same request will be refused again."""


class BusyError(ApiError):
    """The API server is overloaded, broken or not reachable."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def login() -> kopf.ConnectionInfo:
    """Return where the API server is and who asks: the pod's service account, else what KUBECONFIG names.

    Raises:
        BusyError: There is neither.
    """
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if not isinstance(found, kopf.ConnectionInfo):
        raise BusyError("KUBECONFIG: expected a file, or a service account in a pod, got neither")
    return found


class Client:
    """Requests to one API server.

    Args:
        connect: Returns where it is and with what token; called again now and then, since tokens change.
        count: Called with verb and status of every request that was answered.
    """

    def __init__(
        self,
        connect: Callable[[], kopf.ConnectionInfo] = login,
        count: Callable[[str, int], None] = lambda verb, status: None,
    ) -> None:
        self._connect, self._count = connect, count
        connection = connect()
        self._server = connection.server.rstrip("/")
        self._headers, self._headers_end_s = connection.as_http_headers(), time.monotonic() + TOKEN_S
        connector = aiohttp.TCPConnector(ssl=connection.as_ssl_context())
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        """Return an object."""
        return await self._request("GET", path, params=params)

    async def pages(self, path: str, selector: str = "") -> AsyncIterator[dict[str, Any]]:
        """Return all objects of a path, page by page, as lists."""
        params = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._request("GET", path, params=params)
            yield page
            if not page["metadata"].get("continue"):
                return
            params["continue"] = page["metadata"]["continue"]

    async def watch(self, path: str, version: str, selector: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Return what happens from a version on, bookmarks too, until the API server ends the watch."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=IDLE_S)
        rest = b""
        async with self._send("GET", path, params=params, timeout=timeout) as response:
            await _check(response, "GET", path)
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(event["object"].get("code", 500), event["object"], f"watch of {path}", 0.0)
                    yield event

    async def apply(self, path: str, made: Object) -> dict[str, Any]:
        """Write the fields of an object by server-side apply, whoever wrote them before."""
        params = {"fieldManager": MANAGER, "force": "true"}
        headers = {"Content-Type": "application/apply-patch+yaml"}
        return await self._request("PATCH", path, params=params, data=json.dumps(made), headers=headers)

    async def create(self, path: str, made: Object) -> dict[str, Any]:
        """Make an object."""
        return await self._request("POST", path, json=made)

    async def update(self, path: str, made: Object) -> dict[str, Any]:
        """Replace an object; its version must be the one that was read."""
        return await self._request("PUT", path, params={"fieldManager": MANAGER}, json=made)

    async def change(self, path: str, change: Object) -> dict[str, Any]:
        """Set some fields of an object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        return await self._request("PATCH", path, data=json.dumps(change), headers=headers)

    async def delete(self, path: str, uid: str) -> None:
        """Delete an object if it still is the one with that uid, and afterwards what it owns."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        await self._request("DELETE", path, json=options)

    def _send(self, verb: str, path: str, **arguments: Any) -> Any:
        if time.monotonic() > self._headers_end_s:
            self._headers, self._headers_end_s = self._connect().as_http_headers(), time.monotonic() + TOKEN_S
        arguments["headers"] = self._headers | arguments.get("headers", {})
        return _Sent(self._session.request(verb, self._server + path, **arguments), verb, self._count, path)

    async def _request(self, verb: str, path: str, **arguments: Any) -> dict[str, Any]:
        arguments.setdefault("timeout", aiohttp.ClientTimeout(total=TIMEOUT_S))
        async with self._send(verb, path, **arguments) as response:
            await _check(response, verb, path)
            made: dict[str, Any] = json.loads(await response.read())
            return made


class _Sent:
    """A request under way; an answer that does not come is a `BusyError`."""

    def __init__(self, context: Any, verb: str, count: Callable[[str, int], None], path: str) -> None:
        self._context, self._verb, self._count, self._path = context, verb, count, path

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
        except (aiohttp.ClientError, TimeoutError, OSError) as cause:
            raise self._lost(cause) from cause
        self._count(self._verb, response.status)
        return response

    async def __aexit__(self, kind: Any, cause: BaseException | None, trace: Any) -> None:
        await self._context.__aexit__(kind, cause, trace)
        if isinstance(cause, aiohttp.ClientError | TimeoutError | OSError):
            raise self._lost(cause) from cause

    def _lost(self, cause: BaseException) -> BusyError:
        return BusyError(f"{self._verb} {self._path}: expected an answer, got {type(cause).__name__}: {cause}")


async def _check(response: aiohttp.ClientResponse, verb: str, path: str) -> None:
    if response.status < 300:
        return
    text = await response.text()
    try:
        status = json.loads(text)
    except ValueError:
        status = {"message": text[:500]}
    try:
        retry_after_s = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        retry_after_s = 0.0
    raise _error(response.status, status, f"{verb} {path}", retry_after_s)


def _error(code: int, status: Any, what: str, retry_after_s: float) -> ApiError:
    said = status.get("message", "") if isinstance(status, dict) else str(status)
    message = f"{what}: expected success, got {code}: {said}"
    # 410 is for lists and watches. 401 passes when the token has been read again.
    kinds: dict[int, type[ApiError]] = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}
    if code in kinds:
        return kinds[code](message)
    if code == 500 and TYPED in message:
        return RefusedError(message)
    if code in (401, 429) or code >= 500:
        return BusyError(message, retry_after_s)
    return RefusedError(message)


async def pause(seconds: float, stop: asyncio.Event) -> bool:
    """Wait, but no longer than until `stop`; return whether it was set."""
    try:
        # Not `wait_for`, which up to Python 3.11 loses a cancellation that comes together with the event.
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
