"""Long random traffic through a real engine, with every resident byte compared before each attention."""

from pathlib import Path

import pytest

from oasiskv.engine.testing import EngineProcess, random_traffic, write_tiny_eagle3, write_tiny_model


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hold_layers", [None, 0, 1, 2, 3, 4, 5])
def test_two_hundred_requests_with_aborts_and_preemptions_are_all_accounted_for(
    backend: EngineProcess, tmp_path: Path, hold_layers: int | None
) -> None:
    model = write_tiny_model(tmp_path / "model")
    drafter = write_tiny_eagle3(tmp_path / "eagle3", model)
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "block_size": 16,
        "num_gpu_blocks_override": 90,
        "max_num_batched_tokens": 256,
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1},
    }
    settings = {"budget_blocks": 6, "debug_verify": True, "debug_poison": True, "debug_hold_layers": hold_layers}
    requests, preempt_at = random_traffic(200, seed=10 + (hold_layers or 0))
    reply = backend.run(engine, requests, settings=settings, preempt_at=preempt_at)
    for request, output in zip(requests, reply.outputs, strict=True):
        lengths = [len(completion["tokens"]) for completion in output["completions"]]
        assert "abort_at" in request or lengths == [request["params"]["max_tokens"]]
    print(f"{reply.num_steps} steps, {reply.counts['switches']:.0f} switches, {reply.counts['late']:.0f} late blocks")
    assert reply.counts["switches"] > 50
    assert reply.counts["predicted"] == reply.counts["hit"] + reply.counts["fetched"] + reply.counts["deferred"]
    assert reply.pool_after == reply.pool_before
