"""What a turn does about every kind of answer of the API server, and that it writes no more than it has to."""

import copy
import json
from typing import Any

import pytest
from prometheus_client import generate_latest

from oasiskv.operator import shell as shell_module
from oasiskv.operator.asks import Asks
from oasiskv.operator.claims import RENEW_S
from oasiskv.operator.metrics import Metrics
from oasiskv.operator.observe import Pod
from oasiskv.operator.resources import CHILDREN, PODS
from oasiskv.operator.shell import FIRST_S, LOAD_S, LONGEST_S, RDMA_S, REFUSED_S, REVERT_S
from oasiskv.operator.store import Store
from oasiskv.operator.testing import service
from oasiskv.operator.testing_shell import KEY, PATH, Bench, run


def test_everything_is_written_and_a_second_turn_writes_nothing() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.turn() is None
        assert [call[0] for call in bench.writes()] == ["PATCH"] * 13 + ["PUT"]
        await bench.turn()  # says what the first one made
        assert [call[0] for call in bench.writes()] == ["PUT"]
        assert await bench.turn() is None
        assert bench.api.calls == [("GET", PATH)]
        bench.shell = bench.make_shell()
        assert await bench.turn() is None
        assert bench.writes() == []

    run(test)


def test_what_another_operator_looks_after_is_left_alone_and_that_is_told_once() -> None:
    async def test(bench: Bench) -> None:
        bench.shell = bench.make_shell("a/op")
        assert await bench.turn() is None
        assert bench.api.objects[PATH]["status"]["operator"] == "a/op"
        await bench.turn()
        bench.shell = bench.make_shell("b/op")
        changed = service({**service()["spec"], "image": "oasiskv/engine:2"})
        bench.api.put({**changed, "metadata": {"name": "chat", "namespace": "llm", "generation": 2}})
        assert await bench.turn() == RENEW_S
        told = bench.events()["LeftToAnotherOperator"]
        note = "operator b/op leaves services of namespace llm to operator a/op, which was there first"
        assert (told["note"], told["type"]) == (note, "Warning")
        assert await bench.turn() == RENEW_S
        assert bench.writes() == []
        assert "series" not in bench.events()["LeftToAnotherOperator"]
        assert (bench.shell.left, bench.api.objects[PATH]["status"]["operator"]) == ({KEY: "a/op"}, "a/op")

    run(test)


def test_the_last_service_of_a_namespace_takes_the_lease_with_it() -> None:
    async def test(bench: Bench) -> None:
        bench.shell = bench.make_shell("a/op")
        await bench.turn()
        assert [path for path in bench.api.objects if "/leases/" in path]
        bench.api.remove(PATH)
        assert await bench.turn() is None
        assert not [path for path in bench.api.objects if "/leases/" in path]

    run(test)


def test_a_child_that_somebody_changed_is_written_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        await bench.turn()
        path = next(path for path in bench.api.objects if "/deployments/" in path)
        made = copy.deepcopy(bench.api.objects[path])
        made["spec"]["replicas"] = 7
        bench.store.put(bench.api.put(made))
        await bench.turn()
        assert [call for call in bench.writes() if call[0] == "PATCH"] == [("PATCH", path)]
        assert bench.api.objects[path]["spec"]["replicas"] == 1
        # Two owners of a number would fight for ever, so it is told, and how often.
        told = bench.events()["EditReverted"]
        assert (told["type"], "series" in told) == ("Warning", False)
        assert told["note"].startswith(f"Deployment {made['metadata']['name']}: somebody else changed it")
        await bench.turn()
        assert "series" not in bench.events()["EditReverted"]
        # Once more, and it is left for a while: somebody else means it, and pods would be made and ended in turn.
        bench.store.put(bench.api.put(made))
        again_s = await bench.turn()
        assert again_s is not None
        assert 0 < again_s <= REVERT_S
        assert [call for call in bench.writes() if call[0] == "PATCH"] == []
        applied = bench.condition("Applied")
        assert (applied["status"], applied["reason"]) == ("False", "Contested")
        assert applied["message"].startswith(f"Deployment {made['metadata']['name']}: somebody else changes it back")
        assert bench.condition("Ready")["reason"] == "Contested"
        # What the service changes is written all the same.
        changed = service({**service()["spec"], "prefill": {"replicas": 3}}, generation=2)
        bench.api.put({**changed, "metadata": {"name": "chat", "namespace": "llm", "generation": 2}})
        await bench.turn()
        assert bench.api.objects[path]["spec"]["replicas"] == 3
        assert bench.condition("Applied")["reason"] == "Written"
        assert "series" not in bench.events()["EditReverted"]
        monkeypatch.setattr(shell_module, "REVERT_S", 0.0)
        for count in (2, 3):
            bench.shell._revert_at_s.clear()
            bench.store.put(bench.api.put(made))
            await bench.turn()
            assert bench.events()["EditReverted"]["series"]["count"] == count

    run(test)


