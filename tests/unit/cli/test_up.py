"""One file becomes a process for each service; they start together, and stop in order or with the first that ends."""

import json
import os
import signal
import socket
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oasiskv.cli import launch, main
from oasiskv.cli.cluster import Cluster
from oasiskv.cli.log import ServiceLog
from oasiskv.cli.services_file import Process, file_for, split, toml
from oasiskv.core.errors import ConfigError, EngineFailedError
from oasiskv.core.service_config import read_services

FILE = """
[engine]
model = "/models/m"
[engine.arguments]
max_model_len = 512
[fingerprint]
model_hash = "m"
dtype = "float16"
block_size = 16
num_layers = 3
num_kv_heads = 2
head_dim = 8
[staging]
pool_bytes = 1000000
drain_s = 7.0
[prefill]
address = "127.0.0.1:0"
staging = "staging:7411"
[decode]
address = "0.0.0.0:0"
http_address = "127.0.0.1:0"
prefills = ["prefill-0:7412", "prefill-1:7412"]
staging = "staging:7411"
drain_s = 9.0
"""


def test_every_process_gets_a_file_of_its_own_that_says_where_the_others_are(tmp_path: Path) -> None:
    processes = split(FILE, tmp_path, prefills=2, decodes=2)
    assert [one.name for one in processes] == ["staging", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert [one.drain_s for one in processes] == [7.0, 30.0, 30.0, 9.0, 9.0]
    staging = tomllib.loads(processes[0].config)
    assert staging["staging"]["memory_socket"] == str(tmp_path / "staging.sock")
    prefills = [read_services(one.config).prefill for one in processes[1:3]]
    decodes = [read_services(one.config).decode for one in processes[3:]]
    for engine in (*prefills, *decodes):
        assert engine is not None
        assert engine.staging == staging["server"]["address"]
        assert engine.engine.arguments == {"max_model_len": 512}
    addresses = tuple(one.address for one in prefills if one is not None)
    assert all(one is not None and one.prefills == addresses for one in decodes)
    assert [one.http_address for one in processes[3:]] == [one.http_address for one in decodes if one is not None]
    used = [address for one in (*prefills, *decodes) if one for address in (one.address, one.metrics_address)]
    assert len(set(used)) == 8
    assert all(not address.endswith(":0") for address in used)


@pytest.mark.parametrize("has_redis", [True, False])
def test_several_staging_services_take_prefill_services_in_turn_and_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_redis: bool
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if has_redis else None)
    text = FILE + f'[disk]\nfolder = "{tmp_path}"\nmax_bytes = 1000000\n'
    processes = split(text, tmp_path, stagings=2, prefills=3)
    names = ["staging-0", "staging-1", "prefill-0", "prefill-1", "prefill-2", "decode"]
    assert [one.name for one in processes] == ["directory"] * has_redis + names
    stagings = [tomllib.loads(one.config) for one in processes if one.role == "staging"]
    addresses = [one["server"]["address"] for one in stagings]
    assert len(set(addresses)) == 2
    assert len({one["staging"]["memory_socket"] for one in stagings}) == 2
    assert [one["disk"]["folder"] for one in stagings] == [str(tmp_path / name) for name in names[:2]]
    assert all((tmp_path / name).is_dir() for name in names[:2])
    url = f"unix://{tmp_path}/directory.sock"
    directories = [{"url": url, "address": address} for address in addresses]
    assert [one.get("directory") for one in stagings] == (directories if has_redis else [None, None])
    used = [read_services(one.config) for one in processes if one.role in ("prefill", "decode")]
    assert [one.prefill.staging for one in used if one.prefill] == [addresses[0], addresses[1], addresses[0]]
    # Each prefill service says where its KV is.
    assert [one.decode.staging for one in used if one.decode] == [""]
    # One that is there already is used.
    own = FILE + '[directory]\nurl = "redis://elsewhere:1/0"\n'
    first = split(own, tmp_path, stagings=2)[0]
    assert first.name == "staging-0"
    assert tomllib.loads(first.config)["directory"]["url"] == "redis://elsewhere:1/0"


