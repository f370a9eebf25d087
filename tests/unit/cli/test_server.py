"""A child process that is no vLLM but behaves like one: its log, its children, its end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli.launch import free_port
from oasiskv.cli.server import Server, stopped_by_sigterm
from oasiskv.core.errors import EngineFailedError

READY = 'print("INFO:     Application startup complete.", flush=True)'


def make_server(tmp_path: Path, code: str, shown: list[str] | None = None, **options: Any) -> Server:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(code))
    show = (shown if shown is not None else []).append
    return Server([sys.executable, str(script)], dict(os.environ), show, **options)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_log_is_shown_short_and_verbose_shows_all_of_it(tmp_path: Path) -> None:
    code = f"print('noise')\n{READY}\nimport time\ntime.sleep(60)"
    shown: list[str] = []
    with make_server(tmp_path, code, shown) as server:
        server.wait_ready()
    assert shown == ["ready"]
    with make_server(tmp_path, code, shown, is_verbose=True) as server:
        server.wait_ready()
    assert shown[1:3] == ["noise", "INFO:     Application startup complete."]


def test_ready_means_that_a_connection_is_taken(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
        import socket, time
        {READY}
        time.sleep(0.5)
        listener = socket.create_server(("127.0.0.1", {port}))
        time.sleep(60)
    """
    shown: list[str] = []
    with make_server(tmp_path, code, shown, address=("127.0.0.1", port)) as server:
        server.wait_ready()
        socket.create_connection(("127.0.0.1", port)).close()
        assert shown == ["ready"]


def test_a_server_that_dies_while_loading_tells_the_cause(tmp_path: Path) -> None:
    code = "import sys\nprint('oasiskv.core.errors.ConfigError: budget_blocks: wrong')\nsys.exit(1)"
    with make_server(tmp_path, code) as server, pytest.raises(EngineFailedError, match=r"^budget_blocks: wrong$"):
        server.wait_ready()


def test_a_server_that_dies_without_a_cause_leaves_its_last_words(tmp_path: Path) -> None:
    server = make_server(tmp_path, "print('killed by nobody')\nraise SystemExit(9)")
    with server, pytest.raises(EngineFailedError, match=r"exit code 9(.|\n)*killed by nobody"):
        server.wait()


def test_a_server_that_ends_by_itself_has_failed_whatever_its_exit_code(tmp_path: Path) -> None:
    with make_server(tmp_path, READY) as server, pytest.raises(EngineFailedError, match="ended with exit code 0"):
        server.wait()


def test_an_engine_that_dies_in_service_is_told_from_errors_of_requests(tmp_path: Path) -> None:
    server = "(APIServer pid=4) ERROR 11-30 00:00:01 [a.py:1]"
    code = f"""
        print("(Worker pid=5) ERROR 11-30 00:00:01 [a.py:1] ValueError: while loading")
        {READY}
        print("{server} ValueError: of a request")
        print("ValueError: of another request")
        print("{server} vllm.v1.engine.exceptions.EngineDeadError: EngineCore died")
    """
    with make_server(tmp_path, code) as running, pytest.raises(EngineFailedError) as failure:
        running.wait()
    assert str(failure.value).startswith("engine: expected its processes to run")


def test_stopping_leaves_no_process_of_it_even_if_they_ignore_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oasiskv.cli.server.GONE_TIMEOUT_S", 0.5)
    code = f"""
        import signal, subprocess, sys, time
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("INFO 11-30 00:00:01 [a.py:1] Host memory for KV:", child.pid, flush=True)
        {READY}
        time.sleep(60)
    """
    shown: list[str] = []
    with make_server(tmp_path, code, shown, stop_timeout_s=0.5) as server:
        server.wait_ready()
        pids = [server.pid, int(shown[0].split()[-1])]
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)