def test_what_the_service_itself_changes_is_no_edit_of_somebody_else() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        changed = service({**service()["spec"], "image": "oasiskv/engine:2"})
        bench.api.put({**changed, "metadata": {"name": "chat", "namespace": "llm", "generation": 2}})
        await bench.turn()
        await bench.turn()
        assert "EditReverted" not in bench.events()

    run(test)


def test_what_is_too_much_is_deleted_after_everything_was_written() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        changed = service({**service()["spec"], "networkPolicy": "Disabled", "image": "oasiskv/engine:2"})
        bench.api.put({**changed, "metadata": {"name": "chat", "namespace": "llm", "generation": 2}})
        await bench.turn()
        verbs = [call[0] for call in bench.writes()]
        assert verbs == sorted(verbs, key=["PATCH", "DELETE", "PUT"].index)
        assert verbs.count("DELETE") == 3
        assert not [path for path in bench.api.objects if "networkpolicies" in path]

    run(test)


def test_what_is_gone_already_is_as_good_as_deleted() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        changed = service({**service()["spec"], "networkPolicy": "Disabled"})
        bench.api.put({**changed, "metadata": {"name": "chat", "namespace": "llm", "generation": 2}})
        bench.api.fail("DELETE", "/networkpolicies/", 404, left=3)
        assert await bench.turn() is None

    run(test)


def test_a_service_that_is_gone_is_forgotten() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        bench.api.remove(PATH)
        assert await bench.turn() is None
        assert (bench.shell.services, bench.writes()) == (set(), [])
        assert b"oasiskv_operator_condition{" not in _text(bench.metrics)

    run(test)


def test_a_service_that_is_being_deleted_is_left_alone() -> None:
    async def test(bench: Bench) -> None:
        bench.api.objects[PATH]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        assert await bench.turn() is None
        assert bench.writes() == []

    run(test)


def test_a_conflict_is_tried_again_soon() -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail("PATCH", "/deployments/", 409)
        wait_s = await bench.turn()
        assert wait_s is not None
        assert FIRST_S <= wait_s <= 1.3 * FIRST_S
        assert await bench.turn() is None
        # A status about a spec that changed meanwhile is not written.
        bench.api.fail("PUT", "/status", 409)
        bench.api.objects[PATH]["spec"]["decode"]["replicas"] = 5
        assert await bench.turn() is not None

    run(test)


@pytest.mark.parametrize("code", [400, 403, 422])
def test_what_is_refused_is_said_in_the_status_and_tried_ever_less_often(code: int) -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail("PATCH", "/statefulsets/", code, left=20)
        wait_s = await bench.turn()
        assert wait_s is not None
        # What comes after it in order is not made without it.
        assert not [call for call in bench.writes() if "inferenceservices" in call[1]]
        applied = bench.condition("Applied")
        assert (applied["status"], applied["reason"]) == ("False", "Refused")
        assert f"got {code}: told to fail" in applied["message"]
        assert bench.condition("Ready")["message"].startswith("Applied: PATCH")
        waits = [await bench.turn() for _ in range(15)]
        assert bench.writes() == [("PATCH", next(call[1] for call in bench.writes()))]
        assert all(wait is not None for wait in waits)
        assert REFUSED_S <= (waits[-1] or 0) <= 1.3 * REFUSED_S
        bench.api.failures.clear()
        assert await bench.turn() is None
        assert bench.condition("Applied")["status"] == "True"

    run(test)


def test_a_busy_server_is_given_the_time_that_it_asks_for() -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail("PATCH", "/services/", 429, headers={"Retry-After": "17"})
        wait_s = await bench.turn()
        assert wait_s is not None
        assert 17 <= wait_s <= 1.3 * 17
        assert "status" not in bench.api.objects[PATH]  # nothing is said of what is not known
        assert await bench.turn() is None

    run(test)


