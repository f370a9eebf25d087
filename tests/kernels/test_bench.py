"""Every path of the kernels' benchmark on a small model, without its clock and with references as kernels."""

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from oasiskv.cli import bench as command
from oasiskv.cli import kernel_plots
from oasiskv.kernels import bench
from oasiskv.kernels.copies import Copy, Skipped
from oasiskv.kernels.foreground import Foreground
from oasiskv.kernels.timing import Action

MODEL = bench.Model(
    num_layers=2, num_kv_heads=1, group=2, head_dim=16, budget=4, max_cap=2, hidden=32, intermediate=32,
    dtype=torch.float16,
)  # fmt: skip
RATES = {"hbm_copy_gbps": 4000.0, "host_to_device_gbps": 50.0, "device_to_host_gbps": 40.0}


def run_once(actions: Sequence[Action], num_layers: int, before: Any = None, repeats: int = 1) -> float:
    """Do what would be timed, and say that it took two milliseconds."""
    if before is not None:
        before()
    for layer in range(num_layers):
        for action in actions:
            action(layer)
    return 2.0


def run_beside(foreground: Foreground, compute: Sequence[Action], copies: Sequence[Action], before: Any) -> float:
    foreground.layer(1)
    return run_once([*compute, *copies], 2, before) + 9


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, device: str) -> bench.Memory:
    if device != "cpu":
        pytest.skip("a GPU runs the benchmark itself")
    torch.manual_seed(0)
    for name in ("complete", "fp8", "predict", "select", "summarize", "transfer"):
        monkeypatch.setattr(bench, f"{name}_kernel", import_module(f"oasiskv.kernels.{name}.reference"))
    monkeypatch.setattr(bench, "measure", run_once)
    monkeypatch.setattr(bench, "measure_launched", lambda action, layers: run_once([action], layers))
    monkeypatch.setattr(bench, "measure_together", run_beside)
    monkeypatch.setattr(bench, "measure_beside", lambda _, actions, layers: (15.0, run_once(actions, layers)))
    monkeypatch.setattr(bench, "foreground_graph", lambda _: (None, 10.0))
    monkeypatch.setattr(bench, "ceilings", lambda _: RATES)
    return bench.Memory(MODEL, 150, 40, torch.device("cpu"))


SIZES = [
    bench.Size(rows=1, blocks=1024),
    bench.Size(rows=2, blocks=40, kind="mid"),
    bench.Size(rows=1, blocks=40, has_fp8_rows=True),
    bench.Size(rows=2, blocks=40, kind="mid", has_fp8_rows=True),
]


def test_every_operation_is_measured_alone_beside_a_foreground_and_against_other_copies(
    memory: bench.Memory, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = []

    def others(step: bench.Step) -> Iterable[Copy | Skipped]:
        def fail(layer: int) -> None:
            raise RuntimeError("no such address")

        sizes: dict[str, Any] = {"num_layers": 2, "num_bytes": 9, "limit": "host_to_device_gbps", "like": "transfer"}
        yield Copy(name="ours", action=step.transfer, is_captured=False, **sizes)
        yield Copy(name="lazy", action=lambda layer: None, **sizes)
        yield Copy(name="broken", action=fail, **sizes)
        yield Skipped(name="absent", reason="not built")

    bench.Bench(memory, rows.append).run(SIZES, [1], others)
    assert rows[0] == {"op": "ceilings", **RATES}
    alone = {(row["op"], row.get("kind")) for row in rows if "share" in row}
    assert {("predict", kind) for kind in ("minmax", "mid", "minmax-fp8", "mid-fp8")} <= alone
    assert {op for op, _ in alone} == {
        "predict", "select", "summarize", "round_blocks", "transfer", "transfer-fp8", "store", "store-fp8", "complete",
        "complete-fp8", "copy engine, units", "copy engine, blocks", "copy engine, blocks to host", "ours",
    }  # fmt: skip
    reasons = {row["op"]: row["skipped"] for row in rows if "skipped" in row}
    assert reasons == {
        "lazy": "it copied other bytes", "broken": "it failed: no such address", "absent": "not built"
    }  # fmt: skip
    steps = [row for row in rows if row["op"].startswith("foreground+")]
    assert [row["op"].removeprefix("foreground+") for row in steps] == [
        "predict", "select", "predict+select", "summarize", "complete", "transfer", "store", "predict+select+transfer",
        "complete-fp8", "transfer-fp8", "store-fp8", "predict+select+transfer-fp8",
    ]  # fmt: skip
    for row in steps:
        assert (row["step_ms"], row["step_slowdown"]) == (11.0, 0.1)
        assert row.get("slowdown") == (None if "select+transfer" in row["op"] else 0.5)
        assert ("gbps" in row) == (row["op"].split("+")[1].split("-")[0] in ("transfer", "store"))
    found = {"gpu": "none", "versions": {"torch": "2", "triton": "3"}, "date": "2026-11-30", "results": rows}
    kernel_plots.draw(json.loads(json.dumps(found)), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_parts_that_are_asked_for_are_measured(memory: bench.Memory) -> None:
    rows: list[dict[str, Any]] = []
    bench.Bench(memory, rows.append, ["select"]).run([bench.Size(rows=1, blocks=40)], [1])
    assert [row["op"] for row in rows] == ["ceilings", "select"]
    assert bench.PARTS == command.KERNEL_PARTS


def test_fp8_rows_are_ordinary_numbers_half_as_many_bytes(memory: bench.Memory) -> None:
    wide, narrow = (bench.Step(MODEL, memory, 2, 40, "minmax", has_fp8_rows=fp8) for fp8 in (False, True))
    assert narrow.predict_bytes / wide.predict_bytes == pytest.approx(33 / 64)
    narrow.predict(1)
    assert narrow.scores[..., 1:].isfinite().all()
    assert narrow.scores[..., 1:].abs().max() < 1e6


def test_the_command_measures_what_is_asked_for_and_keeps_it_when_something_fails(
    memory: bench.Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from oasiskv.cli.main import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(bench, "Memory", lambda *_: memory)
    monkeypatch.setattr(bench, "SIZES", [bench.Size(rows=2, blocks=40), bench.Size(rows=1, blocks=40)])
    arguments = ["bench", "kernels", "--parts", "predict", "--requests", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("kernels-*-some-gpu.json")
    assert [row.get("rows") for row in json.loads(path.read_text())["results"]] == [None, 1]
    assert path.with_suffix(".png").exists()
    path.unlink()

    def fail(*_: object) -> float:
        raise RuntimeError("device lost")

    monkeypatch.setattr(bench, "measure", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        main(arguments)
    assert [row["op"] for row in json.loads(path.read_text())["results"]] == ["ceilings"]
    capsys.readouterr()
    assert main([*arguments[:3], "prediction"]) == 2
    assert capsys.readouterr().err.startswith("error: --parts: expected predict, select,")
