"""vLLM's log, on lines that it wrote."""

import pytest

from oasiskv.cli.log import LogReader

PREFIX = "(Worker pid=7) ERROR 11-30 00:00:01 [multiproc_executor.py:900] "


def read_all(*lines: str) -> LogReader:
    reader = LogReader()
    for line in lines:
        reader.read(line)
    return reader


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "(Worker pid=7) INFO 11-30 00:00:01 [cpu_model_runner.py:68] Starting to load model /m...",
            "loading the weights",
        ),
        (
            "(Worker pid=7) INFO 11-30 00:00:01 [default_loader.py:501] Loading weights took 1.70 seconds",
            "weights loaded in 1.70 s",
        ),
        (
            "(EngineCore pid=8) INFO 11-30 00:00:01 [k.py:2] GPU KV cache size: 17,360 tokens, Maximum",
            "engine KV cache: 17,360 tokens",
        ),
        (
            "(Worker pid=7) INFO 11-30 00:00:01 [worker.py:9] Host memory for KV: 61.0 MiB ready after 0.1 s",
            "Host memory for KV: 61.0 MiB ready after 0.1 s",
        ),
        ("(APIServer pid=9) WARNING 11-30 00:00:01 [vllm.py:725] Model Runner V2 requires Triton", None),
        ("(APIServer pid=9) INFO 11-30 00:00:01 [launcher.py:195] Route: /health, Methods: GET", None),
        ("INFO:     Application startup complete.", "ready"),
        ("", None),
    ],
)
def test_only_progress_is_shown_while_loading(line: str, shown: str | None) -> None:
    assert LogReader().read(line) == shown


def test_a_progress_bar_is_shown_once() -> None:
    reader = LogReader()
    bar = [f"Capturing CUDA graphs ({kind}): {share}%|" for kind in ("PIECEWISE", "FULL") for share in (0, 40, 100)]
    assert [reader.read(line) for line in bar] == ["capturing CUDA graphs"] + [None] * 5
    loading = "(Worker pid=7) INFO 11-30 00:00:01 [m.py:68] Starting to load model /m..."
    drafter = "(Worker pid=7) INFO 11-30 00:00:09 [m.py:68] Starting to load model /d..."
    graphs = "Capturing CUDA graphs (FULL): 0%|"
    shown = ["loading the weights", "capturing CUDA graphs", "loading the weights"]
    assert [reader.read(line) for line in (loading, graphs, drafter)] == shown


def test_everything_with_a_level_is_shown_once_ready() -> None:
    reader = read_all("(APIServer pid=9) INFO:     Application startup complete.")
    assert reader.is_ready.is_set()
    line = "(APIServer pid=9) WARNING 11-30 00:00:01 [a.py:1] slow"
    assert reader.read(line) == line
    assert reader.read("  a line of a traceback") is None


@pytest.mark.parametrize(("level", "shown"), [("warning", False), ("INFO", True), ("DEBUG", True), ("loud", True)])
def test_the_user_s_level_counts_once_ready(level: str, shown: bool) -> None:
    reader = LogReader(level)
    reader.read("INFO:     Application startup complete.")
    line = "(APIServer pid=9) INFO 11-30 00:00:01 [a.py:1] a request"
    assert (reader.read(line) == line) == shown
    assert reader.read(error := "(APIServer pid=9) ERROR 11-30 00:00:01 [a.py:1] lost") == error


def test_oasiskvs_own_error_is_the_cause_whatever_came_before_and_after() -> None:
    reader = read_all(
        f"{PREFIX}ValueError: something",
        f"{PREFIX}oasiskv.core.errors.UnsupportedError: --kv-cache-dtype: expected auto, got fp8",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    assert reader.cause == "--kv-cache-dtype: expected auto, got fp8"


def test_the_first_error_is_the_cause_where_none_is_ours() -> None:
    reader = read_all(f"{PREFIX}ValueError: too long", "RuntimeError: Engine core initialization failed.")
    assert reader.cause == "vLLM: ValueError: too long"


def test_an_engine_that_died_without_a_word_was_killed_perhaps() -> None:
    ready = "(APIServer pid=9) INFO:     Application startup complete."
    idle = "(APIServer pid=9) WARNING 11-30 00:00:01 [c.py:1] [shutdown] MPClient: engine core exited unexpectedly; s"
    busy = "(APIServer pid=9) ERROR 11-30 00:00:01 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore (a)"
    loading = "(APIServer pid=9) RuntimeError: Engine core initialization failed. See root cause above."
    worker = "(EngineCore pid=9) ERROR 11-30 00:00:01 [m.py:1] Worker proc VllmWorker-0 died unexpectedly (-9)"
    for log in ([ready, idle], [ready, busy], [loading], [ready, worker, f"{PREFIX}RuntimeError: cancelled"]):
        cause = read_all(*log).cause
        assert cause is not None
        assert "was it killed" in cause
    assert read_all(ready, f"{PREFIX}ValueError: too long", busy, idle).cause == "vLLM: ValueError: too long"


def test_a_wrong_flag_is_the_cause() -> None:
    assert read_all("api_server.py: error: unrecognized arguments: --no").cause == "vLLM: unrecognized arguments: --no"


def test_a_validation_error_is_told_by_its_second_line() -> None:
    reader = read_all(
        "(APIServer pid=9) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "(APIServer pid=9)   Value error, max_model_len is wrong [type=value_error, input_value=1]",
    )
    assert reader.cause == "max_model_len is wrong"


def test_a_log_without_errors_has_no_cause() -> None:
    assert read_all("INFO:     Started server process [1]", "hello: world").cause is None