@pytest.mark.parametrize(
    ("verb", "part"), [("GET", "/oasiskvservices/"), ("PATCH", "/configmaps/"), ("PUT", "/status")]
)
def test_a_broken_server_is_asked_ever_less_often_and_in_the_end_everything_is_there(verb: str, part: str) -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail(verb, part, 503, left=12)
        waits = [await bench.turn() or 0.0 for _ in range(12)]
        assert FIRST_S <= waits[0] <= 1.3 * FIRST_S
        assert LONGEST_S <= waits[-1] <= 1.3 * LONGEST_S
        assert await bench.turn() is None
        assert len(bench.store.children(KEY, "5f0c")) == 13
        bench.api.fail(verb, part, 503)
        # Success makes it hopeful again.
        if verb == "GET":
            assert (await bench.turn() or 0) <= 1.3 * FIRST_S

    run(test)


def test_a_kind_that_may_not_be_read_is_no_kind_without_objects() -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail("GET", "/statefulsets", 403, left=10**6)
        bench.store = Store(bench.api.client, (), True, lambda key: None)
        bench.shell = bench.make_shell()
        await bench.start()  # does not wait for it
        try:
            assert await bench.turn() is not None
            assert bench.writes() == []
            assert "told to fail" in bench.store.why_blind()
            assert bench.store.ages_s()["StatefulSet"] < 1  # no silence, of which a new process would cure
            bench.api.failures.clear()
            await bench.until(lambda: not bench.store.why_blind())
            await bench.turn()
            assert bench.writes() != []
        finally:
            await bench.store.stop()

    run(test)


def test_a_mistake_of_the_operator_is_logged_and_the_service_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: Bench) -> None:
        nothing: dict[str, Any] = {}
        monkeypatch.setattr("oasiskv.operator.shell.reconcile", lambda service, facts: nothing["missing"])
        assert await bench.turn() is not None
        assert "KeyError: 'missing'" in caplog.text
        monkeypatch.undo()
        assert await bench.turn() is None

    run(test)


def test_without_the_lease_nothing_is_written() -> None:
    async def test(bench: Bench) -> None:
        bench.may_write = False
        assert await bench.turn() is not None
        assert bench.writes() == []

    run(test)


def test_an_object_that_somebody_else_made_is_not_taken_from_them() -> None:
    async def test(bench: Bench) -> None:
        metadata = {"name": "chat", "namespace": "llm", "labels": {"app": "theirs"}}
        theirs = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": metadata}
        path = CHILDREN["InferenceService"].path("llm", "chat")
        before = copy.deepcopy(bench.api.put({**theirs, "spec": {"predictor": {"minReplicas": 9}}}))
        assert await bench.turn() is not None
        assert bench.api.objects[path] == before
        message = bench.condition("Applied")["message"]
        assert message == (
            "InferenceService chat: expected none of that name or one of this service, got one that somebody else made"
        )

    run(test)


def test_what_an_earlier_service_of_that_name_left_is_waited_for() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        again = service()
        again["metadata"]["uid"] = "new"
        bench.api.put(again)
        wait_s = await bench.turn()
        assert wait_s is not None
        assert wait_s <= 1.3 * FIRST_S
        assert bench.writes() == []
        for path in [path for path in bench.api.objects if path != PATH and "/events/" not in path]:
            made = bench.api.objects[path]
            bench.api.remove(path)
            bench.store.drop(made)
        assert await bench.turn() is None
        assert len(bench.store.children(KEY, "new")) == 13

    run(test)


def test_a_profile_that_is_named_is_read() -> None:
    async def test(bench: Bench) -> None:
        spec = {**service()["spec"], "profile": {"name": "h100"}}
        del spec["network"]
        bench.api.put(service(spec))
        await bench.turn()
        assert bench.condition("ProfileResolved")["reason"] == "NotFound"
        metadata = {"name": "h100", "namespace": "llm"}
        profile = {"apiVersion": "oasiskv.io/v1alpha1", "kind": "OasisKVProfile", "metadata": metadata, "spec": {}}
        bench.api.put(profile)
        await bench.turn()
        assert bench.condition("ProfileResolved")["status"] == "True"

    run(test)


def test_a_kind_that_appears_is_used_and_one_that_goes_is_not_missed() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        bench.api.groups.add("monitoring.coreos.com/v1")
        assert await bench.store.look_for_kinds()
        assert not await bench.store.look_for_kinds()
        await bench.turn()
        assert CHILDREN["PodMonitor"].path("llm", "chat") in bench.api.objects
        bench.api.groups.clear()
        assert await bench.store.look_for_kinds()
        assert await bench.turn() is None
        assert bench.condition("DecodeReady")["reason"] == "KServeMissing"
        assert {ref.kind for ref in bench.store.children(KEY, "5f0c")}.isdisjoint({"PodMonitor", "InferenceService"})

    run(test)


