"""What a round of the sweep comes to, from what was counted."""

import pytest

from oasiskv.engine.vllm import rounds

ROW = {"running": 10, "requests": 12, "tokens": 1012, "steps": 50, "tpot_ms_mean": 20.0, "held_blocks": 640}
SPENT = {
    "sparse_rows": 500,
    "allowed_blocks": 3000,
    "fetched": 3000 * 8 * 0.9,
    "predicted": 100_000,
    "hit": 90_000,
    "deferred": 2_000,
    "late_layers": 3,
    "stall_seconds": 0.1,
    "load_bytes": 5e9,
    "transfer_seconds": 0.0,
}


def test_shares_and_rates_are_those_of_the_steps_in_which_all_decode() -> None:
    derived = rounds.derive(ROW, SPENT, num_pairs=8)
    assert derived["cap_share"] == pytest.approx(0.9)
    assert derived["cap_mean"] == 6
    assert derived["sparse_share"] == 0.5
    assert (derived["hit_share"], derived["deferred_share"]) == (0.9, 0.02)
    assert derived["stall_ms_per_step"] == 2
    assert derived["load_bytes_per_step"] == 1e8  # 10 MB a row
    assert derived["link_gb_per_s"] == pytest.approx(5)
    assert "link_busy_gb_per_s" not in derived
    assert rounds.derive(ROW, SPENT | {"transfer_seconds": 0.2}, num_pairs=8)["link_busy_gb_per_s"] == 25


def test_a_rule_that_fetches_nothing_has_shares_of_nothing() -> None:
    derived = rounds.derive(ROW, dict.fromkeys(SPENT, 0), num_pairs=8)
    assert set(derived.values()) == {0}


def test_what_attention_reads_is_the_working_set_of_sparse_rows_and_everything_of_dense_ones() -> None:
    sizes = {"context": 1024, "block_size": 16, "block_bytes": 100, "budget_blocks": 8, "page_rows": 16}
    dense = rounds.memory(ROW, **sizes)
    assert dense == {"hbm_kv_bytes": 64_000, "hbm_read_bytes_per_step": 10 * 64 * 100}
    assert rounds.memory(ROW | {"sparse_share": 1.0}, **sizes)["hbm_read_bytes_per_step"] == 10 * (8 + 4) * 100
    assert rounds.memory(ROW | {"sparse_share": 0.5}, **sizes)["hbm_read_bytes_per_step"] == 10 * (32 + 6) * 100
