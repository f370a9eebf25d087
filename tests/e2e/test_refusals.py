"""What cannot be served is refused at the start, with the setting named; most of it on vLLM's configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, EngineStartError, random_requests, write_tiny_eagle3, write_tiny_model

pytestmark = pytest.mark.timeout(300)

SETTINGS = {"budget_blocks": 8}
UNSUPPORTED, CONFIG = "UnsupportedError: ", "ConfigError: "
TRANSFER = {"kv_connector": "OasisKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": SETTINGS}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("refusals") / "model")


def with_config(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the engine argument for a copy of the model's configuration with changes; no weights are read."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder)}


def first_oasis_error(answer: dict[str, Any]) -> str:
    assert "start_error" in answer, "nothing was refused"
    errors: list[str] = answer["start_error"]
    found = [error for error in errors if error.startswith((UNSUPPORTED, CONFIG))]
    assert found, errors
    return found[0]


def configure(process: EngineProcess, model: Path, engine: dict[str, Any], settings: Any = None) -> dict[str, Any]:
    base = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 16}
    return process.ask(only_configure=True, engine=base | engine, settings=SETTINGS if settings is None else settings)


DRAFTER = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3}


def test_what_the_tables_start_from_is_accepted(backend: EngineProcess, model: Path) -> None:
    assert configure(backend, model, {}) == {}
    assert configure(backend, model, {"speculative_config": DRAFTER}) == {}


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (
            {"speculative_config": DRAFTER | {"num_speculative_tokens": 2}},
            {},
            "num_speculative_tokens: expected 1, got 2",
        ),
        (
            {"speculative_config": DRAFTER | {"disable_padded_drafter_batch": True}},
            {},
            "disable_padded_drafter_batch: expected false, got true",
        ),
        (
            {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 1}},
            {},
            "speculative_config.method: expected eagle3, ngram or draft_model",
        ),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            {},
            "--pipeline-parallel-size: expected 1",
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "--kv-cache-dtype: expected one of auto, fp8, fp8_e4m3, got fp8_e5m2"),
        ({"kv_cache_dtype": "fp8"}, {"host_dtype": "fp8"}, "host_dtype: expected auto with --kv-cache-dtype fp8"),
        ({"kv_cache_dtype": "fp8"}, {"summary_dtype": "fp8"}, "summary_dtype: expected auto with --kv-cache-dtype fp8"),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
            {},
            "--kv-cache-dtype-skip-layers: expected none, got ['0']",
        ),
        ({"cpu_offload_gb": 1}, {}, "--cpu-offload-gb: expected 0, got 1"),
        ({"offload_group_size": 2}, {}, "--offload-group-size: expected 0, got 2"),
        ({"kv_offloading_size": 1.0}, {}, "--kv-offloading-size: expected none, got 1.0"),
        ({"block_size": 24}, {}, "--block-size: expected a multiple of 16, got 24"),
        ({"worker_cls": "auto"}, {}, "--worker-cls: expected oasiskv.engine.vllm.cpu.Worker"),
        ({"scheduler_reserve_full_isl": False}, {}, "--scheduler-reserve-full-isl: expected on, got off"),
        ({"kv_transfer_config": TRANSFER | {"kv_role": "kv_consumer"}}, {}, "kv_role: expected kv_both"),
        ({}, {"budget": 8}, "budget: unknown setting; known are budget_blocks"),
        ({}, {"budget_blocks": 0}, "budget_blocks: expected an integer of at least 1, got 0"),
        ({}, {"summary": "mid"}, "score_alpha: expected 0 with summary 'mid'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(":")[0],
)
def test_a_setting_that_cannot_be_served_is_named(
    backend: EngineProcess, model: Path, engine: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    assert message in first_oasis_error(configure(backend, model, engine, settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
            "model: expected no sliding window, got 128",
        ),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "model: expected",
        ),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "kv_lora_rank": 32,
                "q_lora_rank": 32,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 16,
                "v_head_dim": 32,
                "head_dim": 16,
            },
            "model: expected multi-head or grouped-query attention, got multi-head latent attention",
        ),
    ],
    ids=["sliding-window", "some-layers-sliding", "latent-attention"],
)
def test_a_model_with_another_attention_is_refused(
    backend: EngineProcess, model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    engine = with_config(model, tmp_path / "changed", **changes)
    error = first_oasis_error(configure(backend, model, engine))
    assert error.startswith(UNSUPPORTED + message)
    assert error.endswith("or serve without OasisKV")


@pytest.fixture
def engine(model: Path) -> dict[str, Any]:
    return {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 16}


def test_a_server_whose_workers_are_stock_does_not_start(stock: EngineProcess, engine: dict[str, Any]) -> None:
    # vLLM remembers stock attention for the rest of the process, so not in the one of the others.
    with pytest.raises(EngineStartError, match=r"--worker-cls: expected oasiskv.engine.vllm.cpu.Worker"):
        stock.run(engine | {"worker_cls": "auto"}, [], settings=SETTINGS)


def test_a_worker_without_the_connector_does_not_start(backend: EngineProcess, engine: dict[str, Any]) -> None:
    with pytest.raises(EngineStartError, match=r"kv_transfer_config.kv_connector: expected OasisKVConnector"):
        backend.run(engine | {"worker_cls": "oasiskv.engine.vllm.cpu.Worker"}, [])


def test_host_memory_for_less_than_one_request_is_refused(backend: EngineProcess, engine: dict[str, Any]) -> None:
    with pytest.raises(EngineStartError, match=r"host_pool_bytes: expected at least \d+ \(max_model_len 512"):
        backend.run(engine, [], settings=SETTINGS | {"host_pool_bytes": "64KiB"})


def test_host_memory_beyond_the_limit_is_refused_with_the_sum(backend: EngineProcess, engine: dict[str, Any]) -> None:
    with pytest.raises(EngineStartError, match=r"host_pool_bytes: .*host_limit_bytes"):
        backend.run(engine, [], settings=SETTINGS | {"host_pool_bytes": "64MiB", "host_limit_bytes": "16MiB"})


def test_a_drafter_with_other_heads_is_refused(
    backend: EngineProcess, engine: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / "other", num_heads=4, num_kv_heads=4)
    drafter = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 1}
    with pytest.raises(EngineStartError, match="choose another draft model, or method 'ngram'"):
        backend.run(engine | {"speculative_config": drafter}, [], settings=SETTINGS)


def test_a_prompt_beyond_the_pool_is_refused_and_others_are_served(
    backend: EngineProcess, engine: dict[str, Any]
) -> None:
    requests = random_requests([600, 40], 8)
    reply = backend.run(engine, requests, settings=SETTINGS)
    assert "512" in reply.outputs[0]["error"]
    assert len(reply.outputs[1]["completions"][0]["tokens"]) == 8


def test_eagle3_of_the_targets_shape_is_accepted(
    backend: EngineProcess, engine: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    drafter = {"method": "eagle3", "model": str(write_tiny_eagle3(tmp_path / "e", model)), "num_speculative_tokens": 1}
    reply = backend.run(engine | {"speculative_config": drafter}, random_requests([40], 8), settings=SETTINGS)
    assert reply.facts["attention"] == ["LookaheadCPUImpl"]
