"""Fits `DeviceSpeed` to steps that were measured, and says what the rule would have chosen among them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oasiskv.core.errors import ConfigError
from oasiskv.core.switch_rule import LEAST_GAIN, LEAST_LENGTH, DeviceSpeed

LOSSES = [place / 200 for place in range(101)]
"""Shares of the shorter of foreground and transfer that a step may lose, from which the best is chosen."""

LEAST_SPARSE_SHARE = 0.95
"""Of the decode steps of a sparse row, so that it tells of sparse steps."""

SPARSE_MODES = ("oasiskv", "oasiskv-early")
"""Modes of a sweep that do what a server does by default once requests are sparse."""

FASTEST_BYTES_PER_S = 1e18
"""Where a term costs nothing that could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What a step of an engine reads and moves; see `DeviceSpeed.step_cost`."""

    weight_bytes: int
    num_layers: int
    num_kv_heads: int
    unit_bytes: int
    rows_per_page: int
    budget_blocks: int
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers and heads."""
        return self.num_layers * self.num_kv_heads * self.unit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A round of equal requests in which all steps were dense or all sparse."""

    sizes: StepSizes
    context: int
    """Tokens of each request."""
    num_requests: int
    step_ms: float
    is_sparse: bool
    load_bytes: float = 0.0
    """What a step fetched."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each request."""
        return self.context // self.sizes.block_size


