"""An API server in memory that fails as it is told to, for tests of what the operator does about errors."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import kopf
from aiohttp import web

from oasiskv.operator.client import MANAGER, Client
from oasiskv.operator.resources import CHILDREN, EVENTS, LEASES, NODES, PODS, PROFILES, SERVICES

PLURALS = {each.plural: each for each in (SERVICES, PROFILES, PODS, NODES, LEASES, EVENTS, *CHILDREN.values())}


@dataclass(slots=True, kw_only=True)
class Failure:
    """An answer that is no success."""

    verb: str
    part: str
    """Of the path."""
    code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    left: int = 1
    """How often."""


class FakeApi:
    """Keeps objects as they were written; knows neither defaults nor rules, and of selectors only labels that exist."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.failures: list[Failure] = []
        self.calls: list[tuple[str, str]] = []
        """Verb and path of every request."""
        self.groups: set[str] = set()
        """Group and version of the optional kinds that are known."""
        self.is_silent = False
        """Whether watches say nothing."""
        self.version = 0
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._news = asyncio.Event()
        self._num_cuts = 0

    async def __aenter__(self) -> Self:
        """Begin to answer."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.client = Client(lambda: kopf.ConnectionInfo(server=f"http://{host}:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every connection."""
        await self.client.close()
        await self._runner.cleanup()

    def fail(
        self, verb: str, part: str, code: int, left: int = 1, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Answer the next requests with an error."""
        self.failures.append(Failure(verb=verb, part=part, code=code, left=left, headers=headers))

    def put(self, made: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        """Write an object."""
        resource = next(each for each in PLURALS.values() if each.kind == made["kind"])
        path = resource.path(made["metadata"].get("namespace"), made["metadata"]["name"])
        before = self.objects.get(path, {})
        self.version += 1
        metadata = {"uid": f"uid-{self.version}", "generation": 1} | before.get("metadata", {}) | made["metadata"]
        metadata |= {
            "resourceVersion": str(self.version),
            "managedFields": [{"manager": MANAGER, "operation": "Apply", "fieldsV1": {}}],
        }
        parts = {"status": made["status"]} if subresource else made
        self.objects[path] = {**before, **json.loads(json.dumps(parts)), "metadata": metadata}
        self._tell("MODIFIED" if before else "ADDED", path)
        return self.objects[path]

    def remove(self, path: str) -> None:
        """Delete an object."""
        self.version += 1
        self.objects[path]["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", path)
        del self.objects[path]

    def cut(self) -> None:
        """End all watches."""
        self._num_cuts += 1
        self._news.set()

    def _tell(self, kind: str, path: str) -> None:
        self._events.append((self.version, kind, path, json.loads(json.dumps(self.objects[path]))))
        self._news.set()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append((request.method, path))
        for failure in self.failures:
            if failure.left and failure.verb == request.method and failure.part in path:
                failure.left -= 1
                return _status(failure.code, "told to fail", failure.headers)
        match request.method:
            case "GET" if "watch" in request.query:
                return await self._watch(request)
            case "GET":
                return self._get(request)
            case "DELETE" if path in self.objects:
                self.remove(path)
                return web.json_response({"kind": "Status"})
            case "PATCH" if request.content_type == "application/merge-patch+json":
                return web.json_response(self.put({**self.objects[path], **json.loads(await request.read())}))
            case "POST" if f"{path}/{json.loads(await request.read())['metadata']['name']}" in self.objects:
                return _status(409, "already there")
            case "PATCH" | "POST":
                return web.json_response(self.put(json.loads(await request.read())))
            case "PUT":
                return self._update(path, await request.json())
        return _status(404, f"no {path}")

    def _update(self, path: str, made: dict[str, Any]) -> web.Response:
        path, _, subresource = path.partition("/status")
        if path not in self.objects:
            return _status(404, f"no {path}")
        if made["metadata"].get("resourceVersion") != self.objects[path]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return web.json_response(self.put(made, "status" if subresource else ""))

    def _get(self, request: web.Request) -> web.Response:
        path = request.path
        if path in self.objects:
            return web.json_response(self.objects[path])
        if path == "/apis":
            return web.json_response({"groups": [{"versions": [{"groupVersion": each}]} for each in self.groups]})
        if path.removeprefix("/apis/") in self.groups:
            return web.json_response({"resources": [{"name": name} for name in PLURALS]})
        plural = path.rpartition("/")[2]
        if plural not in PLURALS:
            return _status(404, f"no {path}")
        items = [made for key, made in sorted(self.objects.items()) if _is_of(key, made, path, request)]
        resource = PLURALS[plural]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response(
            {"kind": f"{resource.kind}List", "apiVersion": resource.api, "metadata": metadata, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        version, num_cuts = int(request.query["resourceVersion"]), self._num_cuts
        while num_cuts == self._num_cuts:
            self._news.clear()
            for at, kind, path, made in list(self._events):
                if at > version and not self.is_silent:
                    version = at
                    if _is_of(path, made, request.path, request):
                        await response.write(json.dumps({"type": kind, "object": made}).encode() + b"\n")
            await self._news.wait()
        return response


def _is_of(key: str, made: Mapping[str, Any], path: str, request: web.Request) -> bool:
    plural = path.rpartition("/")[2]
    namespace = path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else None
    return (
        key.split("/")[-2] == plural
        and namespace in (None, made["metadata"].get("namespace"))
        and request.query.get("labelSelector", "") in ("", *made["metadata"].get("labels", {}))
    )


def _status(code: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "code": code, "message": message}
    return web.json_response(body, status=code, headers=dict(headers or {}))
