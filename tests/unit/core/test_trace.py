import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oasiskv.core import trace as traces
from oasiskv.core.errors import ConfigError
from oasiskv.core.trace import SelectionTrace, load_trace, save_trace, trace_stats
from oasiskv.core.trace_model import FITS, generate_trace


def trace(blocks: Any, **changes: Any) -> SelectionTrace:
    values: dict[str, Any] = {"num_tokens": 100, "block_size": 16, "num_sinks": 1, "source": "a test"} | changes
    return SelectionTrace(blocks=np.asarray(blocks, np.uint16), **values)


# Two layers of two heads, budget 2; 6 blocks of the prompt, and block 6 is complete when step 13 selects.
FEW = [[[[0, 1], [0, 2]], [[0, 1], [0, 1]]], [[[0, 1], [0, 3]], [[0, 2], [0, 1]]], [[[0, 4], [0, 3]], [[0, 2], [0, 5]]]]


def test_statistics_are_those_that_a_person_counts() -> None:
    stats = trace_stats(trace(FEW))
    assert (stats.num_steps, stats.num_layers, stats.num_kv_heads, stats.budget_blocks) == (2, 2, 2, 2)
    assert stats.num_prompt_blocks == 6
    assert stats.first_union == (3 + 2) / 2
    assert stats.union == np.mean([(3 + 2) / 2, (3 + 3) / 2, (3 + 3) / 2])
    # Step 1: blocks 3 and 2 are new in one head of each layer; step 2: 4 in one, 5 in the other.
    assert stats.drift == 0.5
    assert stats.reuse == 0.75
    assert stats.touched == (5 + 4) / 2
    assert stats.touched_share == 4.5 / 6


def test_a_block_that_was_completed_while_decoding_is_not_one_of_the_prompt() -> None:
    late = np.zeros((14, 1, 1, 2), np.uint16)
    late[:, ..., 1] = 1
    late[13, ..., 1] = 6
    assert trace_stats(trace(late)).touched == 2
    with pytest.raises(ConfigError, match=r"^blocks: expected distinct blocks below 6 .* in step 12"):
        trace(np.concatenate([late[1:], late[-1:]]))


@pytest.mark.parametrize("wrong", [[[0, 0], [0, 2]], [[1, 2], [0, 2]], [[0, 6], [0, 2]]])
def test_a_selection_that_names_a_block_twice_or_no_sink_or_a_later_block_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^blocks: expected distinct blocks below 6 with the first 1"):
        trace([FEW[0], [wrong, wrong]])


@pytest.mark.parametrize(("name", "value"), [("num_tokens", 0), ("block_size", 1.5), ("num_sinks", -1), ("source", "")])
def test_a_wrong_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: expected"):
        trace(FEW, **{name: value})


def test_a_saved_trace_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace.npz"
    save_trace(trace(FEW), path)
    save_trace(trace(FEW, source="the second"), path)
    found = load_trace(path)
    np.testing.assert_array_equal(found.blocks, trace(FEW).blocks)
    assert (found.num_tokens, found.block_size, found.num_sinks, found.source) == (100, 16, 1, "the second")
    assert [file.name for file in path.parent.iterdir()] == ["trace.npz"]


def test_another_version_or_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    about = {"format": "oasiskv-trace", "version": 2}
    members: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8), "blocks": np.zeros(1)}
    np.savez(path, **members)
    with pytest.raises(ConfigError, match=r"^trace: expected version 1 in .*, got 2$"):
        load_trace(path)
    for content in (b"", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^trace: expected a file of the format oasiskv-trace"):
            load_trace(path)
    np.savez(path, blocks=np.zeros(1))
    with pytest.raises(ConfigError, match=r"^trace: expected a file of the format oasiskv-trace"):
        load_trace(path)
    with pytest.raises(ConfigError, match=r"^trace: expected a file"):
        load_trace(tmp_path / "none.npz")


def test_a_trace_that_would_take_too_much_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.npz"
    wide = np.tile(np.arange(64, dtype=np.uint16), (9, 8, 16, 1))
    save_trace(trace(wide, num_tokens=16 * 64), path)
    monkeypatch.setattr(traces, "MAX_TRACE_BYTES", wide.nbytes - 1)
    monkeypatch.setattr(traces, "MAX_ABOUT_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"expected at most \d+ bytes"):
        load_trace(path)


def test_a_seed_makes_the_same_trace_and_another_seed_another() -> None:
    first, same, other = (generate_trace("24k", num_layers=1, num_steps=3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.blocks, same.blocks)
    assert not np.array_equal(first.blocks, other.blocks)
    more = generate_trace("24k", num_layers=2, num_steps=3, seed=1)
    np.testing.assert_array_equal(more.blocks[:, :1], first.blocks)


@pytest.mark.parametrize("name", FITS)
def test_generated_traces_have_the_published_figures(name: str) -> None:
    stats = trace_stats(generate_trace(name, num_layers=2, num_steps=2048, seed=0))
    for field, published in FITS[name].published:
        assert getattr(stats, field) == pytest.approx(published, rel=0.06), field


def test_what_cannot_be_generated_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^fit: expected one of 24k, 32k, got '8k'"):
        generate_trace("8k", num_layers=1, num_steps=1, seed=0)
    with pytest.raises(ConfigError, match=r"^layers: expected at least 1"):
        generate_trace("24k", num_layers=0, num_steps=1, seed=0)
