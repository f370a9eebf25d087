"""Staging, prefill and decode as processes of their own, with real vLLM engines, on loopback."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import grpc
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasiskv.cli.client import parse_metrics
from oasiskv.cli.launch import free_port
from oasiskv.core.errors import RequestAbortedError
from oasiskv.core.fingerprint import Fingerprint
from oasiskv.engine.testing import random_requests, write_tiny_model
from oasiskv.protos.decode.v1 import decode_pb2, decode_pb2_grpc
from oasiskv.protos.generation.v1 import generation_pb2 as pb
from oasiskv.protos.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from oasiskv.protos.staging.v1 import staging_pb2, staging_pb2_grpc
from oasiskv.services.rpc.status import error_of
from oasiskv.services.staging.process import StagingProcess

pytestmark = pytest.mark.timeout(400)

FINGERPRINT = Fingerprint(model_hash="tiny", dtype="float32", block_size=16, num_layers=3, num_kv_heads=2, head_dim=32)
BUDGET = 6
PROMPTS = [request["prompt"] for request in random_requests([201, 347, 256, 400], 1)]
Result = TypeVar("Result")
# Asks for what depends on earlier tokens, so the whole request is computed by the decode service.
LOCAL = {"min_tokens": 1}


@dataclass
class Cluster:
    staging: StagingProcess
    prefill: subprocess.Popen[str]
    prefill_address: str
    decode: subprocess.Popen[str]
    decode_address: str
    http: str
    prefill_metrics: int
    decode_metrics: int
    logs: Path

    def run(self, work: "Callable[[Stubs], Awaitable[Result]]") -> Result:
        """Carry calls out on channels of their own."""

        async def within() -> Result:
            async with (
                grpc.aio.insecure_channel(self.decode_address) as decode,
                grpc.aio.insecure_channel(self.prefill_address) as prefill,
                grpc.aio.insecure_channel(self.staging.address) as staging,
            ):
                stubs = Stubs(
                    decode_pb2_grpc.DecodeStub(decode),
                    prefill_pb2_grpc.PrefillStub(prefill),
                    staging_pb2_grpc.StagingStub(staging),
                )
                return await work(stubs)

        return asyncio.run(within())


@dataclass
class Stubs:
    decode: Any
    prefill: Any
    staging: Any

    async def generate(self, prompt: list[int], **sampling: Any) -> list[Any]:
        """Return all messages of a request, greedy unless said otherwise."""
        values = {"temperature": 0.0, "max_tokens": 24} | sampling
        request = decode_pb2.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)), sampling=pb.Sampling(**values)
        )
        return [response async for response in self.decode.Generate(request)]

    async def stats(self) -> tuple[Any, Any, Any]:
        return (
            await self.decode.Stats(decode_pb2.StatsRequest()),
            await self.prefill.Stats(prefill_pb2.StatsRequest()),
            await self.staging.Stats(staging_pb2.StatsRequest()),
        )

    async def until_idle(self) -> None:
        """Return once nobody holds anything."""
        async with asyncio.timeout(30):
            while True:
                decode, prefill, staging = await self.stats()
                if (decode.num_requests, prefill.num_requests, staging.num_leases) == (0, 0, 0):
                    assert staging.num_free_blocks == staging.num_blocks
                    return
                await asyncio.sleep(0.1)


def tokens(responses: list[Any]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def write_model(folder: Path) -> Path:
    """Write a tiny model whose tokenizer knows the words w0 to w255."""
    write_tiny_model(folder, num_layers=3)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(256)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def start(name: str, config: Path, logs: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a service, and return it with the ports that it printed."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", f"oasiskv.services.{name}", "--config", str(config)]
    log = logs / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=env, start_new_session=True
        )
    assert process.stdout is not None
    for line in process.stdout:
        if "listens on port" in line:
            # vLLM logs there too, and would wait for a reader.
            threading.Thread(target=drain, args=(process.stdout, logs / f"{name}.out"), daemon=True).start()
            words = line.replace(",", "").split()
            return process, [int(word) for word in words if word.isdigit()]
    process.wait(timeout=60)
    process.stdout.close()
    pytest.fail(f"{name} did not start:\n{log.read_text()[-4000:]}")


def drain(source: TextIO, path: Path) -> None:
    with path.open("w") as target, source:
        for line in source:
            target.write(line)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = write_model(folder / "model")
    with StagingProcess(folder, FINGERPRINT, 256) as staging:
        common = f"""
