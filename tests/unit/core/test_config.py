"""What `LookaheadConfig` accepts; `engine.vllm.settings` reads the same names from vLLM's configuration."""

from dataclasses import FrozenInstanceError, fields
from typing import Any, get_args, get_type_hints

import pytest

from oasiskv.core.config import LookaheadConfig, parse_bytes
from oasiskv.core.errors import ConfigError

NAN = float("nan")
BAD: dict[str, list[Any]] = {
    "budget_blocks": [0, -1, 1.0, "8", None, True],
    "fetch_ratio": [-0.1, 1.1, NAN, "0.05", None, True],
    "min_cap": [0, -4, 4.0, "4", None, False],
    "cap": [0, -3, 4.0, "4", "AUTO", True, []],
    "max_cap": [0, -4, 4.0, "4", None, False],
    "cap_log": ["", 3, "logs"],
    "score_alpha": [-0.25, 1.01, NAN, "1", None, False],
    "prediction": ["next", None, 0, "on_demand"],
    "summary": ["max", "", None, 1, []],
    "group_reduction": ["mean", None, 0],
    "sink_blocks": [-1, 1.0, "1", None, True, 128, 200],
    "host_pool_bytes": [
        0,
        -1,
        "0",
        "1.5 gib",
        "GiB",
        "",
        "1 GiB GiB",
        True,
        None,
        [],
        0.25,
        1.5,
        NAN,
        2.0,
        "1.5",
        "9" * 400,
        "1e9",
    ],
    "summary_dtype": ["e4m3", "float8", None, 8],
    "host_dtype": ["bf16", "float8", None, 8],
    "host_backing": ["pinned", None],
    "switch": ["never", None, 0],
    "chunks": ["never", None, 512],
    "drafting": ["auto", None, 1],
    "signal": ["events", None, 1],
    "host_limit_bytes": [0, "-1GiB", "lots", False, 1.5, float("inf")],
    "handover_mode": ["all", "", None, True],
    "debug_verify": ["yes", None, 2, 1, 0, 1.0],
    "debug_hold_layers": [-1, 1.5, "1", True],
    "debug_cap_replay": ["", 3, "cap.jsonl"],
    "debug_poison": ["no", None, 2, 1, 0],
}


def test_every_field_has_bad_values_here() -> None:
    assert BAD.keys() == {field.name for field in fields(LookaheadConfig)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected .*got"):
        LookaheadConfig.from_mapping({name: value})


@pytest.mark.parametrize(
    "name",
    ["handover_mode", "switch", "drafting", "signal", "host_dtype", "host_backing", "summary_dtype", "prediction"],
)
def test_every_value_that_a_setting_s_type_names_is_taken(name: str) -> None:
    values = get_args(get_type_hints(LookaheadConfig)[name])
    assert len(values) >= 2
    for value in values:
        assert getattr(LookaheadConfig.from_mapping({name: value}), name) == value


def test_the_defaults_are_those_of_the_design() -> None:
    config = LookaheadConfig()
    assert (config.budget_blocks, config.first_cap, config.sink_blocks, config.score_alpha) == (128, 6, 1, 0.25)


@pytest.mark.parametrize(
    ("budget_blocks", "fetch_ratio", "min_cap", "cap"),
    [
        (128, 0.05, 4, 6),
        (128, 0.05, 7, 7),
        (16, 0.05, 4, 4),
        (3, 0.05, 4, 3),
        (8, 0, 1, 1),
        (8, 1, 1, 8),
        (9, 0.5, 1, 4),
    ],
)
def test_the_cap_is_a_share_of_the_budget_between_the_floor_and_the_budget(
    budget_blocks: int, fetch_ratio: float, min_cap: int, cap: int
) -> None:
    config = LookaheadConfig(budget_blocks=budget_blocks, fetch_ratio=fetch_ratio, min_cap=min_cap)
    assert (config.least_cap, config.first_cap, config.most_cap) == (cap, cap, cap)


@pytest.mark.parametrize(
    ("settings", "caps"),
    [
        ({"cap": 9}, (9, 9, 9)),
        ({"cap": 200}, (128, 128, 128)),
        ({"cap": 1, "min_cap": 4, "fetch_ratio": 1}, (1, 1, 1)),
        ({"cap": "auto"}, (4, 6, 32)),
        ({"prediction": "resident"}, (0, 0, 0)),
        ({"cap": "auto", "budget_blocks": 3}, (3, 3, 3)),
        ({"cap": "auto", "min_cap": 9, "max_cap": 7}, (7, 7, 7)),
        ({"cap": "auto", "min_cap": 1, "fetch_ratio": 1}, (1, 32, 32)),
    ],
)
def test_a_cap_is_a_number_or_moves_between_its_bounds(settings: dict[str, Any], caps: tuple[int, int, int]) -> None:
    config = LookaheadConfig.from_mapping(settings)
    assert (config.least_cap, config.first_cap, config.most_cap) == caps


def test_partial_handovers_know_no_cap() -> None:
    assert LookaheadConfig(budget_blocks=32, handover_mode="partial").first_cap == 32
    caps = [LookaheadConfig(budget_blocks=32, handover_mode=mode).first_cap for mode in ("full", "capped")]
    assert caps == [4, 4]
    with pytest.raises(ConfigError, match=r"^cap: expected None with handover_mode 'partial', which lifts it, got 3"):
        LookaheadConfig(cap=3, handover_mode="partial")


@pytest.mark.parametrize("prediction", ["on-demand", "resident"])
def test_a_cap_that_follows_waits_is_refused_where_every_layer_waits_or_none_does(prediction: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^cap: expected a number or None with prediction '{prediction}', got 'auto'"
    ):
        LookaheadConfig(cap="auto", prediction=prediction)


def test_sinks_leave_room_for_at_least_one_block_that_may_go() -> None:
    assert LookaheadConfig(budget_blocks=4, sink_blocks=3).sink_blocks == 3
    with pytest.raises(ConfigError, match=r"^sink_blocks: expected fewer than budget_blocks \(4\), got 4"):
        LookaheadConfig(budget_blocks=4, sink_blocks=4)


def test_midpoint_summaries_know_no_half_width() -> None:
    assert LookaheadConfig(summary="mid", score_alpha=0).summary == "mid"
    with pytest.raises(ConfigError, match=r"^score_alpha: expected 0 with summary 'mid', got 0.25"):
        LookaheadConfig(summary="mid")


def test_an_unknown_setting_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"^budget: unknown setting; known are budget_blocks, .*debug_poison"):
        LookaheadConfig.from_mapping({"budget": 8})


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        LookaheadConfig().min_cap = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [(1, 1), ("1", 1), ("1KiB", 1024), ("1KB", 1000), (" 1.5 GiB ", 3 * 2**29), ("2TB", 2 * 10**12), ("0.5MiB", 2**19)],
)
def test_bytes_are_numbers_or_text_with_a_unit(value: int | str, num_bytes: int) -> None:
    assert parse_bytes(value, "host_pool_bytes") == num_bytes
    assert LookaheadConfig.from_mapping({"host_pool_bytes": value}).host_pool_bytes == num_bytes


def test_no_host_limit_means_that_of_the_control_group() -> None:
    assert LookaheadConfig(host_limit_bytes=None).host_limit_bytes is None