def read_rows(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Return the rounds of a sweep that tell of dense steps without a drafter, or of sparse ones; others are left out.

    Args:
        rows: As `oasiskv bench sweep` writes them.
    """
    found = []
    for row in rows:
        is_sparse = row.get("sparse_share", 0.0) >= LEAST_SPARSE_SHARE
        if "step_sizes" not in row or row["running"] != row["requests"]:
            continue
        if row["mode"] == "dense" or (row["mode"] in SPARSE_MODES and is_sparse):
            found.append(
                MeasuredStep(
                    sizes=StepSizes(**row["step_sizes"]),
                    context=row["context"],
                    num_requests=row["running"],
                    step_ms=row["tpot_ms_mean"],
                    is_sparse=is_sparse,
                    load_bytes=row.get("load_bytes_per_step", 0.0),
                )
            )
    return found


def fit(steps: Sequence[MeasuredStep], link_bytes_per_s: float) -> DeviceSpeed:
    """Return what the device does, by least squares of relative errors, no term below zero.

    Args:
        steps: Dense ones and sparse ones, each of two contexts and two numbers of requests at least.
        link_bytes_per_s: Of the host link with nothing beside it; steps do not show it.

    Raises:
        ConfigError: they are too few or too much alike.
    """
    dense = [step for step in steps if not step.is_sparse]
    sparse = [step for step in steps if step.is_sparse]
    _need(dense, "dense")
    _need(sparse, "sparse")
    per_byte, layer_ms, row_ms = _least_squares(
        [[_dense_bytes(step), step.sizes.num_layers, step.num_requests] for step in dense],
        [step.step_ms for step in dense],
    )
    base = DeviceSpeed(
        memory_bytes_per_s=_speed(per_byte),
        predict_bytes_per_s=FASTEST_BYTES_PER_S,
        link_bytes_per_s=link_bytes_per_s,
        overlap_loss=0.0,
        layer_ms=layer_ms,
        row_ms=row_ms,
        sparse_layer_ms=0.0,
    )

    def error(speed: DeviceSpeed) -> float:
        return sum((estimate_ms(speed, step) / step.step_ms - 1) ** 2 for step in sparse)

    return min((_fit_sparse(replace(base, overlap_loss=loss), sparse) for loss in LOSSES), key=error)


def _fit_sparse(base: DeviceSpeed, sparse: Sequence[MeasuredStep]) -> DeviceSpeed:
    """Return the device with what sparse steps cost more, for a given loss of overlap."""
    speed = base
    # Which of foreground and transfer is longer depends on what is sought, so it is sought a few times.
    for _ in range(4):
        columns, wanted = [], []
        for step in sparse:
            transfer = 1e3 * step.load_bytes / base.link_bytes_per_s
            if _foreground_ms(speed, step) >= transfer:
                weight, other = 1.0, base.overlap_loss * transfer
            else:
                weight, other = base.overlap_loss, transfer
            columns.append([weight * step.sizes.num_layers, weight * _predicted_bytes(step)])
            wanted.append(step.step_ms - other - weight * _foreground_ms(base, step))
        sparse_layer_ms, per_byte = _least_squares(columns, wanted, [step.step_ms for step in sparse])
        speed = replace(base, sparse_layer_ms=sparse_layer_ms, predict_bytes_per_s=_speed(per_byte))
    return speed


def estimate_ms(speed: DeviceSpeed, step: MeasuredStep) -> float:
    """Return what the fitted device needs for a step, with the bytes that the step really fetched."""
    foreground, transfer = _foreground_ms(speed, step), 1e3 * step.load_bytes / speed.link_bytes_per_s
    return max(foreground, transfer) + speed.overlap_loss * min(foreground, transfer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the rule would do with the requests of a round, where both ways were measured."""

    context: int
    num_requests: int
    dense_ms: float
    sparse_ms: float
    is_sparse: bool
    """What it chooses."""

    @property
    def loss(self) -> float:
        """How much longer the chosen way took than dense: at most nothing, for a rule that is never slower."""
        return (self.sparse_ms if self.is_sparse else self.dense_ms) / self.dense_ms - 1


def choices(speed: DeviceSpeed, steps: Sequence[MeasuredStep]) -> list[Choice]:
    """Return the rule's choices for all rounds that were measured dense and sparse."""
    both = [
        {(step.context, step.num_requests): step for step in steps if step.is_sparse == way} for way in (False, True)
    ]
    found = []
    for context, num_requests in sorted(both[0].keys() & both[1].keys()):
        dense, sparse = (steps_of[context, num_requests] for steps_of in both)
        gains = estimate_ms(speed, sparse) < (1 - LEAST_GAIN) * estimate_ms(speed, dense)
        is_long = sparse.num_blocks >= LEAST_LENGTH * sparse.sizes.budget_blocks
        found.append(
            Choice(
                context=context,
                num_requests=num_requests,
                dense_ms=dense.step_ms,
                sparse_ms=sparse.step_ms,
                is_sparse=gains and is_long,
            )
        )
    return found


def _foreground_ms(speed: DeviceSpeed, step: MeasuredStep) -> float:
    """Return what a step takes without its transfer."""
    num_layers = step.sizes.num_layers
    found = (
        1e3 * _dense_bytes(step) / speed.memory_bytes_per_s
        + speed.layer_ms * num_layers
        + speed.row_ms * step.num_requests
    )
    if step.is_sparse:
        found += speed.sparse_layer_ms * num_layers + 1e3 * _predicted_bytes(step) / speed.predict_bytes_per_s
    return found


def _dense_bytes(step: MeasuredStep) -> float:
    """Return the bytes of weights and attended blocks of a step."""
    blocks = step.sizes.budget_blocks if step.is_sparse else step.num_blocks
    return step.sizes.weight_bytes + step.num_requests * blocks * step.sizes.block_bytes


def _predicted_bytes(step: MeasuredStep) -> float:
    """Return the bytes of summary rows that a sparse step reads."""
    return step.num_requests * step.num_blocks * step.sizes.block_bytes / step.sizes.rows_per_page


def _speed(ms_per_byte: float) -> float:
    return 1e3 / ms_per_byte if ms_per_byte > 1e3 / FASTEST_BYTES_PER_S else FASTEST_BYTES_PER_S


def _need(steps: Sequence[MeasuredStep], kind: str) -> None:
    """Check that steps differ enough to tell the terms apart."""
    contexts, requests = ({getattr(step, name) for step in steps} for name in ("context", "num_requests"))
    if min(len(contexts), len(requests)) < 2:
        raise ConfigError(
            f"FILE: expected {kind} rounds of 2 contexts and 2 numbers of requests at least, "
            f"got {len(contexts)} and {len(requests)}"
        )


def _least_squares(
    columns: Sequence[Sequence[float]], wanted: Sequence[float], scales: Sequence[float] | None = None
) -> list[float]:
    """Return factors of the columns, none negative, for which the sum of squared relative errors is least.

    Args:
        columns: A row for each measurement.
        wanted: What the row's sum should be.
        scales: What errors are relative to; by default what is wanted.
    """
    rows = [
        ([value / scale for value in row], want / scale)
        for row, want, scale in zip(columns, wanted, scales or wanted, strict=True)
    ]
    count = len(columns[0])
    best: tuple[float, list[float]] | None = None
    # So few terms that all ways to leave some out can be tried; the best of those without a negative one is the answer.
    for kept in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(count + 1)):
        solved = _solve(
            [[sum(row[i] * row[j] for row, _ in rows) for j in kept] for i in kept],
            [sum(row[i] * want for row, want in rows) for i in kept],
        )
        if solved is None or min(solved, default=0.0) < 0:
            continue
        factors = [0.0] * count
        for place, factor in zip(kept, solved, strict=True):
            factors[place] = factor
        error = sum((sum(f * x for f, x in zip(factors, row, strict=True)) - want) ** 2 for row, want in rows)
        if best is None or error < best[0]:
            best = error, factors
    assert best is not None
    return best[1]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small system of equations by elimination; None if it has no single solution."""
    # Terms are bytes and milliseconds: to one scale first.
    scales = [matrix[i][i] ** 0.5 or 1.0 for i in range(len(right))]
    rows = [
        [*(value / (scales[i] * scale) for value, scale in zip(line, scales, strict=True)), right[i] / scales[i]]
        for i, line in enumerate(matrix)
    ]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda row: abs(rows[row][i]))
        if abs(rows[pivot][i]) < 1e-9:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [rows[i][-1] / rows[i][i] / scales[i] for i in range(len(rows))]
