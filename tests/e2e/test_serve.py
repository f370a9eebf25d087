"""The `oasiskv` command on a real server with SmolLM2 on this machine: it answers, counts, refuses and stops."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oasiskv.cli.client import Answer, ask, read_metrics
from oasiskv.cli.demo import find_text
from oasiskv.cli.launch import find_device, free_port
from oasiskv.core.errors import InvalidRequestError

# vLLM starts in 25 s on two idle cores, and in minutes on busy ones.
pytestmark = pytest.mark.timeout(600)
if find_device() != "cpu":
    pytestmark = pytest.mark.skip(reason="vLLM is not the CPU build here")

BUDGET_BLOCKS, BLOCK_SIZE = 16, 16
NUM_TOKENS = 24


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "oasiskv.cli", *arguments]


def processes_of(session: int) -> dict[int, str]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, text = stat.read_text().partition(" (")
        except OSError:
            continue
        name, _, rest = text.rpartition(")")
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state != "Z":
            found[int(pid)] = name
    return found


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def wait_for_line(lines: Iterator[str], word: str) -> list[str]:
    read = []
    for line in lines:
        read.append(line)
        if word in line:
            return read
    raise AssertionError(f"the server ended without {word!r}:\n{''.join(read)}")


def ask_about_the_text(port: int, model: str) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    request = {
        "model": model,
        "messages": [{"role": "user", "content": find_text().read_text()[:4000]}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    return ask(port, request, pieces.append), pieces


def test_a_server_streams_answers_publishes_its_counts_and_leaves_nothing_on_ctrl_c(smollm2: Path) -> None:
    port = free_port()
    arguments = ["serve", str(smollm2), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2k"]
    arguments += ["--budget-blocks", str(BUDGET_BLOCKS), "--served-model-name", "small"]
    server = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        log = wait_for_line(iter(server.stderr.readline, ""), "] ready\n")
        assert not any("WARNING" in line for line in log)
        assert [line for line in log if re.search(r"Host memory for KV: \d+\.\d MiB ready after \d+\.\d s", line)]
        session = child_of(server.pid)
        assert len(processes_of(session)) >= 3

        answer, pieces = ask_about_the_text(port, "small")
        assert "".join(pieces) == answer.text
        assert len(pieces) > NUM_TOKENS / 2
        assert answer.num_tokens == NUM_TOKENS
        check_metrics(read_metrics(port), answer)
        again, _ = ask_about_the_text(port, "small")
        assert again.text == answer.text
        with pytest.raises(InvalidRequestError) as refused:
            ask(port, {"model": "small", "messages": [{"role": "user", "content": find_text().read_text()}]}, print)
        assert all(word in str(refused.value) for word in ("BadRequestError", "400", "2000"))
        with ThreadPoolExecutor() as pool:
            cut_off = pool.submit(end_of_a_long_answer, port, "small")
            wait_until_one_runs(port)
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 130
            # A server that had to be killed would have answered nothing. Whether the engine still tells the server of
            # the abort, or is gone by then, is a matter of moments.
            assert cut_off.result() in ((500, None), (200, "abort"))
        assert server.stderr.read().splitlines()[-1] == "stopping"
        wait_until_gone(session)
    finally:
        server.terminate()
        server.communicate()


def end_of_a_long_answer(port: int, model: str) -> tuple[int, str | None]:
    """Return the status and, with an answer, why it ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        body = {"model": model, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return response.status, None
        return 200, json.loads(response.read())["choices"][0]["finish_reason"]
    finally:
        connection.close()


def wait_until_one_runs(port: int) -> None:
    end = time.monotonic() + 60
    while read_metrics(port, "vllm:num_requests_running") != {"vllm:num_requests_running": 1}:
        assert time.monotonic() < end
        time.sleep(0.1)


def wait_until_gone(session: int) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and processes_of(session):
        time.sleep(0.1)
    assert processes_of(session) == {}


def test_a_server_whose_engine_is_killed_says_so_and_leaves_nothing(smollm2: Path) -> None:
    arguments = ["serve", str(smollm2), "--host", "127.0.0.1", "--port", str(free_port()), "--max-model-len", "512"]
    server = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        wait_for_line(iter(server.stderr.readline, ""), "] ready\n")
        session = child_of(server.pid)
        (engine,) = [pid for pid, name in processes_of(session).items() if name.startswith("VLLM::Engine")]
        os.kill(engine, signal.SIGKILL)
        _, log = server.communicate(timeout=120)
    except BaseException:
        server.terminate()
        server.communicate()
        raise
    assert server.returncode == 2
    assert log.splitlines()[-1].startswith("error: engine: expected its processes to run, got the end of one")
    wait_until_gone(session)


def check_metrics(metrics: dict[str, float], answer: Answer) -> None:
    """Check the counters of one sparse request against what follows from its length."""
    number = {name.removeprefix("oasiskv_"): value for name, value in metrics.items()}
    units = 30 * 3
    steps = NUM_TOKENS - 1
    assert number["sparse_steps_total"] == number["lookahead_self_total"] == steps
    assert number["dense_steps_total"] == number["lookahead_draft_total"] == 0
    assert number["switches_total"] == number["finished_requests_total"] == 1
    predicted = number["predicted_blocks_total"]
    assert predicted == sum(number[f"{kind}_blocks_total"] for kind in ("hit", "fetched", "deferred"))
    # The background of the last step may be counted with a later one.
    assert units * BUDGET_BLOCKS * (steps - 1) <= predicted <= units * BUDGET_BLOCKS * steps
    assert number["fetched_blocks_total"] <= number["evicted_blocks_total"]
    unit_bytes = BLOCK_SIZE * 2 * 64 * 4
    assert number["load_bytes_total"] == number["fetched_blocks_total"] * unit_bytes
    num_tokens = answer.num_prompt_tokens + NUM_TOKENS - 1
    num_complete = num_tokens // BLOCK_SIZE
    assert number["store_bytes_total"] == num_complete * units * unit_bytes
    assert number["finished_dense_blocks_total"] == -(-num_tokens // BLOCK_SIZE)
    pages = -(-num_complete // BLOCK_SIZE)
    assert number["finished_engine_blocks_total"] == BUDGET_BLOCKS + pages + 1
    assert number["engine_blocks_held"] == number["host_blocks_held"] == 0
    assert number["host_blocks"] > 0
    assert (number["budget_blocks"], number["cap_blocks"]) == (BUDGET_BLOCKS, 4)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--dry-run", "--runner", "pooling"],
            "error: --runner: expected generate, got pooling; or serve without OasisKV",
        ),
        (["--no-such-flag"], "error: vLLM: unrecognized arguments: --no-such-flag"),
        (
            ["--dry-run", "-asc", "2"],
            "error: --api-server-count: expected 1, got 2; `vllm serve` takes it, with the flags that --dry-run shows",
        ),
        (
            ["--kv-sharing-fast-prefill"],
            "error: --kv-sharing-fast-prefill: expected off, got on; or serve without OasisKV",
        ),
    ],
)
def test_what_vllm_or_the_worker_refuses_ends_in_one_line(smollm2: Path, flags: Sequence[str], line: str) -> None:
    arguments = command("serve", str(smollm2), "--port", str(free_port()), "--max-model-len", "2k", *flags)
    done = subprocess.run(arguments, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == line
    assert "Traceback" not in done.stderr


def test_the_quick_evaluation_is_about_sparse_steps_and_near_to_dense(smollm2: Path) -> None:
    arguments = ["eval", "quick", "--model", str(smollm2), "--context", "640", "--steps", "24", "--windows", "2"]
    done = subprocess.run(
        command(*arguments, "--budget-blocks", "24"), capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["sparse"] == "100.0 % of 46 decode steps"
    assert lines["command"] == f"oasiskv {' '.join(arguments)} --budget-blocks 24"
    agreement = float(lines["all"].partition("same next token ")[2].partition(" %")[0])
    assert agreement > 70
    assert json.loads(lines["all"].partition("KL ")[2]) < 0.5