def test_ports_follow_those_of_the_first_process_and_one_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = FILE.replace('[decode]\naddress = "0.0.0.0:0"', f'[decode]\naddress = "127.0.0.1:{port - 1}"')
        (first,) = [one for one in split(text, tmp_path) if one.role == "decode"]
        assert f'address = "127.0.0.1:{port - 1}"' in first.config
        with pytest.raises(ConfigError, match=rf"^decode\.address: expected a free port, got {port} "):
            split(text, tmp_path, decodes=2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[staging]", "[leases]", r"staging: expected this table, got none"),
        ("[engine]", "[up]\nprefills = 0\n[engine]", r"up\.prefills: expected an integer of at least 1, got 0"),
        ("[engine]", "[up]\ndecoders = 1\n[engine]", r"up\.decoders: expected one of"),
        ("max_model_len = 512", "dtype = 'x'", r"engine\.arguments\.dtype"),
        ('address = "0.0.0.0:0"', 'address = "here"', r"decode\.address"),
        ("[engine]", "[engine", "config: expected TOML"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        split(FILE.replace(before, after), tmp_path)


def test_what_is_written_as_toml_is_read_back() -> None:
    tables = {
        "a": {
            "text": 'q"\\\n\x7f\u00fc',
            "list": [1, 2.5, "x"],
            "yes": True,
            "odd key.": 1,
            "deep": {"er": {"x": [{"y": 1}]}},
        },
        "b": {},
    }
    assert tomllib.loads(toml(tables)) == tables


def test_the_file_for_a_model_is_one_that_all_services_take(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    made = launch.prepare(launch.Request(model=str(tmp_path)), "cpu", print)
    text = file_for(made, "tiny", "127.0.0.1:0")
    processes = split(text, tmp_path)
    decode = read_services(processes[-1].config).decode
    assert decode is not None
    assert (decode.model_name, decode.engine.arguments["max_num_seqs"]) == ("tiny", 4)
    assert decode.fingerprint.dtype == "float32"
    assert decode.engine.lookahead.budget_blocks == made.plan.config.budget_blocks
    assert "gpu_memory_utilization" not in decode.engine.arguments
    # Other weights are another model.
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert file_for(made, "tiny", "127.0.0.1:0") != text
    # Prefill and decode have one GPU between them.
    shared = tomllib.loads(file_for(replace(made, device="cuda"), "tiny", "127.0.0.1:0"))
    assert 2 * shared["engine"]["arguments"]["gpu_memory_utilization"] < 1


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["up", "/nowhere/services.toml"]) == 2
    assert "FILE: expected a file, got /nowhere/services.toml" in capsys.readouterr().err


LOG = [
    ("2026-11-30 06:00:00,123 INFO oasiskv.services.serving ready", "ready"),
    ("2026-11-30 06:00:00,123 INFO httpx asked", None),
    ("2026-11-30 06:00:00,123 WARNING httpx slow", "WARNING slow"),
    ("(EngineCore pid=3) INFO 11-30 06:00:00 [a.py:3] Loading weights took 2.5 seconds", "weights loaded in 2.5 s"),
    ("oasiskv decode listens on port 3, HTTP on port 4", "listens on port 3, HTTP on port 4"),
    ("(EngineCore pid=3) INFO 11-30 06:00:00 [a.py:3] noise", None),
    ("error: fingerprint.dtype: expected float16", None),
]


def test_the_log_of_a_service_is_shown_short() -> None:
    log = ServiceLog()
    assert [log.read(line) for line, _ in LOG] == [shown for _, shown in LOG]
    assert log.is_ready.is_set()
    assert log.cause == "fingerprint.dtype: expected float16"


def test_a_service_that_listens_may_be_shown_from_a_level_on() -> None:
    log = ServiceLog("ERROR")
    shown = [log.read(line) for line, _ in LOG[:5]]
    assert shown == [None, None, *(words for _, words in LOG[2:5])]
    assert log.read(LOG[0][0]) is log.read(LOG[2][0]) is None
    assert log.read("(EngineCore pid=3) WARNING 11-30 06:00:00 [a.py:3] noise") is None
    assert log.read(LOG[0][0].replace("INFO", "ERROR")) == "ERROR ready"


SERVICE = """
import http.server, json, os, pathlib, signal, sys, threading
role, config = sys.argv[1:]
settings = json.loads(pathlib.Path(config).read_text())
events = pathlib.Path(settings["events"])
def note(what):
    with events.open("a") as file:
        file.write(f"{what} {role}\\n")
class Probe(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args):
        pass
if settings["fails"]:
    print(f"error: {role}: cannot", flush=True)
    sys.exit(2)
stopped = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stopped.set())
server = http.server.HTTPServer(("127.0.0.1", settings["port"]), Probe)
threading.Thread(target=server.serve_forever, daemon=True).start()
note("start")
print(f"oasiskv {role} listens on port 1", flush=True)
stopped.wait()
note("stop")
while events.read_text().count(f"stop {role}") < settings["until_stopped"]:
    stopped.clear()
    stopped.wait(0.01)
"""


@contextmanager
def fake_cluster(tmp_path: Path, shown: list[str], fails: str = "", num_decodes: int = 1) -> Iterator[Cluster]:
    """Start services that end when they are asked to, decode services once all of them were."""
    script = tmp_path / "service.py"
    script.write_text(textwrap.dedent(SERVICE))
    processes = []
    names = ["decode", *(f"decode-{index}" for index in range(1, num_decodes)), "prefill", "staging"]
    for name in names:
        role, port = name.partition("-")[0], launch.free_port()
        config = {"events": str(tmp_path / "events"), "port": port, "fails": role == fails}
        config["until_stopped"] = num_decodes if role == "decode" else 1
        processes.append(Process(role=role, name=name, config=json.dumps(config), metrics_port=port))
    cluster = Cluster(
        processes,
        dict(os.environ),
        shown.append,
        command=lambda role, path: [sys.executable, str(script), role, str(path)],
    )
    with cluster:
        yield cluster


def is_gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_services_stop_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    shown: list[str] = []
    with fake_cluster(tmp_path, shown) as cluster:
        pids = cluster.pids
        cluster.wait_ready(60)
    events = (tmp_path / "events").read_text().split("\n")
    assert events[3:6] == ["stop decode", "stop prefill", "stop staging"]
    assert "staging | listens on port 1" in shown
    assert "decode  | listens on port 1" in shown
    assert len(pids) == 3
    assert all(is_gone(pid) for pid in pids.values())


def test_services_of_a_role_stop_together(tmp_path: Path) -> None:
    with fake_cluster(tmp_path, [], num_decodes=3) as cluster:
        pids = cluster.pids
        cluster.wait_ready(60)
    # Each ended by itself, which none does before all of them were asked to.
    events = (tmp_path / "events").read_text().split("\n")
    assert events[5:10] == ["stop decode"] * 3 + ["stop prefill", "stop staging"]
    assert all(is_gone(pid) for pid in pids.values())


def test_a_service_that_dies_ends_all_with_its_name(tmp_path: Path) -> None:
    with fake_cluster(tmp_path, []) as cluster:
        pids = cluster.pids
        cluster.wait_ready(60)
        os.kill(pids["prefill"], signal.SIGKILL)
        with pytest.raises(EngineFailedError, match=r"^prefill ended: the server ended with exit code -9"):
            cluster.wait()
    assert all(is_gone(pid) for pid in pids.values())


def test_a_service_that_cannot_start_tells_why(tmp_path: Path) -> None:
    with (
        fake_cluster(tmp_path, [], fails="staging") as cluster,
        pytest.raises(EngineFailedError, match=r"^staging ended: staging: cannot$"),
    ):
        cluster.wait_ready(60)