[engine]
model = {json.dumps(str(model))}
[engine.lookahead]
budget_blocks = {BUDGET}
switch = "early"
host_pool_bytes = "64MiB"
debug_verify = true
[engine.arguments]
max_model_len = 1024
max_num_seqs = 8
enforce_eager = true
kv_cache_memory_bytes = {2**27}
[fingerprint]
model_hash = "tiny"
dtype = "float32"
block_size = 16
num_layers = 3
num_kv_heads = 2
head_dim = 32
"""
        prefill_port = free_port()  # so that both may load at the same time
        own = {
            "prefill": f'address = "127.0.0.1:{prefill_port}"\nhandle_ttl_s = 5\nrevision = "p7"\n',
            "decode": f'address = "127.0.0.1:0"\nhttp_address = "127.0.0.1:0"\nrevision = "d7"\n'
            f'prefills = ["127.0.0.1:{prefill_port}"]\n',
        }
        for name, text in own.items():
            both = f'[{name}]\nstaging = "{staging.address}"\nmetrics_address = "127.0.0.1:0"\n'
            (folder / f"{name}.toml").write_text(common + both + text)
        with contextlib.ExitStack() as processes:
            with ThreadPoolExecutor() as pool:
                starting = [(name, pool.submit(start, name, folder / f"{name}.toml", folder)) for name in own]
            for name, started in starting:
                if started.exception() is None:
                    processes.callback(stop, started.result()[0], folder / f"{name}.log")
            prefill, (_, prefill_metrics) = starting[0][1].result()
            decode, (decode_port, http_port, decode_metrics) = starting[1][1].result()
            cluster = Cluster(
                staging,
                prefill,
                f"127.0.0.1:{prefill_port}",
                decode,
                f"127.0.0.1:{decode_port}",
                f"http://127.0.0.1:{http_port}",
                prefill_metrics,
                decode_metrics,
                folder,
            )
            wait_until_ready(cluster)
            yield cluster


def stop(process: subprocess.Popen[str], log: Path) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    code = process.wait(timeout=60)
    assert code == 0, log.read_text()[-4000:]


def wait_until_ready(cluster: Cluster, *, is_ready: bool = True) -> None:
    async def wait(stubs: Stubs) -> None:
        while (await stubs.decode.Stats(decode_pb2.StatsRequest())).is_ready != is_ready:
            await asyncio.sleep(0.2)

    async def wait_long(stubs: Stubs) -> None:
        async with asyncio.timeout(60):
            await wait(stubs)

    cluster.run(wait_long)


def test_handed_over_requests_get_the_tokens_of_a_single_engine_and_fetch_a_part_of_their_kv(
    cluster: Cluster,
) -> None:
    async def check(stubs: Stubs) -> None:
        before, _, _ = await stubs.stats()
        handed = await asyncio.gather(*(stubs.generate(prompt) for prompt in PROMPTS))
        after, prefill, _ = await stubs.stats()
        whole = await asyncio.gather(*(stubs.generate(prompt, **LOCAL) for prompt in PROMPTS))
        assert [tokens(one) for one in handed] == [tokens(one) for one in whole]
        assert after.num_handovers_total - before.num_handovers_total == len(PROMPTS)
        assert after.num_recomputed_total == before.num_recomputed_total
        full_bytes = after.full_bytes_total - before.full_bytes_total
        assert 0 < after.admitted_bytes_total - before.admitted_bytes_total < full_bytes
        assert after.missed_bytes_total > before.missed_bytes_total
        assert prefill.num_requests_total >= len(PROMPTS)
        assert prefill.staged_bytes_total > 0
        usage = handed[0][-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (201, 24)
        assert handed[0][-1].finish_reason == pb.FINISH_REASON_LENGTH
        texts = ["".join(response.text for response in one) for one in handed]
        assert texts[0].count("w") == 24
        assert texts == ["".join(response.text for response in one) for one in whole]
        await stubs.until_idle()

    cluster.run(check)


def test_log_probabilities_and_seeds_hold_across_a_handover(cluster: Cluster) -> None:
    async def check(stubs: Stubs) -> None:
        handed, whole = await asyncio.gather(
            stubs.generate(PROMPTS[1], logprobs=2, max_tokens=6),
            stubs.generate(PROMPTS[1], logprobs=2, max_tokens=6, **LOCAL),
        )
        ours = [entries for response in handed for entries in response.logprobs]
        theirs = [entries for response in whole for entries in response.logprobs]
        assert len(ours) == 6
        for mine, other in zip(ours, theirs, strict=True):
            assert [one.token_id for one in mine.candidates] == [one.token_id for one in other.candidates]
            expected = [one.logprob for one in other.candidates]
            assert [one.logprob for one in mine.candidates] == pytest.approx(expected, abs=1e-4)
        seeded = [tokens(await stubs.generate(PROMPTS[2], temperature=1.0, seed=11)) for _ in range(2)]
        assert seeded[0] == seeded[1]
        assert seeded[0] != tokens(await stubs.generate(PROMPTS[2], temperature=1.0, seed=12))

    cluster.run(check)


def test_a_cancelled_stream_releases_everything(cluster: Cluster) -> None:
    async def check(stubs: Stubs) -> None:
        for num_responses in (0, 1, 5):
            prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPTS[3]))
            sampling = pb.Sampling(temperature=0.0, max_tokens=500)
            call = stubs.decode.Generate(decode_pb2.GenerateRequest(prompt=prompt, sampling=sampling))
            for _ in range(num_responses):
                assert (await call.read()).token_ids
            if num_responses == 0:
                await asyncio.sleep(0.05)
            call.cancel()
            await stubs.until_idle()

    cluster.run(check)


def test_a_request_that_is_over_its_deadline_ends_and_releases_everything(cluster: Cluster) -> None:
    async def check(stubs: Stubs) -> None:
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPTS[1]))
        request = decode_pb2.GenerateRequest(prompt=prompt, sampling=pb.Sampling(temperature=0.0, max_tokens=600))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stubs.decode.Generate(request, timeout=1.0):
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stubs.until_idle()

    cluster.run(check)


def test_an_aborted_request_ends_with_its_error_after_right_tokens(cluster: Cluster) -> None:
    async def check(stubs: Stubs) -> None:
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPTS[0]))
        sampling = pb.Sampling(temperature=0.0, max_tokens=800)
        request = decode_pb2.GenerateRequest(request_id="mine", prompt=prompt, sampling=sampling)
        call = stubs.decode.Generate(request)
        responses = aiter(call)
        first = await anext(responses)
        aborted = await stubs.decode.Abort(decode_pb2.AbortRequest(request_ids=["mine", "other"]))
        assert aborted.num_aborted == 1
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in responses:
                pass
        assert isinstance(error_of(failure.value), RequestAbortedError)
        assert list(first.token_ids) == tokens(await stubs.generate(PROMPTS[0], max_tokens=24))[: len(first.token_ids)]
        await stubs.until_idle()

    cluster.run(check)


def test_short_prompts_and_single_tokens_need_no_handover(cluster: Cluster) -> None:
    async def check(stubs: Stubs) -> None:
        before, _, _ = await stubs.stats()
        assert len(tokens(await stubs.generate(PROMPTS[0][:40], max_tokens=5))) == 5
        (single,) = await stubs.generate(PROMPTS[0], max_tokens=1)
        assert list(single.token_ids) == tokens(await stubs.generate(PROMPTS[0], **LOCAL))[:1]
        assert single.finish_reason == pb.FINISH_REASON_LENGTH
        after, _, _ = await stubs.stats()
        assert after.num_handovers_total == before.num_handovers_total
        await stubs.until_idle()

    cluster.run(check)


def test_the_openai_client_gets_the_same_text_streamed_and_whole(cluster: Cluster) -> None:
    num_handovers = cluster.run(lambda stubs: stubs.stats())[0].num_handovers_total
    client = openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="none")
    (model,) = client.models.list().data

    def complete(**more: Any) -> Any:
        return client.completions.create(model=model.id, prompt=PROMPTS[1], max_tokens=20, temperature=0, **more)

    whole = complete()
    assert whole.choices[0].text == complete(extra_body=LOCAL).choices[0].text
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (347, 20)
    streamed = "".join(chunk.choices[0].text for chunk in complete(stream=True))
    assert streamed == whole.choices[0].text
    # A stop text may lie across the first token, which another engine made, and the next ones.
    words = whole.choices[0].text.replace("w", " w").split()
    stop = "".join(words[:3])[1:]
    stopped = complete(stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == whole.choices[0].text[: whole.choices[0].text.index(stop)]
    client.close()

    async def check(stubs: Stubs) -> None:
        await stubs.until_idle()
        assert (await stubs.stats())[0].num_handovers_total - num_handovers == 3

    cluster.run(check)


def test_prompts_are_computed_here_while_no_prefill_service_answers(cluster: Cluster) -> None:
    cluster.prefill.send_signal(signal.SIGSTOP)
    try:
        wait_until_ready(cluster, is_ready=False)

        async def check(stubs: Stubs) -> list[int]:
            before = await stubs.decode.Stats(decode_pb2.StatsRequest())
            got = tokens(await stubs.generate(PROMPTS[0]))
            after = await stubs.decode.Stats(decode_pb2.StatsRequest())
            assert after.num_handovers_total == before.num_handovers_total
            assert after.num_recomputed_total == before.num_recomputed_total + 1
            return got

        alone = cluster.run(check)
    finally:
        cluster.prefill.send_signal(signal.SIGCONT)
    wait_until_ready(cluster)

    async def again(stubs: Stubs) -> list[int]:
        return tokens(await stubs.generate(PROMPTS[0]))

    assert cluster.run(again) == alone


def test_health_follows_readiness(cluster: Cluster) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    wait_until_ready(cluster)

    async def check(address: str) -> int:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status: int = (await stub.Check(health_pb2.HealthCheckRequest())).status
            return status

    deadline = time.monotonic() + 10
    for address in (cluster.prefill_address, cluster.decode_address):
        while asyncio.run(check(address)) != health_pb2.HealthCheckResponse.SERVING:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def get(port: int, path: str) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_probes_tell_the_state_of_a_process_and_of_the_path_of_kv(cluster: Cluster) -> None:
    wait_until_ready(cluster)
    for port in (cluster.prefill_metrics, cluster.decode_metrics):
        assert get(port, "/livez")[0] == 200
    status, body = get(cluster.prefill_metrics, "/readyz")
    facts = json.loads(body)
    # What it sees of RDMA depends on the machine, how bytes move does not.
    assert facts.pop("rdma")["path"] in ("mapped", "one-sided", "stream")
    assert (status, facts) == (
        200,
        {
            "role": "prefill",
            "revision": "p7",
            "is_alive": True,
            "is_ready": True,
            "is_draining": False,
            "num_requests": 0,
            "reasons": [],
        },
    )
    status, body = get(cluster.decode_metrics, "/readyz")
    facts = json.loads(body)
    assert (status, facts["role"], facts["revision"], facts["is_ready"]) == (200, "decode", "d7", True)
    path = {"address": cluster.prefill_address, "is_ready": True, "is_verified": True, "revision": "p7", "reason": ""}
    assert facts["kv_path"] == {"is_verified": True, "peers": [path]}
    stats = cluster.run(lambda stubs: stubs.stats())[0]
    assert stats.revision == "d7"
    assert [(one.prefill, one.is_verified, one.revision) for one in stats.kv_paths] == [
        (cluster.prefill_address, True, "p7")
    ]


def test_the_documented_metrics_are_shown_with_what_happened(cluster: Cluster) -> None:
    async def generate(stubs: Stubs) -> None:
        await stubs.generate(PROMPTS[0])
        await stubs.until_idle()

    cluster.run(generate)
    document = (Path(__file__).parents[2] / "docs/design/0004-prefill-and-decode.md").read_text()
    documented = set(re.findall(r"`(oasiskv_\w+)`", document))
    # Errors are shown once there are any, staging has a process of its own, and `oasiskv_rpc_*` stands for several.
    documented -= {"oasiskv_decode_prefill_errors_total", "oasiskv_rpc_"}
    documented -= {"oasiskv_stage", "oasiskv_prefix", "oasiskv_lease"}
    prefill, decode = (get(port, "/metrics")[1] for port in (cluster.prefill_metrics, cluster.decode_metrics))
    shown = parse_metrics(prefill), parse_metrics(decode)
    assert documented - shown[0].keys() - shown[1].keys() == set()
    assert shown[0]["oasiskv_prefill_handovers_total"] >= 1
    assert shown[0]["oasiskv_prefill_kv_capacity_bytes"] >= 64 * 2**20
    assert shown[1]["oasiskv_decode_handovers_total"] >= 1
    assert shown[1]["oasiskv_decode_kv_path_verified"] == 1
    assert 0 < shown[1]["oasiskv_admitted_bytes_total"] < shown[1]["oasiskv_handover_bytes_total"]
    assert "vllm:num_requests_running" in decode
    assert decode.count("# TYPE process_resident_memory_bytes") == 1
