"""One turn of one service: read, decide, write what differs, delete what is too much, say what holds."""

import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api_status import ServiceStatus
from oasiskv.operator.asks import Asks, Loads
from oasiskv.operator.claims import RENEW_S, Claims
from oasiskv.operator.client import MANAGER, ApiError, BusyError, Client, ConflictError, NotFoundError, RefusedError
from oasiskv.operator.differs import differs
from oasiskv.operator.events import Decision, cut_off, decisions, event, left, repeated, reverted
from oasiskv.operator.facts import Facts, Ref
from oasiskv.operator.kinds import write
from oasiskv.operator.metrics import Metrics
from oasiskv.operator.names import KV, ROLE, digest
from oasiskv.operator.observe import Pod, Seen, observe
from oasiskv.operator.reconcile import Outcome, reconcile
from oasiskv.operator.resources import CHILDREN, EVENTS, PROFILES, SERVICES, owner_uid
from oasiskv.operator.store import Store

Key = tuple[str, str]
Object = Mapping[str, Any]
FIRST_S, LONGEST_S, REFUSED_S = 0.5, 60.0, 300.0
"""Wait after a failed turn: doubled each time up to the second, or the third where the API server said no."""
VERIFY_S, LOAD_S, RDMA_S = 5.0, 15.0, 60.0
"""How often pods are asked whether KV comes through, as long as it has not, what their load is, and what they see of
RDMA; that as often as the load while something is wrong with it."""
REVERT_S = 60.0
"""How long a child that somebody else changed once more after it was written again is left as it is."""
SOON_VERIFIED_S, LATE_VERIFY_S = 60.0, 30.0
"""After so long without, pods are asked only that often: one that becomes ready is a wake of its own."""

log = logging.getLogger(__name__)