def _text(metrics: Metrics) -> bytes:
    return generate_latest(metrics.registry)


def test_a_decision_is_told_once_and_counted_when_it_comes_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.turn()
        # There are no nodes here.
        blocked = bench.events()["NoNodeIsReady"]
        assert (blocked["type"], blocked["regarding"]["name"]) == ("Warning", "chat")
        assert blocked["note"].startswith("PlacementFeasible: ")
        await bench.turn()
        bench.shell = bench.make_shell()
        await bench.turn()
        assert not [call for call in bench.api.calls if "/events" in call[1]]
        assert "series" not in bench.events()["NoNodeIsReady"]
        for _ in range(2):  # as after an operator that could not say in the status what it told
            bench.api.objects[PATH]["status"]["conditions"] = []
            await bench.turn()
        assert bench.events()["NoNodeIsReady"]["series"]["count"] == 3

    run(test)


def test_an_event_that_is_refused_keeps_nothing_from_being_done() -> None:
    async def test(bench: Bench) -> None:
        bench.api.fail("POST", "/events", 403, left=9)
        assert await bench.turn() is None
        assert bench.condition("Accepted")["status"] == "True"
        assert bench.events() == {}

    run(test)


def test_requests_that_a_pod_cut_off_at_its_end_are_told_once() -> None:
    async def test(bench: Bench) -> None:
        labels = {"oasiskv.io/service": "chat", "oasiskv.io/role": "decode"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "chat-1", "namespace": "llm", "labels": labels},
            "spec": {"containers": []},
        }
        bench.api.put(pod)
        await bench.until(lambda: len(bench.store.pods(KEY)) == 1)
        await bench.turn()
        assert "RequestsCutOff" not in bench.events()
        terminated = {"exitCode": 0, "message": "3 requests had not ended when the process did"}
        bench.api.put({**pod, "status": {"containerStatuses": [{"state": {"terminated": terminated}}]}})
        await bench.until(lambda: bench.store.pods(KEY)[0].last_words != "")
        await bench.turn()
        told = bench.events()["RequestsCutOff"]
        assert (told["type"], told["note"]) == ("Warning", f"pod chat-1: {terminated['message']}")
        await bench.turn()
        assert "series" not in bench.events()["RequestsCutOff"]

    run(test)


class Answers(Asks):
    """Asks whose answers are given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []
        self.rdma_problem = ""

    async def get(self, pod: Pod, path: str) -> str:
        self.asked.append((pod.name, path))
        return json.dumps({"rdma": {"problem": self.rdma_problem, "note": "", "closeness": "PIX"}})


def test_pods_are_asked_what_they_see_of_rdma_now_and_then_and_more_often_while_it_is_wrong() -> None:
    async def test(bench: Bench) -> None:
        await bench.asks.close()
        bench.asks = asks = Answers()
        bench.shell = bench.make_shell()
        assert await bench.turn() is None
        assert asks.asked == []
        pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": []}}
        labels = {"oasiskv.io/service": "chat", "oasiskv.io/role": "prefill"}
        metadata = {"name": "chat-1", "namespace": "llm", "labels": labels}
        bench.api.put({**pod, "metadata": metadata, "status": {"podIP": "127.0.0.1"}})
        await bench.until(lambda: len(bench.store.pods(KEY)) == 1)
        again_s = await bench.turn()
        assert again_s is not None
        assert LOAD_S < again_s <= RDMA_S
        assert asks.asked == [("chat-1", "/readyz")]
        assert bench.condition("RDMAReady")["message"] == "1 pods can use a port; GPU and port: 1 PIX"
        await bench.turn()
        assert len(asks.asked) == 1
        asks.rdma_problem = "gid: expected one at index 3 of mlx5_0:1, got none"
        bench.shell = bench.make_shell()
        again_s = await bench.turn()
        assert again_s is not None
        assert again_s <= LOAD_S
        assert bench.condition("RDMAReady")["status"] == "False"
        assert bench.events()["PodsCannotUseIt"]["note"] == f"RDMAReady: pod chat-1: {asks.rdma_problem}"
        bench.api.remove(PODS.path("llm", "chat-1"))
        await bench.until(lambda: not bench.store.pods(KEY))
        assert await bench.turn() is None

    run(test)
