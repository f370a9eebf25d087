"""What the pods themselves say, over the plain HTTP port that each of them has."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from oasiskv.operator.facts import Load, RdmaReport
from oasiskv.operator.observe import Pod
from oasiskv.operator.settings import METRICS_PORT

TIMEOUT_S = 3.0
WIDTH = 32
"""Most pods that are asked at a time."""
NUM_ASKED = 4
"""Decode pods that are asked whether KV comes through: each says it only of itself, and one that does is enough."""
NUM_ASKED_OF_RDMA = 16
"""Pods that are asked what they see of RDMA: hosts differ, so more than one counts."""
FORGET_S = 3600.0
SAMPLE = re.compile(r"^(oasiskv_\w+)(\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
PLACE = re.compile(r'place="(\w+)"')


class Asks:
    """Asks pods."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._width = asyncio.Semaphore(WIDTH)

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def get(self, pod: Pod, path: str) -> str:
        """Return what a pod answers, whatever the code; empty if nothing."""
        if not pod.ip:
            return ""
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        try:
            async with self._width, self._session.get(f"http://{host}:{METRICS_PORT}{path}") as answer:
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return ""

    async def rdma(self, pods: Sequence[Pod]) -> RdmaReport | None:
        """Ask pods what they see of RDMA; those first that are not ready, since it may be why."""
        asked = sorted(pods, key=lambda pod: (pod.is_ready, pod.name))[:NUM_ASKED_OF_RDMA]
        answers = await asyncio.gather(*(self.get(pod, "/readyz") for pod in asked))
        return rdma_report([(pod.name, answer) for pod, answer in zip(asked, answers, strict=True)])

    async def why_unverified(self, pods: Sequence[Pod], path: tuple[str, str]) -> str | None:
        """Ask decode pods whether a block has crossed.

        Args:
            pods: Of decode.
            path: Revisions of prefill and decode that are meant.

        Returns:
            None if one has, else what a pod says of why not.
        """
        # Pods that are not ready are asked too: it may be why.
        asked = sorted(pods, key=lambda pod: not pod.is_ready)[:NUM_ASKED]
        answers = await asyncio.gather(*(self.get(pod, "/readyz") for pod in asked))
        reasons = [why_unverified(answer, path) for answer in answers]
        return None if None in reasons else next((reason for reason in reasons if reason), "no decode pod has answered")


def rdma_report(answers: Sequence[tuple[str, str]]) -> RdmaReport | None:
    """Return what pods say of RDMA.

    Args:
        answers: Names of pods, and what they answered to `/readyz`.

    Returns:
        None if none says anything of it, as images before 0.2 do.
    """
    problems, notes, near = [], [], Counter[str]()
    for name, answer in answers:
        try:
            said: Any = json.loads(answer)["rdma"] if answer else None
            problem, note, closeness = (str(said[key]) for key in ("problem", "note", "closeness"))
        except (ValueError, KeyError, TypeError):
            continue
        problems += [f"pod {name}: {problem}"] if problem else []
        notes += [f"pod {name}: {note}"] if note else []
        near[closeness] += 1
    if not near:
        return None
    return RdmaReport(
        num_pods=near.total(),
        problem=next(iter(problems), ""),
        note=next(iter(notes), ""),
        ways=", ".join(f"{number} {closeness}" for closeness, number in sorted(near.items()) if closeness),
    )


def why_unverified(answer: str, path: tuple[str, str]) -> str | None:
    """Return why an answer to `/readyz` does not say that a block has crossed; None if it does.

    Args:
        answer: Body of a decode pod's answer; empty if there was none.
        path: Revisions of prefill and decode that are meant.
    """
    prefill, decode = path
    try:
        said: Any = json.loads(answer) if answer else {}
        if said.get("role") != "decode" or said.get("revision") != decode:
            return ""  # of another revision, which has not been replaced yet
        peers = said["kv_path"]["peers"]
        if any(peer["is_verified"] and peer["revision"] == prefill for peer in peers):
            return None
        reasons = [str(peer["reason"]) for peer in peers if peer["revision"] in (prefill, "") and peer.get("reason")]
        return next(iter([*reasons, *said.get("reasons", ())]), "") or f"it knows {len(peers)} prefill services"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its answer is not understood"


class Loads:
    """Asks the pods of a role for their load; a rate needs what they said the time before, which is kept here."""

    def __init__(self, asks: Asks, clock: Callable[[], float] = time.monotonic) -> None:
        self._asks, self._clock = asks, clock
        self._stalls: dict[tuple[str, str], tuple[float, float]] = {}

    async def ask(self, role: str, pods: Sequence[Pod]) -> Load:
        """Return the load of pods of a role, of which those that are not ready yet are left out."""
        asked = [pod for pod in pods if pod.is_ready]
        answers = await asyncio.gather(*(self._asks.get(pod, "/metrics") for pod in asked))
        now_s, said = self._clock(), []
        for pod, answer in zip(asked, answers, strict=True):
            if found := numbers(answer):
                said.append(self._load(role, pod, found, now_s))
        self._stalls = {key: seen for key, seen in self._stalls.items() if seen[0] > now_s - FORGET_S}
        number = max(1, len(said))
        return Load(
            num_pods=len(said),
            num_silent=len(asked) - len(said),
            queued_tokens=sum(each.queued_tokens for each in said),
            kv_share=sum(each.kv_share for each in said) / number,
            stall_share=sum(each.stall_share for each in said) / number,
        )

    def _load(self, role: str, pod: Pod, found: Mapping[str, float], now_s: float) -> Load:
        if role == "prefill":
            return Load(num_pods=1, queued_tokens=found.get("oasiskv_prefill_queued_tokens", 0.0))
        shares = [
            used / room
            for place in ("engine", "host")
            if (room := found.get(f"oasiskv_decode_kv_capacity_bytes {place}", 0.0)) > 0
            and (used := found.get(f"oasiskv_decode_kv_bytes {place}", 0.0)) >= 0
        ]
        stalled_s, key = found.get("oasiskv_stall_seconds_total", 0.0), (pod.namespace, pod.name)
        before_s, before = self._stalls.get(key, (now_s, stalled_s))
        self._stalls[key] = now_s, stalled_s
        # A counter that went back is that of a process that was started anew.
        share = max(0.0, stalled_s - before) / (now_s - before_s) if now_s > before_s else 0.0
        return Load(num_pods=1, kv_share=max(shares, default=0.0), stall_share=share)


def numbers(text: str) -> Mapping[str, float]:
    """Return the samples of OasisKV in a text of Prometheus, by name and, where there is one, place."""
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(text):
        place = PLACE.search(labels)
        key = f"{name} {place[1]}" if place else name
        found[key] = found.get(key, 0.0) + float(value)
    return found
