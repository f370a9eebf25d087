from dataclasses import replace
from typing import Any

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.core.switch_fit import MeasuredStep, StepSizes, choices, estimate_ms, fit, read_rows
from oasiskv.core.switch_rule import DeviceSpeed

DEVICE = DeviceSpeed(
    memory_bytes_per_s=3.1e12,
    predict_bytes_per_s=2.2e12,
    link_bytes_per_s=38e9,
    overlap_loss=0.15,
    layer_ms=0.06,
    row_ms=0.03,
    sparse_layer_ms=0.035,
)
SIZES = StepSizes(
    weight_bytes=15_000_000_000,
    num_layers=36,
    num_kv_heads=8,
    unit_bytes=8192,
    rows_per_page=16,
    budget_blocks=128,
    block_size=16,
)


def table(device: DeviceSpeed = DEVICE, *, fetched: float = 0.5) -> list[MeasuredStep]:
    """Steps of a device that is as the model says; every head fetches a share of six blocks."""
    steps = []
    for context in (4096, 16384, 65536):
        for count in (1, 16, 40, 96):
            load = fetched * 6 * count * SIZES.block_bytes
            base = MeasuredStep(sizes=SIZES, context=context, num_requests=count, step_ms=1.0, is_sparse=False)
            for step in (base, replace(base, is_sparse=True, load_bytes=load)):
                steps.append(replace(step, step_ms=estimate_ms(device, step)))
    return steps


@pytest.mark.parametrize("fetched", [0.3, 1.0, 2.0])
def test_the_constants_of_a_device_that_follows_the_model_are_found(fetched: float) -> None:
    steps = table(fetched=fetched)
    found = fit(steps, 38e9)
    for name in DeviceSpeed.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(DEVICE, name), rel=1e-5), name


def test_steps_that_only_the_link_decides_say_nothing_of_the_foreground() -> None:
    device = replace(DEVICE, overlap_loss=0.0)
    steps = [step for step in table(device, fetched=9.0) if not step.is_sparse or step.num_requests > 1]
    found = fit(steps, 38e9)
    assert all(estimate_ms(found, step) == pytest.approx(step.step_ms, rel=1e-6) for step in steps)
    assert found.overlap_loss == 0


def test_what_cannot_be_seen_costs_nothing_and_never_less() -> None:
    steps = [replace(step, step_ms=step.step_ms - 0.03 * step.num_requests * 1.2) for step in table()]
    found = fit(steps, 38e9)
    assert found.row_ms == 0
    unseen = table(replace(DEVICE, predict_bytes_per_s=1e18))
    assert fit(unseen, 38e9).predict_bytes_per_s > 1e14


def test_noise_of_two_percent_stays_two_percent() -> None:
    noisy = [replace(step, step_ms=step.step_ms * (1.02 if i % 3 else 0.98)) for i, step in enumerate(table())]
    found = fit(noisy, 38e9)
    assert all(estimate_ms(found, step) == pytest.approx(step.step_ms, rel=0.05) for step in noisy)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda step: step.is_sparse, "expected dense rounds of 2 contexts and 2 numbers .*, got 0 and 0"),
        (lambda step: not step.is_sparse, "expected sparse rounds"),
        (lambda step: step.context == 4096, "expected dense rounds .* got 1 and 4"),
        (lambda step: step.num_requests == 16, "expected dense rounds .* got 3 and 1"),
        (lambda step: not step.is_sparse or step.context == 4096, "expected sparse rounds .* got 1 and 4"),
    ],
)
def test_too_few_rounds_are_refused(keep: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^FILE: {message}"):
        fit([step for step in table() if keep(step)], 38e9)


def test_the_rule_is_never_slower_than_dense_on_the_steps_that_it_was_fitted_to() -> None:
    steps = table()
    found = choices(fit(steps, 38e9), steps)
    assert [(choice.context, choice.num_requests) for choice in found] == [
        (context, count) for context in (4096, 16384, 65536) for count in (1, 16, 40, 96)
    ]
    assert all(choice.loss <= 0 for choice in found)
    assert {choice.is_sparse for choice in found} == {False, True}
    # Shorter than two and a half budgets nothing switches for speed.
    assert not any(choice.is_sparse for choice in found if choice.context == 4096)


def a_row(mode: str, **more: Any) -> dict[str, Any]:
    sizes = {name: getattr(SIZES, name) for name in StepSizes.__dataclass_fields__}
    row = {"mode": mode, "context": 4096, "requests": 4, "running": 4, "tpot_ms_mean": 7.5, "step_sizes": sizes}
    return row | more


def test_rows_that_tell_of_something_else_are_left_out() -> None:
    rows = [
        a_row("dense"),
        a_row("oasiskv-early", sparse_share=0.99, load_bytes_per_step=5.0),
        a_row("oasiskv", sparse_share=0.5),
        a_row("oasiskv-fp8", sparse_share=1.0),
        a_row("previous", sparse_share=1.0),
        a_row("dense-drafter"),
        a_row("dense", running=3),
        {name: value for name, value in a_row("dense").items() if name != "step_sizes"},
    ]
    assert read_rows(rows) == [
        MeasuredStep(sizes=SIZES, context=4096, num_requests=4, step_ms=7.5, is_sparse=False),
        MeasuredStep(sizes=SIZES, context=4096, num_requests=4, step_ms=7.5, is_sparse=True, load_bytes=5.0),
    ]
