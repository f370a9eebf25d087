"""A prompt that comes while others decode sparse is computed in pieces, and alone it is not."""

import itertools
from typing import Any

import pytest

from oasiskv.engine.chunks import LEAST_TOKENS
from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_model

pytestmark = pytest.mark.timeout(300)

FIRST, LATER = random_requests([201], 32) + random_requests([1187], 8, prompt_seed=1)
REQUESTS = [FIRST, LATER | {"at": 8}]


def pieces(steps: list[dict[str, Any]], request: str) -> list[int]:
    """How many tokens of the prompt were computed step by step."""
    computed = [0, *(step["requests"][request]["num_computed"] for step in steps if request in step["requests"])]
    return [later - before for before, later in itertools.pairwise(computed) if later - before > 1]


def test_prompts_are_cut_only_beside_sparse_decodes(
    backend: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "model", num_heads=2, num_kv_heads=1, head_dim=32)
    engine = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 1536, "block_size": 16}
    settings = {"budget_blocks": 6, "debug_verify": True}
    whole = backend.run(engine, REQUESTS, settings=settings, sample=True)
    assert pieces(whole.steps, "1") == [1187]
    cut = backend.run(engine, REQUESTS, settings=settings | {"chunks": "auto"}, sample=True)
    assert pieces(cut.steps, "0") == [201]
    assert pieces(cut.steps, "1") == [LEAST_TOKENS, LEAST_TOKENS, 1187 - 2 * LEAST_TOKENS]
    assert cut.counts["switches"] == whole.counts["switches"] == 2
    assert cut.tokens[0] == whole.tokens[0]
    assert cut.pool_after == cut.pool_before
    # Alone it has nobody to hold up.
    alone = backend.run(engine, [LATER], settings=settings | {"chunks": "auto"}, sample=True)
    assert pieces(alone.steps, "0") == [1187]
