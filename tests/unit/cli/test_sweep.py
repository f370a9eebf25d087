import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli import sweep
from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, EngineFailedError


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args(["model", "--results", "out.json", *given])


def test_only_rounds_that_the_file_lacks_are_run() -> None:
    rows = [{"mode": "dense", "context": 64, "requests": 1}, {"mode": "oasiskv", "context": 64, "requests": 4}]
    assert sweep.missing(rows, "dense", 64, [1, 4]) == [4]
    assert sweep.missing(rows, "oasiskv", 64, [1, 4]) == [1]
    assert sweep.missing(rows, "oasiskv", 128, [1, 4]) == [1, 4]


def test_stock_modes_know_nothing_of_the_backend() -> None:
    engine = sweep.engine_arguments(arguments("--drafter", "head"), sweep.MODES["dense"], 64, is_cuda=True)
    assert not {"kv_transfer_config", "worker_cls", "speculative_config"} & engine.keys()
    assert engine["compilation_config"]["cudagraph_capture_sizes"] == [1, 16, 40]
    drafted = sweep.engine_arguments(arguments("--drafter", "head"), sweep.MODES["dense-drafter"], 64, is_cuda=True)
    assert drafted["speculative_config"]["model"] == "head"
    assert drafted["compilation_config"]["cudagraph_capture_sizes"] == [2, 32, 80]


def test_an_fp8_cache_is_vllms_own_with_the_backend_and_without() -> None:
    for mode in ("dense-fp8", "oasiskv-kv-fp8"):
        engine = sweep.engine_arguments(arguments(), sweep.MODES[mode], 64, is_cuda=True)
        assert engine["kv_cache_dtype"] == "fp8"
        assert ("kv_transfer_config" in engine) == (mode != "dense-fp8")


def test_settings_of_the_command_line_win_over_those_of_the_mode() -> None:
    given = arguments("--set", "signal=flags", "--set", "budget_blocks=64", "--host-memory", "2GiB")
    engine = sweep.engine_arguments(given, sweep.MODES["oasiskv-joined"], 64, is_cuda=False)
    settings = engine["kv_transfer_config"]["kv_connector_extra_config"]
    assert settings == {"host_pool_bytes": "2GiB", "switch": "early", "signal": "flags", "budget_blocks": 64}
    assert engine["max_model_len"] >= 64 + 70 + 2 * 40


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--set", "budget=3"], "^budget: unknown setting"), (["--set", "budget_blocks=0"], "^budget_blocks: expected")],
)
def test_a_wrong_setting_is_refused_by_name(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.engine_arguments(arguments(*given), sweep.MODES["oasiskv"], 64, is_cuda=True)


def test_a_setting_needs_a_value() -> None:
    with pytest.raises(ConfigError, match=r"^--set: expected NAME=VALUE, got 'signal'"):
        sweep.setting("signal")


def test_each_fetch_ratio_is_a_mode_of_its_own_and_stock_modes_have_none() -> None:
    given = arguments("--modes", "dense", "oasiskv", "--fetch-ratios", "0.01", "0.05", "1")
    modes = sweep.modes_of(given)
    assert list(modes) == ["dense", "oasiskv@0.01", "oasiskv@0.05", "oasiskv@1"]
    caps = []
    for mode in modes.values():
        engine = sweep.engine_arguments(given, mode, 64, is_cuda=False)
        if "kv_transfer_config" in engine:
            settings = engine["kv_transfer_config"]["kv_connector_extra_config"]
            caps.append(LookaheadConfig.from_mapping(settings).first_cap)
    assert caps == [1, 6, 128]


def test_the_rules_of_others_run_on_our_kernels() -> None:
    configs = {}
    for name in ("previous", "on-demand", "resident", "oasiskv-auto-cap"):
        engine = sweep.engine_arguments(arguments(), sweep.MODES[name], 64, is_cuda=True)
        configs[name] = LookaheadConfig.from_mapping(engine["kv_transfer_config"]["kv_connector_extra_config"])
    assert [config.prediction for config in configs.values()] == ["previous", "on-demand", "resident", "lookahead"]
    assert [config.first_cap for config in configs.values()] == [6, 128, 0, 6]
    assert configs["oasiskv-auto-cap"].most_cap == 32


def test_an_unknown_mode_is_refused_before_anything_runs(tmp_path: Path) -> None:
    given = arguments("--modes", "dense", "fast")
    given.results = tmp_path / "out.json"
    with pytest.raises(ConfigError, match=r"^--modes: expected dense, .*, got 'fast'"):
        sweep.run(given)
    assert not given.results.exists()


def test_the_table_has_a_line_per_round_and_a_dash_for_what_a_mode_does_not_have() -> None:
    row: dict[str, Any] = {
        "mode": "dense",
        "context": 64,
        "requests": 4,
        "running": 3,
        "tpot_ms_mean": 1.234,
        "tpot_ms_p99": 2,
        "steady_tokens_per_s": 99.6,
        "tokens_per_s": 50,
        "ttft_s_p50": 0.5,
        "hbm_kv_bytes": 2_100_000,
    }
    head, first, second = sweep.table([row | {"requests": 16}, row]).splitlines()
    assert head.split()[:3] == ["mode", "context", "requests"]
    assert first.split() == [
        "dense",
        "64",
        "4",
        "3",
        "1.23",
        "-",
        "2.00",
        "100",
        "50",
        "0.50",
        *["-"] * 6,
        "2.1e+06",
        "-",
    ]
    assert second.split()[2] == "16"


def test_a_round_is_known_as_soon_as_it_is_over_and_the_engine_ends_with_the_sweep(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    results.touch()
    code = (
        "import os, sys, time\n"
        "with open(sys.argv[1], 'a') as file:\n"
        "    print('{\"pid\": %d}' % os.getpid(), file=file, flush=True)\n"
        "    print('{\"half', end='', file=file, flush=True)\n"
        "    time.sleep(600)\n"
    )
    rows = sweep.follow([sys.executable, "-c", code, str(results)], os.environ, tmp_path / "log.txt", results)
    pid = next(rows)["pid"]
    os.kill(pid, 0)
    rows.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rounds_before_a_failure_are_kept_and_its_last_words_told(tmp_path: Path) -> None:
    results = tmp_path / "rows.jsonl"
    results.touch()
    code = "import sys; open(sys.argv[1], 'a').write('{\"requests\": 1}\\n'); sys.exit('out of memory')"
    rows = sweep.follow([sys.executable, "-c", code, str(results)], os.environ, tmp_path / "log.txt", results)
    assert next(rows) == {"requests": 1}
    with pytest.raises(EngineFailedError, match=r"exit code 1; last words:\nout of memory$"):
        next(rows)
