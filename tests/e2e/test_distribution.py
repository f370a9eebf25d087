"""Draft tokens that are always rejected must leave no trace in what is sampled, at any temperature."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, chi2_contingency

from oasiskv.engine.testing import EngineProcess, Reply, random_requests, write_tiny_model

pytestmark = pytest.mark.timeout(300)

VOCAB = 32
NUM_SAMPLES = {"v1": 1500, "v2": 250}
"""Triton's interpreter takes milliseconds a request."""
LEAST_P = 1e-3
"""A right sampler fails a test once in a thousand seeds; seeds are fixed."""
DENSE = {"budget_blocks": 16}
SPARSE = {"budget_blocks": 3}


@pytest.fixture(scope="session")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("distribution") / "model", vocab_size=VOCAB)
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 160,
        "block_size": 16,
        "max_num_seqs": 128,
        "max_logprobs": VOCAB,
    }


@pytest.fixture(scope="session")
def drafted(undrafted: dict[str, Any]) -> dict[str, Any]:
    """Return an engine whose drafter is the target itself: a rejection that avoids the draft would avoid the mode."""
    drafter = {"method": "draft_model", "model": undrafted["model"], "num_speculative_tokens": 1}
    return undrafted | {"speculative_config": drafter}


@pytest.fixture(params=["v1", "v2"])
def runner(request: pytest.FixtureRequest) -> str:
    runner: str = request.param
    return runner


@pytest.fixture
def process(runner: str, request: pytest.FixtureRequest) -> EngineProcess:
    process: EngineProcess = request.getfixturevalue("backend" if runner == "v1" else "backend_v2")
    return process


@pytest.fixture
def num_samples(runner: str) -> int:
    return NUM_SAMPLES[runner]


def samples(length: int, n: int, **params: Any) -> list[dict[str, Any]]:
    return random_requests([length], 4, vocab_size=VOCAB, temperature=1.3, n=n, **params)


def test_tokens_after_a_rejected_draft_are_distributed_as_without_a_drafter(
    process: EngineProcess, num_samples: int, undrafted: dict[str, Any], drafted: dict[str, Any]
) -> None:
    with_drafter = process.run(drafted, samples(40, num_samples), settings=DENSE)
    # Another seed, so that the samples are others.
    without = process.run(undrafted | {"seed": 1}, samples(40, num_samples), settings=DENSE)
    # Token 0 comes from prefill, before any draft.
    for position in (1, 2, 3):
        counts = [Counter(tokens[position] for tokens in reply.tokens) for reply in (with_drafter, without)]
        table = np.array([[count[token] for token in range(VOCAB)] for count in counts])
        is_common = table.sum(0) >= 10
        merged = np.column_stack([table[:, is_common], table[:, ~is_common].sum(1)])
        p = chi2_contingency(merged[:, merged.sum(0) > 0]).pvalue
        print(f"token {position}: p = {p:.3f}")
        assert p > LEAST_P


def test_sparse_tokens_follow_the_distribution_that_the_target_computed(
    process: EngineProcess, num_samples: int, drafted: dict[str, Any]
) -> None:
    reply = process.run(drafted, samples(75, num_samples, logprobs=VOCAB), settings=SPARSE)
    assert reply.counts["source_draft"] > num_samples
    assert_follows_its_logprobs(reply)


def assert_follows_its_logprobs(reply: Reply) -> None:
    """Compare how often each token was sampled with the sum of its probabilities, over all steps that had drafts."""
    observed, expected, variance = np.zeros(VOCAB), np.zeros(VOCAB), np.zeros((VOCAB, VOCAB))
    for completion in reply.outputs[0]["completions"]:
        for token, entries in list(zip(completion["tokens"], completion["logprobs"], strict=True))[1:]:
            logits = np.full(VOCAB, -np.inf)
            for entry, value in entries:
                logits[entry] = value / 1.3  # logprobs are of temperature 1
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            observed[token] += 1
            expected += probabilities
            variance += np.diag(probabilities) - np.outer(probabilities, probabilities)
    # The differences are nearly normal with this covariance, whatever the steps have in common.
    is_common = expected >= 10
    difference = (observed - expected)[is_common][:-1]
    covariance = variance[np.ix_(is_common, is_common)][:-1, :-1]
    statistic = difference @ np.linalg.solve(covariance, difference)
    p = chi2.sf(statistic, len(difference))
    print(f"chi-square {statistic:.1f} over {len(difference)} tokens: p = {p:.3f}")
    assert p > LEAST_P


def test_seeded_requests_get_the_same_tokens_with_and_without_a_drafter(
    process: EngineProcess, undrafted: dict[str, Any], drafted: dict[str, Any]
) -> None:
    requests = [
        random_requests([40], 60, vocab_size=VOCAB, prompt_seed=seed, seed=seed, temperature=temperature)[0]
        for seed, temperature in enumerate((0.5, 1.0, 1.3))
    ]
    with_drafter = process.run(drafted, requests, settings=DENSE)
    assert with_drafter.tokens == process.run(undrafted, requests, settings=DENSE).tokens
