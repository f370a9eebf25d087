import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
from aiohttp import web

from oasiskv.operator import asks as asks_module
from oasiskv.operator.asks import Asks, Loads, numbers, rdma_report, why_unverified
from oasiskv.operator.facts import RdmaReport
from oasiskv.operator.observe import Pod

PATH = ("r1", "r2")


def pod(name: str = "a", ip: str = "127.0.0.1", *, is_ready: bool = True) -> Pod:
    return Pod(
        namespace="llm",
        name=name,
        labels={},
        node="n",
        requests={"cpu": Fraction(1)},
        configs=(),
        ip=ip,
        is_ready=is_ready,
        has_ended=False,
    )


def peer(**changes: Any) -> dict[str, Any]:
    return {"address": "a:1", "is_ready": True, "is_verified": True, "revision": "r1", "reason": ""} | changes


def answer(*peers: dict[str, Any], **changes: Any) -> str:
    said = {
        "role": "decode",
        "revision": "r2",
        "is_ready": True,
        "kv_path": {"is_verified": True, "peers": list(peers)},
    }
    return json.dumps(said | changes)


def rdma(problem: str = "", note: str = "", closeness: str = "PIX") -> str:
    return json.dumps({"role": "prefill", "rdma": {"problem": problem, "note": note, "closeness": closeness}})


def test_the_first_pod_that_cannot_use_rdma_is_named_and_all_are_counted() -> None:
    found = rdma_report([("a", rdma()), ("b", rdma("gid: x")), ("c", rdma("port: y", "slow")), ("d", ""), ("e", "{}")])
    assert found == RdmaReport(num_pods=3, problem="pod b: gid: x", note="pod c: slow", ways="3 PIX")
    found = rdma_report([("a", rdma()), ("b", rdma(closeness="SYS", note="far")), ("c", rdma(closeness=""))])
    assert found == RdmaReport(num_pods=3, note="pod b: far", ways="1 PIX, 1 SYS")


@pytest.mark.parametrize("said", ["", "[]", "<html>", "{}", '{"rdma": 1}', '{"rdma": {"problem": ""}}'])
def test_who_says_nothing_of_rdma_is_nobodys_blame(said: str) -> None:
    assert rdma_report([("a", said)]) is None


def test_a_block_that_crossed_between_both_revisions_is_what_counts() -> None:
    assert why_unverified(answer(peer(is_verified=False), peer()), PATH) is None


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (answer(peer(is_verified=False, reason="UnsupportedError: other model")), "UnsupportedError: other model"),
        (answer(peer(revision="r0")), "it knows 1 prefill services"),
        (answer(), "it knows 0 prefill services"),
        (answer(reasons=["staging: gone"]), "staging: gone"),
        (answer(peer(), revision="r0"), ""),
        (answer(peer(), role="prefill"), ""),
        ("", ""),
        ("<html>", "its answer is not understood"),
        ("[]", "its answer is not understood"),
        (json.dumps({"role": "decode", "revision": "r2"}), "its answer is not understood"),
        (answer({"is_verified": True}), "its answer is not understood"),
    ],
)
def test_nothing_else_does_and_the_reason_is_passed_on(said: str, reason: str) -> None:
    assert why_unverified(said, PATH) == reason


def with_pods(
    answers: Mapping[str, str], test: Callable[[Asks], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a test while 127.0.0.1 answers as a pod."""

    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=answers.get(request.path, ""), status=503 if request.path == "/readyz" else 200)

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr(asks_module, "METRICS_PORT", runner.addresses[0][1])
        asks = Asks()
        try:
            await test(asks)
        finally:
            await asks.close()
            await runner.cleanup()

    asyncio.run(main())


def test_one_pod_of_several_is_enough_and_those_that_are_not_there_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(asks: Asks) -> None:
        pods = [pod("gone", "127.0.0.2"), pod("no-address", ""), pod("b", is_ready=False)]
        assert await asks.why_unverified(pods, PATH) is None
        assert await asks.why_unverified(pods[:2], PATH) == "no decode pod has answered"
        assert await asks.why_unverified([], PATH) == "no decode pod has answered"

    with_pods({"/readyz": answer(peer())}, test, monkeypatch)


METRICS = """
# HELP oasiskv_prefill_queued_tokens x
# TYPE oasiskv_prefill_queued_tokens gauge
oasiskv_prefill_queued_tokens 1234.0
oasiskv_decode_kv_bytes{place="engine"} 10.0
oasiskv_decode_kv_bytes{place="host"} 6e+09
oasiskv_decode_kv_capacity_bytes{place="engine"} 100.0
oasiskv_decode_kv_capacity_bytes{place="host"} 8e+09
oasiskv_stall_seconds_total{model="a",worker="0"} 7.5
oasiskv_stall_seconds_total{model="a",worker="1"} 0.5
oasiskv_stall_seconds_created{model="a",worker="0"} 1.7e+09
vllm:num_requests_running 3.0
"""


def test_samples_are_read_by_name_and_place() -> None:
    found = numbers(METRICS)
    assert found["oasiskv_prefill_queued_tokens"] == 1234
    assert found["oasiskv_decode_kv_bytes host"] == 6e9
    assert found["oasiskv_stall_seconds_total"] == 8
    assert numbers("nonsense\n{}") == {}


def test_loads_are_those_of_the_pods_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, now_s = {"/metrics": METRICS}, [100.0]

    async def test(asks: Asks) -> None:
        loads = Loads(asks, lambda: now_s[0])
        pods = [pod("a"), pod("b"), pod("gone", "127.0.0.2"), pod("loads", is_ready=False)]
        prefill = await loads.ask("prefill", pods)
        assert (prefill.num_pods, prefill.num_silent, prefill.queued_tokens) == (2, 1, 2468)
        first = await loads.ask("decode", pods)
        assert (first.num_pods, first.num_silent, first.kv_share, first.stall_share) == (2, 1, 0.75, 0.0)
        now_s[0] += 10
        answers["/metrics"] = METRICS.replace('worker="1"} 0.5', 'worker="1"} 3.5')
        assert (await loads.ask("decode", pods)).stall_share == pytest.approx(0.3)
        now_s[0] += 10
        answers["/metrics"] = 'oasiskv_stall_seconds_total{worker="1"} 0.1\n'  # started anew
        assert (await loads.ask("decode", pods)).stall_share == 0.0
        assert (await loads.ask("decode", [])).num_pods == 0

    with_pods(answers, test, monkeypatch)