def test_a_child_that_waits_for_the_end_of_a_server_that_hangs_may_clean_up(tmp_path: Path) -> None:
    # So does the resource tracker of Python's multiprocessing, which unlinks shared memory.
    cleaned = tmp_path / "cleaned"
    tracker = f"import pathlib, sys; sys.stdin.read(); pathlib.Path({str(cleaned)!r}).touch()"
    code = f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", {tracker!r}], stdin=subprocess.PIPE)
        {READY}
        time.sleep(60)
    """
    with make_server(tmp_path, code, stop_timeout_s=0.2) as server:
        server.wait_ready()
    assert cleaned.exists()


def test_a_server_that_is_stopped_while_it_starts_is_not_waited_for_and_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither it nor its child, which holds the memory, ends by itself: as an engine that is loading.
    monkeypatch.setattr("oasiskv.cli.server.STARTING_STOP_TIMEOUT_S", 0.2)
    code = """
        import signal, sys, time
        from multiprocessing import Process, shared_memory
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        memory = shared_memory.SharedMemory(create=True, size=1)
        child = Process(target=time.sleep, args=(60,))
        child.start()
        print("INFO 11-30 00:00:01 [a.py:1] Host memory for KV:", memory.name, child.pid, flush=True)
        time.sleep(60)
    """
    shown: list[str] = []
    with make_server(tmp_path, code, shown, stop_timeout_s=600.0) as server:
        end = time.monotonic() + 30
        while not shown and time.monotonic() < end:
            time.sleep(0.02)
        name, child = shown[0].split()[-2:]
        pids, memory = [server.pid, int(child)], Path("/dev/shm", name)
        assert memory.exists()
    is_left = memory.exists()
    memory.unlink(missing_ok=True)
    assert not is_left
    assert not any(is_alive(pid) for pid in pids)


def test_a_server_and_its_children_end_when_who_started_it_was_killed_and_shared_memory_with_them(
    tmp_path: Path,
) -> None:
    child = f"""
        import signal, subprocess, sys, time
        from multiprocessing.shared_memory import SharedMemory
        from oasiskv.engine.vllm import api_server
        api_server.POLL_S = api_server.STOP_TIMEOUT_S = 0.1
        api_server.end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        memory = SharedMemory(create=True, size=1)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("INFO 11-30 00:00:01 [a.py:1] Host memory for KV:", memory.name, other.pid, flush=True)
        {READY}
        time.sleep(60)
    """
    (tmp_path / "child.py").write_text(textwrap.dedent(child))
    parent = f"""
        import os, sys
        from oasiskv.cli.server import Server
        shown = []
        with Server([sys.executable, {str(tmp_path / "child.py")!r}], dict(os.environ), shown.append) as server:
            server.wait_ready()
            print(*shown[0].split()[-2:], server.pid, flush=True)
            server.wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        name, *words = started.stdout.readline().split()
        pids, memory = [int(pid) for pid in words], Path("/dev/shm", name)
        assert (len(pids), memory.exists()) == (2, True)
        started.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end and (memory.exists() or any(is_alive(pid) for pid in pids)):
        time.sleep(0.05)
    is_left = memory.exists()
    memory.unlink(missing_ok=True)
    assert not is_left
    assert not any(is_alive(pid) for pid in pids)


def test_a_server_is_asked_once_and_has_time_to_stop(tmp_path: Path) -> None:
    code = f"""
        import signal, sys, time
        from pathlib import Path
        def leave(number, frame):
            Path({str(tmp_path / "signals")!r}).open("a").write(f"{{number}} ")
            time.sleep(0.3)
            sys.exit(0)
        signal.signal(signal.SIGINT, leave)
        {READY}
        time.sleep(60)
    """
    with make_server(tmp_path, code) as server:
        server.wait_ready()
    assert (tmp_path / "signals").read_text() == f"{int(signal.SIGINT)} "


def test_sigterm_leaves_through_every_with_and_is_restored() -> None:
    before, left = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stopped_by_sigterm():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            finally:
                left.append(True)

    with pytest.raises(SystemExit) as exit_:
        work()
    assert (exit_.value.code, left) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is before
