"""From a command line to a server that can start, or to one line that names what is wrong; nothing is loaded."""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli import launch, main, serve
from oasiskv.cli.find_model import find_model
from oasiskv.cli.launch import Launch, Request, environment, free_port, prepare, wants_own_log
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.engine.vllm import api_server

CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 64 * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def ignore(line: str) -> None:
    del line


def make(folder: Path | str, device: str = "cpu", **changes: Any) -> Launch:
    return prepare(Request(model=str(folder), **changes), device, ignore)


def flag(made: Launch, name: str) -> str:
    return made.arguments[made.arguments.index(name) + 1]


def settings(made: Launch) -> dict[str, Any]:
    transfer = json.loads(flag(made, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("OasisKVConnector", "kv_both")
    return dict(transfer["kv_connector_extra_config"])


def test_the_defaults_fit_the_model_and_the_device(folder: Path) -> None:
    made = make(folder)
    assert settings(made) == {"budget_blocks": 32, "host_pool_bytes": 4 * 257 * BLOCK_BYTES}
    assert flag(made, "--max-model-len") == "4096"
    assert flag(made, "--dtype") == "bfloat16"
    assert flag(made, "--worker-cls") == "oasiskv.engine.vllm.cpu.Worker"
    assert "--enforce-eager" in made.arguments
    cuda = make(folder, "cuda")
    assert flag(cuda, "--worker-cls") == "oasiskv.engine.vllm.cuda.Worker"
    assert flag(cuda, "--max-num-seqs") == "256"
    assert "--enforce-eager" not in cuda.arguments
    assert "--kv-cache-memory-bytes" not in cuda.arguments


def test_float32_weights_become_bfloat16_on_a_gpu_alone_and_the_plan_with_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    on_cpu, on_gpu = make(tmp_path), make(tmp_path, "cuda")
    assert (flag(on_cpu, "--dtype"), flag(on_gpu, "--dtype")) == ("float32", "bfloat16")
    assert (on_cpu.plan.pools.block_bytes, on_gpu.plan.pools.block_bytes) == (2 * BLOCK_BYTES, BLOCK_BYTES)
    assert flag(make(tmp_path, "cuda", dtype="float16"), "--dtype") == "float16"
    with pytest.raises(ConfigError, match=r"^--dtype: expected bfloat16 or float16 on a GPU, got float32"):
        make(tmp_path, "cuda", dtype="float32")


def test_settings_are_read_as_json_or_as_text(folder: Path) -> None:
    made = make(folder, budget_tokens=100, host_memory="1GiB", settings=["summary=mid", "score_alpha=0", "min_cap=2"])
    assert settings(made) == {
        "budget_blocks": 7,
        "host_pool_bytes": 2**30,
        "summary": "mid",
        "score_alpha": 0,
        "min_cap": 2,
    }


def test_host_memory_is_shared_by_the_workers(folder: Path) -> None:
    made = make(folder, num_workers=2, host_memory="1GiB")
    assert settings(made)["host_pool_bytes"] == 2**29
    assert flag(made, "--tensor-parallel-size") == "2"


def test_a_drafter_becomes_a_speculative_config_and_its_layers_count(folder: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    made = make(folder, drafter=f"eagle3:{drafter}")
    assert json.loads(flag(made, "--speculative-config")) == {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": 1,
    }
    assert made.plan.pools.shape.num_layers == 3
    assert json.loads(flag(make(folder, drafter="ngram"), "--speculative-config"))["num_speculative_tokens"] == 1


def test_requests_name_a_known_model_as_its_user_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasiskv.cli.find_model.fetch", lambda *_, **__: folder)
    launch = make("smollm2-135m")
    assert (launch.model.path, flag(launch, "--served-model-name")) == (str(folder), "smollm2-135m")
    assert make("smollm2-135m", rest=["--served_model_name=mine"]).arguments[-1] == "--served_model_name=mine"
    assert "--served-model-name" not in make("smollm2-135m", rest=["--served_model_name=mine"]).arguments
    assert "--served-model-name" not in make(folder).arguments


def test_an_fp8_cache_halves_what_is_planned_and_goes_to_vllm(folder: Path) -> None:
    made = make(folder, kv_cache_dtype="fp8_e4m3")
    assert flag(made, "--kv-cache-dtype") == "fp8_e4m3"
    assert settings(made)["host_pool_bytes"] == 4 * 257 * BLOCK_BYTES // 2
    assert "--kv-cache-dtype" not in make(folder).arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "^--kv-cache-dtype: expected one of auto, fp8, fp8_e4m3, got fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "settings": ["host_dtype=fp8"]}, "^host_dtype: expected auto with --kv-cache-dtype"),
    ],
)
def test_a_cache_that_cannot_be_served_is_refused_before_anything_loads(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(folder, **changes)


def test_flags_for_vllm_come_last_and_unchanged(folder: Path) -> None:
    assert make(folder, rest=["--api-key", "x y"]).arguments[-2:] == ["--api-key", "x y"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_blocks": 0}, "^budget_blocks: expected an integer of at least 1, got 0"),
        ({"budget_blocks": 1}, r"^budget_blocks: expected more than sink_blocks \(1\), got 1"),
        ({"budget_tokens": 0}, "^--budget-tokens: "),
        ({"budget_tokens": 8, "budget_blocks": 8}, "^--budget-blocks: .*--budget-tokens"),
        ({"host_memory": "much"}, "^--host-memory: expected bytes"),
        ({"host_memory": "1MiB"}, "^--host-memory: expected at least 4.0 MiB"),
        (
            {"host_memory": "3GiB", "settings": ["host_limit_bytes=1GiB"]},
            r"^host_pool_bytes: 3.0 GiB \+ .* for the engine's KV cache \+ .* = 3.0 GiB exceed the limit 1.0 GiB",
        ),
        ({"settings": ["host_limit_bytes=2MiB"]}, r"^host_pool_bytes: .* exceed the limit 2.0 MiB \(host_limit_bytes"),
        ({"max_model_len": 5000}, "^--max-model-len: expected at most 4096"),
        ({"max_model_len": 0}, "^--max-model-len: expected at least 1, got 0"),
        ({"max_num_seqs": 0}, "^--max-num-seqs: expected at least 1"),
        ({"engine_bytes": 1000}, "^--kv-cache-memory-bytes: expected at least"),
        ({"block_size": 24}, "^--block-size: expected a multiple of 16, got 24"),
        ({"dtype": "int3"}, "^--dtype: expected auto or one of"),
        ({"drafter": "medusa:x"}, "^--drafter: expected one of none, ngram"),
        ({"drafter": "eagle3:"}, "^--drafter: "),
        ({"settings": ["nonsense=1"]}, "^nonsense: unknown setting; known are budget_blocks"),
        ({"settings": ["nonsense"]}, "^--set: expected name=value"),
        ({"rest": ["--worker-cls=a.B"]}, "^--worker-cls: expected it to be left"),
        ({"rest": ["--kv_transfer_config", "{}"]}, "^--kv-transfer-config: .*use --set"),
        ({"rest": ["--config=options.yaml"]}, "^--config: .*give its options as flags"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(folder, **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_server_count": 2}, "^--api-server-count: expected 1, got 2; `vllm serve` takes it"),
        ({"api_server_count": 0}, "^--api-server-count: expected 1, got 0"),
        ({"headless": True}, "^--headless: expected it not to be given, got it"),
        ({"grpc": True}, "^--grpc: expected it not to be given, got it"),
        ({"data_parallel_multi_port_external_lb": True}, "^--data-parallel-multi-port-external-lb: expected"),
    ],
)
def test_what_would_be_another_server_than_one_for_http_is_refused(given: dict[str, Any], message: str) -> None:
    plain = {
        "api_server_count": None,
        "headless": False,
        "grpc": False,
        "data_parallel_multi_port_external_lb": False,
    }
    api_server.check_is_one_server(argparse.Namespace(**plain))
    api_server.check_is_one_server(argparse.Namespace(**plain | {"api_server_count": 1}))
    with pytest.raises(ConfigError, match=message):
        api_server.check_is_one_server(argparse.Namespace(**plain | given))


def test_a_folder_without_weights_is_refused_unless_none_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=rf"^MODEL: expected weights \(.*\) in {tmp_path}, got none"):
        make(tmp_path)
    make(tmp_path, rest=["--load-format", "dummy"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("oasiskv.core.errors.UnsupportedError: --runner: expected generate", "^--runner: expected generate$"),
        ("server.py: error: unrecognized arguments: --no", "^vLLM: unrecognized arguments: --no$"),
        ("gone", "^vLLM: expected it to take its flags, got 3 and\ngone$"),
    ],
)
def test_the_dry_run_gives_the_cause_that_the_server_would_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    made = make(folder)
    monkeypatch.setattr(Launch, "command", lambda *_: [sys.executable, "-c", f"print({line!r}); raise SystemExit(3)"])
    with pytest.raises(ConfigError, match=message):
        serve.check_start(made, {})


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./none", "a/b/c"])
def test_an_absent_model_is_refused_without_asking_the_network(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^MODEL: expected a folder, .*, got {name}$"):
        find_model(name, ignore)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^MODEL: expected a folder with a config\.json, got {tmp_path} without one"
    ):
        find_model(str(tmp_path), ignore)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^MODEL: expected a mapping in JSON in {tmp_path}/config\.json, got "):
        find_model(str(tmp_path), ignore)


def test_a_taken_port_is_refused_and_a_free_one_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^--port: expected a free port, got {port} on 127.0.0.1"):
            launch.check_port("127.0.0.1", port)
    launch.check_port("127.0.0.1", free_port())


def test_the_environment_leaves_alone_what_the_user_set() -> None:
    chosen = environment("cpu", 1, {"OMP_NUM_THREADS": "7", "VLLM_CPU_KVCACHE_SPACE": "40"})
    assert chosen["OMP_NUM_THREADS"] == "7"
    assert chosen["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_KVCACHE_SPACE" not in chosen
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment("cuda", 1, {})


def test_a_plugin_is_loaded_whatever_plugins_the_environment_names() -> None:
    assert environment("cpu", 1, {"VLLM_PLUGINS": "other"})["VLLM_PLUGINS"] == "other,oasiskv"
    assert environment("cpu", 1, {"VLLM_PLUGINS": "oasiskv,other"})["VLLM_PLUGINS"] == "oasiskv,other"
    assert "VLLM_PLUGINS" not in environment("cpu", 1, {})


def test_vllm_logs_what_progress_is_read_from_whatever_the_environment_says() -> None:
    user = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_COLOR": "1", "FORCE_COLOR": "1", "VLLM_LOGGING_PREFIX": "x"}
    chosen = environment("cpu", 1, user)
    assert {name: chosen[f"VLLM_LOGGING_{name}"] for name in ("LEVEL", "COLOR", "PREFIX")} == {
        "LEVEL": "INFO",
        "COLOR": "0",
        "PREFIX": "",
    }
    assert environment("cpu", 1, {"VLLM_LOGGING_LEVEL": "DEBUG"})["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    ("rest", "user"),
    [
        (["--log-level", "ERROR"], {}),
        (["--logging-config.formatter=json"], {}),
        (["--uvicorn_log_level", "warning"], {}),
        ([], {"VLLM_CONFIGURE_LOGGING": "0"}),
        ([], {"VLLM_LOGGING_CONFIG_PATH": "/etc/log.json"}),
    ],
)
def test_a_log_that_the_user_shapes_is_left_as_it_is(rest: list[str], user: dict[str, str]) -> None:
    assert wants_own_log(rest, user)
    assert not wants_own_log(["--api-key", "k"], {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1"})
    chosen = environment("cpu", 1, user, has_own_log=True)
    assert {name: value for name, value in chosen.items() if "LOGGING" in name} == user


def test_the_command_line_splits_our_options_from_those_of_vllm() -> None:
    parser = main.build_parser()
    line = ["serve", "m", "--max_model_len", "8k", "--host", "h", "--api-key", "k", "--budget-blocks", "9", "-tp", "2"]
    args, rest = parser.parse_known_args(line)
    args.rest = rest
    request = serve.request_of(args)
    assert request.rest == ["--api-key", "k"]
    assert (request.max_model_len, request.host, request.budget_blocks, request.num_workers) == (8000, "h", 9, 2)


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("8k", 8000), ("8K", 8192), ("1.5G", 3 * 2**29)])
def test_counts_are_read_as_vllm_reads_them(text: str, value: int) -> None:
    assert serve.count(text) == serve.num_bytes(text) == value


def test_bytes_are_also_read_with_their_unit() -> None:
    assert serve.num_bytes("1.5GiB") == 3 * 2**29


@pytest.mark.parametrize(
    ("rest", "seconds"),
    [
        ([], 0),
        (["--api-key", "k"], 0),
        (["--shutdown-timeout", "30"], 30),
        (["--shutdown_timeout=7", "--api-key", "k"], 7),
        (["--shutdown-timeout"], 0),
    ],
)
def test_a_server_that_drains_is_not_killed_before(rest: list[str], seconds: int) -> None:
    assert serve.drain_s(rest) == seconds


def test_a_word_is_no_count() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="many"):
        serve.count("many")


def test_the_dry_run_prints_plan_and_command_without_importing_torch(folder: Path) -> None:
    code = (
        "import sys; from oasiskv.cli import serve; from oasiskv.cli.main import main; "
        "serve.check_start = lambda *_: None; code = main(sys.argv[1:]); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "serve", str(folder), "--dry-run", "--some-flag"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "\nasking vLLM whether this could start; nothing is loaded\n")
    start = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --port 8000 "
    if launch.find_device() != "cpu":
        start = f"vllm serve {folder} --port 8000 "
    assert done.stdout.splitlines()[-1].startswith(start)
    assert done.stdout.splitlines()[-1].endswith(" --some-flag")
    assert "4,096        256          48" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "{folder}", "--port", "{taken}"], "error: --port: expected a free port, got {taken}"),
        (["serve", "{folder}", "--budget-blocks", "0"], "error: budget_blocks: expected an integer of at least 1"),
        (["serve", "nowhere"], "error: MODEL: expected a folder"),
        (["run", "nowhere"], "error: MODEL: expected a folder"),
        (["run", "{folder}", "--context", "100"], "error: --context: expected at least 256, got 100"),
        (["run", "{folder}", "--context", "9000"], "error: --context: expected at most 4048, as the model was made"),
        (["run", "{folder}", "--context", "300"], "error: MODEL: expected a tokenizer beside the weights"),
        (
            ["run", "{folder}", "--context", "300", "--text", "/"],
            "error: --text: expected a file of text, got / (Is a directory)",
        ),
        (
            ["run", "{folder}", "--context", "300", "--text", "{binary}"],
            "error: --text: expected a file of text in UTF-8, got {binary} with other bytes",
        ),
        (["eval", "quick", "--model", "{folder}"], "error: --context: expected at most 4032, as the model was made"),
        (["serve", "{folder}", "--port", "-1", "--dry-run"], "error: --port: expected 0 to 65535, got -1"),
        (["serve", "{folder}", "--port", "65536", "--dry-run"], "error: --port: expected 0 to 65535, got 65536"),
        (["serve", "{folder}", "--max-model-len", "infk"], "error: --max-model-len: expected a number such as"),
        (["serve", "{folder}", "--max-model-len", "auto"], "error: --max-model-len: expected a number such as 8192"),
        (["serve", "{folder}", "--port", "web"], "error: --port: expected an integer, got 'web'; see oasiskv serve --"),
        (["serve", "{folder}", "--kv-cache-memory-bytes", "1XB"], "error: --kv-cache-memory-bytes: expected bytes"),
        (["serve", "{folder}", "--host", "no.such.host.invalid"], "error: --host: expected a name or address of this"),
        (["serve"], "error: the following arguments are required: MODEL; see oasiskv serve --help"),
        (["serve", "{folder}", "--max-model-len", "5000"], "error: --max-model-len: expected at most 4096"),
        (["serve", "{folder}", "--kv-cache-memory-bytes", "0"], "error: --kv-cache-memory-bytes: expected at least 1"),
        (["serve", "{folder}", "--gpu-memory-utilization", "nan"], "error: --gpu-memory-utilization: expected more"),
        (["serve", "{folder}", "--gpu-memory-utilization", "1.1"], "error: --gpu-memory-utilization: expected more"),
        (["serve", "{folder}", "--drafter", "eagle3:/no"], "error: --drafter: expected a folder, one of"),
        (["serve", "{folder}", "--set", "=1"], "error: --set: expected name=value, got '=1'"),
        (
            ["serve", "{folder}", "--budget-blocks", "9", "--set", "budget_blocks=8"],
            "error: --set: expected budget_blocks once",
        ),
        (
            ["serve", "{folder}", "--host-memory", "1GiB", "--set", "host_pool_bytes=8"],
            "error: --set: expected host_pool_bytes once",
        ),
        (["serve", "{folder}", "--kv-transfer-config.kv_role", "kv_both"], "error: --kv-transfer-config: expected"),
        (["serve", "{folder}", "-sc", "{{}}"], "error: -sc: expected it to be left to oasiskv serve; use --drafter"),
        (["serve", "{folder}", "--spec-tokens=3"], "error: --spec-tokens: expected it to be left to oasiskv serve"),
        (["eval", "quick", "--windows", "0"], "error: --windows: expected at least 1, got 0"),
        (["doctor", "--flag"], "error: unrecognized arguments: --flag; see oasiskv --help"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(
    arguments: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("serve", "demo", "evaluate"):
        monkeypatch.setattr(f"oasiskv.cli.{module}.find_device", lambda: "cpu")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        values = {"folder": folder, "taken": taken.getsockname()[1], "binary": folder / "binary"}
        (folder / "binary").write_bytes(bytes([0xFF, 0xFE, 0x80]))
        code: object
        try:
            code = main.main([argument.format(**values) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(line.format(**values))


def test_a_budget_beyond_the_longest_request_is_cut_to_it_and_planned_at_once(folder: Path) -> None:
    launch = make(folder, budget_tokens=10**20)
    assert launch.plan.config.budget_blocks == launch.plan.pools.longest_blocks == 257


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"text_config": 3}',
        json.dumps(CONFIG | {"num_hidden_layers": "two"}),
        json.dumps(CONFIG | {"num_attention_heads": 0}),
        json.dumps(CONFIG | {"head_dim": -64}),
        json.dumps(CONFIG | {"max_position_embeddings": None}),
        json.dumps(CONFIG | {"num_key_value_heads": 1.5}),
    ],
)
def test_a_broken_config_json_is_refused_in_one_line(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises((ConfigError, UnsupportedError), match=r"^(MODEL|model): expected .*config\.json, got "):
        make(folder)


def test_the_parser_of_serve_takes_no_abbreviation() -> None:
    args, rest = main.build_parser().parse_known_args(["serve", "m", "--budget", "3"])
    assert isinstance(args, argparse.Namespace)
    assert rest == ["--budget", "3"]
