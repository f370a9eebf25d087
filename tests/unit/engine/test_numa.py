"""CPUs of a memory node, as the kernel lists them."""

import os
from pathlib import Path

import pytest

from oasiskv.engine.numa import cpus_of_node, parse_cpus


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0: {1, 2, 9, 20}}[process])
    (tmp_path / "node1").mkdir()
    return tmp_path


def test_cpus_are_those_of_the_node_that_this_process_may_use(nodes: Path) -> None:
    (nodes / "node1/cpulist").write_text("0-3,8,16-31\n")
    assert cpus_of_node(1, nodes) == {1, 2, 20}


@pytest.mark.parametrize("text", ["64-127\n", "\n", "all of them\n"])
def test_there_are_none_where_none_is_allowed_or_listed(nodes: Path, text: str) -> None:
    (nodes / "node1/cpulist").write_text(text)
    assert cpus_of_node(1, nodes) == frozenset()


@pytest.mark.parametrize("node", [None, 0])
def test_there_are_none_where_the_node_is_not_known(nodes: Path, node: int | None) -> None:
    assert cpus_of_node(node, nodes) == frozenset()


@pytest.mark.parametrize(("text", "cpus"), [("7", {7}), ("0-2,5", {0, 1, 2, 5}), ("", set())])
def test_lists_are_read_as_the_kernel_writes_them(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus
