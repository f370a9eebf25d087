"""What the backend's counters look like in the server's log."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram

pytest.importorskip("vllm", reason="the counters travel in vLLM's own classes")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn
    from oasiskv.engine.vllm.stats import LookaheadPromMetrics, LookaheadStats


def test_the_log_shows_sums_and_the_latest_levels_by_the_metrics_names_but_no_zeros_and_no_long_fractions() -> None:
    stats = LookaheadStats.of(
        {"hit": 3, "source_self": 1, "late": 0, "stall_seconds": 0.25}, {"host_blocks_held": 5, "cap_blocks": 4}
    )
    stats.aggregate(LookaheadStats.of({"hit": 4, "stall_seconds": 1e-5}, {"host_blocks_held": 0}))
    assert stats.reduce() == {"hit_blocks": 7, "lookahead_self": 1, "stall_seconds": 0.25, "cap_blocks": 4}


def test_of_several_api_servers_the_latest_level_counts() -> None:
    modes = set()

    def make_gauge(**given: Any) -> Gauge:
        modes.add(given.get("multiprocess_mode"))
        return Gauge(**given)

    types = {Counter: Counter, Gauge: make_gauge, Histogram: Histogram}
    LookaheadPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    # Else each server would show a level of its own, that of an idle one an old one.
    assert modes == {"mostrecent"}
