"""What the operator knows of the cluster: copies of what it reads, in the order in which a reconcile asks for it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from oasiskv.operator.client import Client, NotFoundError
from oasiskv.operator.facts import Node, Ref
from oasiskv.operator.names import SERVICE
from oasiskv.operator.observe import Pod, add, read_node, read_pod
from oasiskv.operator.reflector import Reflector
from oasiskv.operator.resources import CHILDREN, NODES, PODS, Resource, owner_uid

Key = tuple[str, str]
Object = Mapping[str, Any]
KSERVE = "serving.kserve.io/inferenceservice"
"""Label of what KServe makes of an InferenceService, with its name."""


class Store:
    """Copies of children, pods and nodes.

    Args:
        client: The API server.
        namespaces: Those to work in; none for all.
        reads_nodes: Whether nodes, and all pods, may be looked at.
        wake: Called with the key of a service of which something changed.
    """

    def __init__(
        self, client: Client, namespaces: Sequence[str], reads_nodes: bool, wake: Callable[[Key], None]
    ) -> None:
        self._client, self._namespaces, self._reads_nodes, self._wake = client, namespaces, reads_nodes, wake
        self._scopes: Sequence[str | None] = list(namespaces) or [None]
        self._reflectors: dict[tuple[str, str | None], tuple[Reflector[Any], asyncio.Task[None]]] = {}
        self._children: dict[Key, dict[Ref, Object]] = {}
        self._decodes: dict[Key, Object] = {}
        self._pods: dict[Key, dict[str, Pod]] = {}
        self._used: dict[str, dict[str, Fraction]] = {}
        self._last_words: dict[Key, dict[str, str]] = {}
        self._nodes: list[Node] | None = None
        """Those of the last look, as long as nothing about them has changed."""
        self.kinds: frozenset[str] = frozenset()
        self.has_room_changed = False
        """Whether nodes, or what others use of them, changed since somebody last set this to False."""

    def start(self) -> None:
        """Begin to read what every API server knows."""
        for resource in CHILDREN.values():
            if not resource.optional:
                self._add_children(resource)
        for scope in [None] if self._reads_nodes else self._scopes:
            self._add(PODS, scope, read_pod, self._pod_changed)
        if self._reads_nodes:
            self._add(NODES, None, read_node, self._node_changed)

    async def stop(self) -> None:
        """End all watches."""
        tasks = [task for _, task in self._reflectors.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def look_for_kinds(self) -> bool:
        """See which optional kinds the API server knows; return whether they changed, when everything was read."""
        found = set()
        groups = (await self._client.get("/apis"))["groups"]
        versions = {version["groupVersion"] for group in groups for version in group["versions"]}
        for resource in CHILDREN.values():
            if resource.optional and resource.api in versions and await self._is_known(resource):
                found.add(resource.optional)
        before = self.kinds
        self.kinds = before & found
        for resource in CHILDREN.values():
            if resource.optional in found - before:
                self._add_children(resource)
            elif resource.optional in before - found:
                await self._remove(resource)
        # A kind counts as known once its objects were read: none read would look like none there.
        for reflector, _ in list(self._reflectors.values()):
            await reflector.has_answer.wait()
        self.kinds = frozenset(found)
        return before != self.kinds

    def unreadable(self, namespace: str) -> str:
        """Return why services of a namespace cannot be looked after: what may not be read there; empty if all may.

        What was not read would look like what is not there.
        """
        refused = (
            reflector.refused for (_, scope), (reflector, _) in self._reflectors.items() if scope in (None, namespace)
        )
        return next(filter(None, refused), "")

    def why_blind(self) -> str:
        """Return why nothing at all can be looked after; empty if services of some namespace can."""
        reasons = [self.unreadable(scope or "") for scope in self._scopes]
        return reasons[0] if all(reasons) else ""

    def children(self, key: Key, uid: str) -> Mapping[Ref, Object]:
        """Return the objects that a service owns."""
        return {ref: made for ref, made in self._children.get(key, {}).items() if owner_uid(made) == uid}

    def namesake(self, key: Key, ref: Ref) -> Object | None:
        """Return an object with labels of a service, whoever owns it."""
        return self._children.get(key, {}).get(ref)

    def decode(self, key: Key) -> Object | None:
        """Return the Deployment that KServe made of a service's InferenceService."""
        return self._decodes.get(key)

    def pods(self, key: Key) -> Sequence[Pod]:
        """Return the pods of a service."""
        return list(self._pods.get(key, {}).values())

    def take_last_words(self, key: Key) -> Mapping[str, str]:
        """Return what pods of a service said at their end, by name, and forget it."""
        return self._last_words.pop(key, {})

    def nodes(self) -> Sequence[Node] | None:
        """Return all nodes, with what pods use; None where they may not be looked at."""
        if not self._reads_nodes:
            return None
        if self._nodes is None:
            reflector, _ = self._reflectors[NODES.kind, None]
            self._nodes = [replace(node, used=dict(self._used.get(node.name, {}))) for node in reflector.items.values()]
        return self._nodes

    def put(self, made: Object) -> None:
        """Take in what the API server returned to a write."""
        self._reflector(made["kind"], made["metadata"]["namespace"]).put(made)

    def drop(self, made: Object) -> None:
        """Forget an object that was deleted."""
        metadata = made["metadata"]
        reflector = self._reflector(made["kind"], metadata["namespace"])
        reflector.drop((metadata["namespace"], metadata["name"]), int(metadata["resourceVersion"]))

    def ages_s(self) -> Mapping[str, float]:
        """Return, by kind, how long ago the API server was last heard of."""
        now, made = time.monotonic(), dict[str, float]()
        for (kind, _), (reflector, _) in self._reflectors.items():
            made[kind] = max(made.get(kind, 0.0), now - reflector.last_news_s)
        return made

    def sizes(self) -> Mapping[str, float]:
        """Return the number of objects that are kept, by kind."""
        made: dict[str, float] = {}
        for (kind, _), (reflector, _) in self._reflectors.items():
            made[kind] = made.get(kind, 0) + len(reflector.items)
        return made

    def _reflector(self, kind: str, namespace: str) -> Reflector[Any]:
        return self._reflectors[kind, namespace if self._namespaces else None][0]

    async def _is_known(self, resource: Resource) -> bool:
        try:
            answer = await self._client.get(f"/apis/{resource.api}")
        except NotFoundError:
            return False
        return any(each["name"] == resource.plural for each in answer["resources"])

    def _add_children(self, resource: Resource) -> None:
        for scope in self._scopes:
            self._add(resource, scope, _without_others_fields, self._child_changed)

    def _add(self, resource: Resource, scope: str | None, keep: Callable[[Object], Any], changed: Any) -> None:
        reflector = Reflector(self._client, resource.path(scope), keep, changed, resource.selector)
        self._reflectors[resource.kind, scope] = reflector, asyncio.create_task(reflector.run())

    async def _remove(self, resource: Resource) -> None:
        for scope in self._scopes:
            reflector, task = self._reflectors.pop((resource.kind, scope))
            task.cancel()
            await asyncio.wait([task])
            for made in list(reflector.items.values()):
                self._child_changed(("", ""), made, None)

    def _child_changed(self, _: Key, before: Object | None, now: Object | None) -> None:
        made = now or before
        assert made is not None
        metadata = made["metadata"]
        key = metadata["namespace"], metadata["labels"][SERVICE]
        if made["kind"] == "Deployment" and KSERVE in metadata["labels"]:
            if now is not None:
                self._decodes[key] = now
            else:
                self._decodes.pop(key, None)
        else:
            ref = Ref(made["kind"], metadata["name"])
            if now is not None:
                self._children.setdefault(key, {})[ref] = now
            else:
                _pop(self._children, key, ref)
        self._wake(key)

    def _pod_changed(self, _: Key, before: Pod | None, now: Pod | None) -> None:
        if before == now:
            return
        for pod, sign in ((before, -1), (now, 1)):
            if pod is not None and pod.node and pod.requests:
                add(self._used.setdefault(pod.node, {}), pod.requests, sign)
                self._nodes = None
        self.has_room_changed = True
        if before is not None and SERVICE in before.labels:
            _pop(self._pods, (before.namespace, before.labels[SERVICE]), before.name)
        if now is not None and SERVICE in now.labels:
            key = now.namespace, now.labels[SERVICE]
            self._pods.setdefault(key, {})[now.name] = now
            if now.last_words and (before is None or now.last_words != before.last_words):
                self._last_words.setdefault(key, {})[now.name] = now.last_words
        for pod in (before, now):
            if pod is not None and SERVICE in pod.labels:
                self._wake((pod.namespace, pod.labels[SERVICE]))

    def _node_changed(self, key: Key, before: Node | None, now: Node | None) -> None:
        name = key[1]
        if before is not None and now is None:
            self._used.pop(before.name, None)
        if before != now:
            self._nodes = None
        self.has_room_changed = self.has_room_changed or before != now
        if (before is not None and before.is_cordoned) != (now is not None and now.is_cordoned):
            # Staging moves off before it is evicted.
            for service, pods in self._pods.items():
                if any(pod.node == name for pod in pods.values()):
                    self._wake(service)


def _pop(of: dict[Key, dict[Any, Any]], key: Key, name: Any) -> None:
    of.get(key, {}).pop(name, None)
    if not of.get(key, True):
        del of[key]


def _without_others_fields(made: Object) -> Object:
    """Return an object without the record of who wrote what, but for this operator's part."""
    metadata = made["metadata"]
    own = [entry for entry in metadata.get("managedFields", ()) if entry["operation"] == "Apply"]
    return {**made, "metadata": {**metadata, "managedFields": own}}