class Shell:
    """Takes turns.

    Args:
        client: The API server.
        store: What is known of the cluster.
        metrics: What is counted.
        asks: Asks pods.
        may_write: Asked before every write.
        now: Time, in RFC 3339.
        claims: The right to work in a namespace; none where no other operator can be.
    """

    def __init__(
        self,
        client: Client,
        store: Store,
        metrics: Metrics,
        asks: Asks,
        may_write: Callable[[], bool] = lambda: True,
        now: Callable[[], str] = lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        claims: Claims | None = None,
    ) -> None:
        self._client, self._store, self._metrics = client, store, metrics
        self._may_write, self._now, self._claims = may_write, now, claims
        self._asks, self._loads = asks, Loads(asks)
        self._num_failed: dict[Key, int] = {}
        self._ask_at_s: dict[Key, float] = {}
        self._rdma_at_s: dict[Key, float] = {}
        self._why: dict[Key, str] = {}
        """What pods said last of why no block has crossed."""
        self._unverified: dict[Key, tuple[tuple[str, str] | None, float]] = {}
        """Between which revisions a block has yet to cross, and since when."""
        self._written: dict[Key, dict[Ref, str]] = {}
        """What each child was last written as, in short."""
        self._reverted: dict[Key, list[Ref]] = {}
        """Children that somebody else changed since they were told of last."""
        self._revert_at_s: dict[Key, dict[Ref, float]] = {}
        """From when on a child that somebody else changed is written again."""
        self.left: dict[Key, str] = {}
        """Those that another operator looks after, and which."""
        self.services: set[Key] = set()
        """Those that are there."""
        self.lacking: set[Key] = set()
        """Those whose pods lack room."""

    async def turn(self, key: Key) -> float | None:
        """Take a turn of a service; return in how many seconds another one is needed, None for when it is woken."""
        begin_s, result = time.perf_counter(), "done"
        try:
            again_s = await self._turn(key)
            self._num_failed.pop(key, None)
            return again_s
        except (ApiError, ConfigError) as error:
            result = _result(error)
            wait_s = self._wait_s(key, error)
            fields = {"namespace": key[0], "service": key[1], "error": str(error), "again_in_s": round(wait_s, 1)}
            log.log(logging.INFO if result == "conflict" else logging.WARNING, "turn failed", extra=fields)
            return wait_s
        except Exception as error:
            # A mistake of ours about one service must not take the others down.
            result = "failed"
            wait_s = self._wait_s(key, error)
            log.exception("turn failed", extra={"namespace": key[0], "service": key[1], "again_in_s": round(wait_s, 1)})
            return wait_s
        finally:
            self._metrics.reconcile_s.labels(result).observe(time.perf_counter() - begin_s)

    async def _turn(self, key: Key) -> float | None:
        try:
            service = await self._client.get(SERVICES.path(*key))
        except NotFoundError:
            await self._forget(key)
            return None
        if "deletionTimestamp" in service["metadata"]:
            return None
        self.services.add(key)
        if refused := self._store.unreadable(key[0]):
            raise RefusedError(refused)
        if self._claims is not None and (other := await self._claims.take(key[0])):
            await self._leave(key, service, self._claims.identity, other)
            return RENEW_S
        self.left.pop(key, None)
        facts = await self._look(key, service)
        outcome = reconcile(service, facts)
        if (asked := await self._ask(key, facts, outcome)) != facts:
            facts = asked
            outcome = reconcile(service, facts)
        try:
            contested = await self._carry_out(key, service, outcome)
        except RefusedError as error:
            outcome = reconcile(service, replace(facts, refused=str(error)))
            await self._say(key, service, outcome.status)
            await self._tell(key, service, facts.status, outcome.status)
            raise
        if contested:
            names = ", ".join(f"{ref.kind} {ref.name}" for ref in contested)
            why = f"{names}: somebody else changes it back each time; it is written once in {REVERT_S:.0f} s"
            outcome = reconcile(service, replace(facts, contested=why))
        await self._say(key, service, outcome.status)
        await self._tell(key, service, facts.status, outcome.status)
        if contested:
            return max(0.0, min(self._revert_at_s[key][ref] for ref in contested) - time.monotonic())
        if outcome.unverified is not None and facts.decode_pods:
            _, since_s = self._unverified.get(key, (None, 0.0))
            return VERIFY_S if time.monotonic() < since_s + SOON_VERIFIED_S else LATE_VERIFY_S
        if outcome.asks:
            return LOAD_S
        return max(0.0, self._rdma_at_s[key] - time.monotonic()) if key in self._rdma_at_s else None

    async def _leave(self, key: Key, service: Object, operator: str, other: str) -> None:
        """Tell once that another operator looks after a service; its status is that one's to write."""
        if self.left.get(key) == other:
            return
        fields = {"namespace": key[0], "service": key[1], "operator": other}
        log.warning("another operator works in this namespace", extra=fields)
        self._metrics.says(key, ())
        self.lacking.discard(key)
        await self._post(key, service, left(key[0], operator, other))
        self.left[key] = other

    async def _forget(self, key: Key) -> None:
        self.services.discard(key)
        self.left.pop(key, None)
        self.lacking.discard(key)
        self._num_failed.pop(key, None)
        self._ask_at_s.pop(key, None)
        self._rdma_at_s.pop(key, None)
        self._unverified.pop(key, None)
        self._why.pop(key, None)
        self._store.take_last_words(key)
        self._written.pop(key, None)
        self._reverted.pop(key, None)
        self._revert_at_s.pop(key, None)
        self._metrics.says(key, ())
        if self._claims is not None and self._may_write() and all(each[0] != key[0] for each in self.services):
            await self._claims.drop(key[0])

    async def _look(self, key: Key, service: Object) -> Facts:
        profile = None
        if name := ((service.get("spec") or {}).get("profile") or {}).get("name"):
            try:
                profile = await self._client.get(PROFILES.path(key[0], name))
            except NotFoundError:
                profile = None
        seen = Seen(
            service=service,
            children=list(self._store.children(key, service["metadata"]["uid"]).values()),
            decode=self._store.decode(key),
            pods=self._store.pods(key),
            nodes=self._store.nodes(),
            profile=profile,
            kinds=self._store.kinds,
        )
        # With what pods said last, so that the same once more is nothing to decide anew.
        facts = replace(observe(seen, self._now()), unverified=self._why.get(key, ""))
        return facts if self._claims is None else replace(facts, operator=self._claims.identity)

    async def _ask(self, key: Key, facts: Facts, outcome: Outcome) -> Facts:
        """Return facts with what pods say, as far as a decision waits for it."""
        by_role: dict[str, list[Pod]] = {}
        for pod in self._store.pods(key):
            if not pod.has_ended:
                by_role.setdefault(pod.labels.get(ROLE, ""), []).append(pod)
        if self._unverified.get(key, (None, 0.0))[0] != outcome.unverified:
            self._unverified[key] = outcome.unverified, time.monotonic()
        if outcome.unverified is not None and (decodes := by_role.get("decode")):
            why = await self._asks.why_unverified(decodes, outcome.unverified)
            verified = frozenset({outcome.unverified}) if why is None else frozenset[tuple[str, str]]()
            self._why[key] = why or ""
            facts = replace(facts, verified=verified, unverified=why or "")
        else:
            self._why.pop(key, None)
            facts = replace(facts, unverified="")
        now_s = time.monotonic()
        reachable = [pod for pod in itertools.chain.from_iterable(by_role.values()) if pod.ip]
        if not outcome.asks_rdma or not reachable:
            self._rdma_at_s.pop(key, None)
        elif now_s >= self._rdma_at_s.get(key, 0.0):
            report = await self._asks.rdma(reachable)
            is_right = report is not None and not report.problem
            self._rdma_at_s[key] = now_s + (RDMA_S if is_right else LOAD_S)
            facts = replace(facts, rdma=report)
        if outcome.asks and now_s >= self._ask_at_s.get(key, 0.0):
            self._ask_at_s[key] = now_s + LOAD_S
            live = facts.decode.kv_generation if facts.decode is not None else None
            loads = {}
            for role in sorted(outcome.asks):
                pods = by_role.get(role, [])
                # Prefill pods of a generation that does not serve yet have no load.
                pods = [pod for pod in pods if role == "decode" or live is None or pod.labels.get(KV) == live]
                loads[role] = await self._loads.ask(role, pods)
            facts = replace(facts, loads=loads)
        return facts

    async def _carry_out(self, key: Key, service: Object, outcome: Outcome) -> list[Ref]:
        """Write and delete; return what is left as somebody else keeps making it."""
        contested = []
        for made in outcome.apply:
            if not await self._apply(key, service, made):
                contested.append(Ref(made["kind"], made["metadata"]["name"]))
        children = self._store.children(key, service["metadata"]["uid"])
        for ref in outcome.delete:
            if (live := children.get(ref)) is not None and "deletionTimestamp" not in live["metadata"]:
                await self._delete(live)
        return contested

    async def _apply(self, key: Key, service: Object, made: Object) -> bool:
        """Write an object if it differs; return False where it is left to somebody who keeps changing it back."""
        ref = Ref(made["kind"], made["metadata"]["name"])
        path = CHILDREN[ref.kind].path(key[0], ref.name)
        live = self._store.namesake(key, ref)
        if live is None:
            # It may be there without our labels. Applying would take it away from whoever made it.
            try:
                live = await self._client.get(path)
            except NotFoundError:
                live = None
        if live is not None:
            _check_owner(live, service)
            if not differs(made, live, MANAGER):
                self._store.put(live)
                self._written.setdefault(key, {})[ref] = digest(made)
                return True
        written, now = self._written.setdefault(key, {}), digest(made)
        # What was written is no longer there, so it is not the service that changed.
        is_revert = live is not None and written.get(ref) == now
        revert_at_s = self._revert_at_s.setdefault(key, {})
        if is_revert and time.monotonic() < revert_at_s.get(ref, 0.0):
            return False
        self._check_right(key[0])
        self._store.put(await self._client.apply(path, made))
        self._wrote("apply", ref.kind, key, ref.name)
        if is_revert:
            revert_at_s[ref] = time.monotonic() + REVERT_S
            self._reverted.setdefault(key, []).append(ref)
        written[ref] = now
        return True

    async def _delete(self, live: Object) -> None:
        kind, metadata = live["kind"], live["metadata"]
        self._check_right(metadata["namespace"])
        try:
            await self._client.delete(CHILDREN[kind].path(metadata["namespace"], metadata["name"]), metadata["uid"])
        except NotFoundError:
            log.debug("already gone", extra={"kind": kind, "object": metadata["name"]})
        self._store.drop(live)
        self._wrote("delete", kind, (metadata["namespace"], metadata["labels"]["oasiskv.io/service"]), metadata["name"])

    async def _say(self, key: Key, service: Object, status: ServiceStatus) -> None:
        self._metrics.says(key, status.conditions)
        feasible = next((each for each in status.conditions if each.type == "PlacementFeasible"), None)
        if feasible is not None and feasible.status == "False":
            self.lacking.add(key)
        else:
            self.lacking.discard(key)
        if (wanted := write(status)) == service.get("status"):
            return
        self._check_right(key[0])
        # Not by apply, which fails as a whole where the installed definition is older than the operator and lacks a
        # field. The version that was read goes along, so that nothing is said of a spec that has changed meanwhile.
        await self._client.update(SERVICES.path(*key, "status"), {**service, "status": wanted})
        self._wrote("status", service["kind"], key, key[1])

    async def _tell(self, key: Key, service: Object, before: ServiceStatus, now: ServiceStatus) -> None:
        """Write an Event of each decision. One that cannot be written is lost: the status says all that matters."""
        told = [*decisions(before, now), *itertools.starmap(cut_off, self._store.take_last_words(key).items())]
        told += [reverted(ref.kind, ref.name) for ref in self._reverted.pop(key, ())]
        for decision in told:
            self._check_right(key[0])
            if not await self._post(key, service, decision):
                return

    async def _post(self, key: Key, service: Object, decision: Decision) -> bool:
        """Write an Event; return whether that went."""
        namespace, name = key
        made = event(service, decision, os.environ.get("POD_NAME", "oasiskv-operator"))
        try:
            try:
                await self._client.create(EVENTS.path(namespace), made)
            except ConflictError:
                path = EVENTS.path(namespace, made["metadata"]["name"])
                await self._client.change(path, repeated(await self._client.get(path)))
        except ApiError as error:
            fields = {"namespace": namespace, "service": name, "reason": decision.reason, "error": str(error)}
            log.warning("an event is lost", extra=fields)
            return False
        self._wrote("event", "Event", (namespace, name), made["metadata"]["name"])
        return True

    def _check_right(self, namespace: str) -> None:
        if not self._may_write() or (self._claims is not None and not self._claims.is_held(namespace)):
            raise ConflictError("lease: expected to hold it before a write, got none")

    def _wrote(self, verb: str, kind: str, key: Key, name: str) -> None:
        self._metrics.writes.labels(verb, kind).inc()
        fields = {"verb": verb, "kind": kind, "object": name, "namespace": key[0], "service": key[1]}
        log.info("wrote", extra=fields)

    def _wait_s(self, key: Key, error: Exception) -> float:
        number = self._num_failed[key] = self._num_failed.get(key, 0) + 1
        most = REFUSED_S if isinstance(error, RefusedError | ConfigError) else LONGEST_S
        wait_s = min(FIRST_S * 2.0 ** min(number - 1, 20), most)
        if isinstance(error, BusyError):
            wait_s = max(wait_s, error.retry_after_s)
        # Services that failed together shall not all come back together.
        return wait_s * random.uniform(1.0, 1.3)


def _check_owner(live: Object, service: Object) -> None:
    uid = owner_uid(live)
    if uid == service["metadata"]["uid"]:
        return
    what = f"{live['kind']} {live['metadata']['name']}"
    if uid is not None and live["metadata"].get("labels", {}).get("oasiskv.io/service") == service["metadata"]["name"]:
        # Of an earlier service of that name; the garbage collector is on its way.
        raise ConflictError(
            f"{what}: expected it to belong to this service, got one of an earlier service of that name"
        )
    raise RefusedError(f"{what}: expected none of that name or one of this service, got one that somebody else made")


def _result(error: Exception) -> str:
    for kind, name in ((ConflictError, "conflict"), (BusyError, "busy"), (RefusedError, "refused")):
        if isinstance(error, kind):
            return name
    return "failed"
