"""A drafter that runs only while a request is sparse: what its layer holds and chooses later is the same."""

from typing import Any

import pytest

from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_eagle3, write_tiny_model

# Model runner V2 on a CPU runs by Triton's interpreter, which is slow.
pytestmark = pytest.mark.timeout(300)

# The normal token's query chooses in the target's layers whatever the drafts are, so that runs can be compared.
SETTINGS = {"budget_blocks": 6, "prediction": "previous", "debug_verify": True, "debug_poison": True}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drafting")
    model = write_tiny_model(folder / "model")
    head = write_tiny_eagle3(folder / "head", model)
    options = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 16}
    return options | {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 1}}


def run(process: EngineProcess, engine: dict[str, Any], settings: dict[str, Any]) -> Reply:
    # One request becomes sparse after 27 tokens, the other after 35: until then no step has a sparse row.
    return process.run(engine, random_requests([101, 92], 50), settings=settings)


def test_a_drafter_that_was_left_out_leaves_no_trace_in_what_its_layer_chooses(
    backend_v2: EngineProcess, engine: dict[str, Any]
) -> None:
    always = run(backend_v2, engine, SETTINGS)
    sparse = run(backend_v2, engine, SETTINGS | {"drafting": "when-sparse"})
    assert always.counts["undrafted_steps"] == 0
    assert 10 < sparse.counts["undrafted_steps"] < sparse.num_steps
    assert always.counts["switches"] == sparse.counts["switches"] == 2
    assert sparse.tokens == always.tokens
    # Counted over the drafter's layer too, whose choices depend on its own keys and queries.
    for name in ("predicted", "hit", "fetched", "deferred", "wasted", "evicted", "sparse_rows", "store_bytes"):
        assert sparse.counts[name] == always.counts[name] > 0 or name in ("deferred", "wasted")
    assert sparse.pool_after == sparse.pool_before


def test_only_the_first_sparse_step_of_a_request_looks_ahead_without_a_draft(
    backend_v2: EngineProcess, engine: dict[str, Any]
) -> None:
    settings = SETTINGS | {"prediction": "lookahead", "drafting": "when-sparse"}
    reply = run(backend_v2, engine, settings)
    assert reply.counts["undrafted_steps"] > 10
    assert reply.counts["source_self"] == reply.counts["switches"] == 2
    assert reply.counts["source_draft"] == reply.counts["sparse_rows"] - 2
