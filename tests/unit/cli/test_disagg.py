import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oasiskv.cli import disagg
from oasiskv.cli.disagg_report import draw
from oasiskv.cli.shaped_link import ShapedLink
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.trace import SelectionTrace


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    disagg.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modes", "full", "half"], "--modes: expected dense, full, .*, got 'half'"),
        (["--steps", "0"], "--steps: expected at least 1"),
        (["--requests", "2", "--concurrency", "3"], "--concurrency: expected at most --requests, 2, got 3"),
        (["--links", "10", "0"], "--step-ms, --links: expected numbers above 0"),
        (["--host-less", "0.5"], "--host-less: expected numbers of at least 1"),
        (["--step-ms", "0"], "--step-ms, --links: expected numbers above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    given: list[str], message: str, tmp_path: Path
) -> None:
    args = arguments(*given)
    args.out = tmp_path / "results"
    with pytest.raises(ConfigError, match=f"^{message}"):
        disagg.run(args)
    assert not args.out.exists()


def trace(num_heads: int, num_layers: int, budget: int) -> SelectionTrace:
    blocks = np.tile(np.arange(budget, dtype=np.uint16), (2, num_layers, num_heads, 1))
    return SelectionTrace(num_tokens=32768, block_size=16, num_sinks=1, source="a test", blocks=blocks)


def test_bytes_are_told_of_the_shape_of_an_8b_model() -> None:
    scale = disagg.Scale(trace(num_heads=8, num_layers=4, budget=128))
    assert scale.full_bytes == 32768 * 36 * 8 * 128 * 2 * 2
    # 4 layers and a head_dim of 8, whose units have room for a map of 128 blocks.
    assert (scale.head_dim, scale.factor) == (8, 144)
    own = disagg.Scale(trace(num_heads=3, num_layers=30, budget=256))
    assert (own.head_dim, own.factor) == (16, 8)
    assert own.full_bytes == 32768 * 30 * 3 * 128 * 2 * 2


ROW = {
    "trace": "32k", "mode": "full", "full_gib": 4.5, "first_set_gib": 4.5, "first_set_x": 1.0, "admitted_gib": 4.78,
    "missed_gib": 0.0, "total_gib": 4.78, "host_gib": 4.6, "host_peak_gib": 4.7,
    "net_gb_per_s": 2.0, "net_gb_per_s_peak": 5.0,
    "concurrency": 2, "window_s": 1.0, "network_gb_per_s": [5.0, 0.0], "host_gib_over_time": [4.5, 4.6],
}  # fmt: skip
LINK = {
    "trace": "32k",
    "link": "10 Gb/s",
    "mode": "full",
    "path": "one-sided",
    "admitted_gib": 4.78,
    "admission_s": 4.2,
}


def test_a_column_without_a_value_is_told_so() -> None:
    head, line = disagg.table([ROW]).splitlines()
    assert line.split()[:4] == ["32k", "full", "4.50", "4.50"]
    assert line.split()[head.split().index("total_x")] == "-"
    assert disagg.links_table([LINK | {"gb_per_s": 1.2}]).splitlines()[1].split()[-2:] == ["4.200", "1.20"]


def test_a_report_keeps_lists_of_numbers_on_one_line_and_reads_back() -> None:
    report = {"rows": [ROW], "text": "[1,\n 2]"}
    text = disagg._json(report)
    assert json.loads(text) == report
    assert '"network_gb_per_s": [ 5.0, 0.0 ]' in text


def test_a_picture_is_drawn_with_links_and_without(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    report = {"what": "a replay", "hardware": "2 cores", "date": "2026-11-30", "rows": [ROW]}
    for links in ([], [LINK]):
        path = tmp_path / f"{len(links)}.png"
        draw({**report, "links": links}, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_a_link_is_there_for_the_length_of_a_with_block() -> None:
    try:
        with ShapedLink(8e6) as link:
            held = namespaces()
            shown = subprocess.run(
                [*link.prefix(0), "tc", "qdisc", "show"], capture_output=True, text=True, check=True
            ).stdout
            assert "tbf" in shown
            assert "rate 8Mbit" in shown
            assert all(name in held for name in link._names)
    except UnsupportedError as error:
        pytest.skip(f"this host allows no shaped link: {error}")
    assert not any(name in namespaces() for name in link._names)


def test_a_machine_that_allows_no_link_says_why_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def refuse(command: Any, **_: Any) -> "subprocess.CompletedProcess[str]":
        if "del" in command:
            removed.append(command[-1])
        return subprocess.CompletedProcess(command, 1, "", "Operation not permitted\nmore")

    monkeypatch.setattr("oasiskv.cli.shaped_link.subprocess.run", refuse)
    with pytest.raises(
        UnsupportedError, match=r"^link: expected `ip netns add .*` to work here, got Operation not perm"
    ):
        ShapedLink(1e9).__enter__()
    assert len(removed) == 2

    def absent(command: Any, **_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", command[0])

    monkeypatch.setattr("oasiskv.cli.shaped_link.subprocess.run", absent)
    with pytest.raises(UnsupportedError, match=r"^link: expected `ip` to work here"), ShapedLink(1e9):
        pass


def test_what_crossed_is_told_second_by_second() -> None:
    services = pytest.importorskip("oasiskv.cli.disagg_services", reason="the extra services is not installed")
    traffic = services.Traffic(times_s=[0.0, 0.4, 0.9, 2.2], fetched_bytes=[100, 100, 3_000_100, 4_000_100])
    assert services._windows(traffic) == [3.0, 0.0, 1.0]


SERVED = {
    "mode": "full", "model": "tiny", "requests": 2, "full_mib": 3.0, "admitted_mib": 3.5, "missed_mib": 0.5,
    "host_mib": 3.0, "ttft_s": 0.7, "network_mb_per_s": [3.0, 0.0],
}  # fmt: skip


def test_a_picture_of_services_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    dense = SERVED | {"mode": "dense"}
    report = {"what": "services", "hardware": "2 cores", "date": "2026-11-30", "rows": [dense, SERVED]}
    draw(report, tmp_path / "services.png")
    assert (tmp_path / "services.png").read_bytes().startswith(b"\x89PNG")


def test_services_are_told_mode_by_mode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    services = pytest.importorskip("oasiskv.cli.disagg_services", reason="the extra services is not installed")
    row = {name: value for name, value in SERVED.items() if name not in ("mode", "model")}
    launch = SimpleNamespace(model=SimpleNamespace(path="/models/tiny"))
    asked = []

    def prepare(args: argparse.Namespace, settings: Any) -> Any:
        asked.append(settings)
        return launch

    monkeypatch.setattr(services, "find_device", lambda: "cpu")
    monkeypatch.setattr(services, "_prepare", prepare)
    monkeypatch.setattr(services, "make_windows", lambda *_: [])
    monkeypatch.setattr(services, "_served", lambda *_: row | {"handovers": 2})
    args = arguments("--model", "tiny")
    report = services.measure(args, [(name, disagg.MODES[name]) for name in ("dense", "partial")])
    assert asked == [{"handover_mode": "dense"}, {"handover_mode": "partial"}]
    assert [(one["mode"], one["model"]) for one in report["rows"]] == [("dense", "tiny"), ("partial", "tiny")]
    head, dense, partial = capsys.readouterr().out.splitlines()[-3:]
    place = head.split().index("handovers")
    assert (dense.split()[place], partial.split()[place]) == ("2", "2")
