"""Request features of vLLM under a drafter: each works, or is refused in words. docs/features.md shows the table."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oasiskv.engine.testing import (
    EngineProcess,
    EngineStartError,
    random_requests,
    write_tiny_eagle3,
    write_tiny_lora,
    write_tiny_model,
    write_word_tokenizer,
)

pytestmark = pytest.mark.timeout(300)

DOCUMENT = Path(__file__).parents[2] / "docs" / "features.md"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY},
}


@dataclass(frozen=True, kw_only=True)
class Feature:
    name: str
    params: dict[str, Any]
    request: dict[str, Any] = field(default_factory=dict)
    refusal: str | None = None
    """What vLLM says to it when there is a drafter; None where it works."""


FEATURES = [
    Feature(name="greedy decoding", params={}),
    Feature(name="temperature, seed", params={"temperature": 0.9, "seed": 1}),
    Feature(name="top_p, top_k", params={"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 2}),
    Feature(
        name="presence, frequency and repetition penalties",
        params={"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    ),
    Feature(
        name="min_p",
        params={"temperature": 0.9, "seed": 3, "min_p": 0.2},
        refusal="min_p and logit_bias sampling parameters are not yet supported with speculative decoding",
    ),
    Feature(
        name="logit_bias",
        params={"logit_bias": {"28": 8.0}},
        refusal="min_p and logit_bias sampling parameters are not yet supported with speculative decoding",
    ),
    Feature(name="logprobs", params={"logprobs": 3}),
    Feature(name="prompt_logprobs", params={"prompt_logprobs": 2}),
    Feature(name="stop strings", params={"stop": ["."], "detokenize": True}),
    Feature(name="stop_token_ids, min_tokens", params={"stop_token_ids": [30, 28], "min_tokens": 12}),
    Feature(name="bad_words", params={"bad_words": ["the", " the"], "detokenize": True}),
    Feature(name="allowed_token_ids", params={"allowed_token_ids": list(range(200, 900))}),
    Feature(name="n > 1", params={"temperature": 0.9, "seed": 4, "n": 3}),
    Feature(
        name="structured output (JSON schema)",
        params={"structured_outputs": {"json": CITY}, "max_tokens": 60, "ignore_eos": False, "detokenize": True},
    ),
    Feature(
        name="structured output (choice)",
        params={"structured_outputs": {"choice": ["Paris", "Rome"]}, "ignore_eos": False, "detokenize": True},
    ),
    Feature(name="tools (in the chat template)", params={"detokenize": True}, request={"tools": [TOOL]}),
]
CUSTOM_PROCESSORS_REFUSAL = "Custom logits processors are not supported when speculative decoding is enabled"
"""vLLM says it when a server with model runner V1 starts."""


def render() -> str:
    """Return the page of documentation."""
    rows = [(feature.name, feature.refusal) for feature in FEATURES]
    cells = [(name, "works" if refusal is None else f"refused: “{refusal}”") for name, refusal in rows]
    custom = f"works with model runner V2 (GPUs); refused with V1 (CPU): “{CUSTOM_PROCESSORS_REFUSAL}”"
    cells += [("LoRA adapters", "works"), ("custom logits processors", custom)]
    lines = [
        "# Request features",
        "",
        "Without a drafter every feature below works as in stock vLLM. With one, drafts only look ahead and are never",
        "accepted, so the tokens are those without a drafter; what vLLM itself refuses beside a drafter stays refused.",
        "Each line is a test in `tests/e2e/test_features.py`, from which this table comes.",
        "",
        "| feature | without a drafter | with a drafter |",
        "| --- | --- | --- |",
        *(f"| {name} | works | {cell} |" for name, cell in cells),
    ]
    return "\n".join(lines) + "\n"


def test_the_documented_table_is_the_tested_one() -> None:
    assert DOCUMENT.read_text() == render(), "write it anew: python tests/e2e/test_features.py"


def make_requests() -> list[dict[str, Any]]:
    chat = [{"role": "user", "content": "Name the capital of Italy and describe it in one long sentence."}]
    return [{"chat": chat, "params": {"max_tokens": 24} | feature.params} | feature.request for feature in FEATURES]


@pytest.fixture(scope="session")
def undrafted(smollm2: Path) -> dict[str, Any]:
    return {"model": str(smollm2), "max_model_len": 512, "block_size": 16, "max_num_seqs": 24}


@pytest.fixture(scope="session")
def drafted(undrafted: dict[str, Any], smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    drafter = write_tiny_eagle3(tmp_path_factory.mktemp("features") / "eagle3", smollm2)
    return undrafted | {"speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1}}


DENSE = {"budget_blocks": 33, "host_pool_bytes": "256MiB"}
SPARSE = {"budget_blocks": 2, "host_pool_bytes": "256MiB", "debug_verify": True}


def assert_alike(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for got, expected in zip(mine["completions"], theirs["completions"], strict=True):
        for part in ("tokens", "text", "finish_reason"):
            assert got[part] == expected[part]
        assert (got["logprobs"] is None) == (expected["logprobs"] is None)
        if got["logprobs"] is not None:
            assert_logprobs_close(got["logprobs"], expected["logprobs"])
    assert (mine["prompt_logprobs"] is None) == (theirs["prompt_logprobs"] is None)
    if mine["prompt_logprobs"] is not None:
        assert_logprobs_close(mine["prompt_logprobs"][1:], theirs["prompt_logprobs"][1:])


def assert_logprobs_close(got: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert all(math.isclose(a, b, abs_tol=1e-3) for (_, a), (_, b) in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("index", range(len(FEATURES)), ids=[feature.name for feature in FEATURES])
def test_a_feature_works_without_a_drafter_as_in_stock_vllm(
    backend: EngineProcess, stock: EngineProcess, undrafted: dict[str, Any], index: int
) -> None:
    ours = backend.run(undrafted, make_requests(), settings=DENSE).outputs[index]
    assert_alike(ours, stock.run(undrafted | {"block_size": 32}, make_requests()).outputs[index])


@pytest.mark.parametrize("index", range(len(FEATURES)), ids=[feature.name for feature in FEATURES])
def test_a_feature_under_a_drafter_works_or_is_refused_in_words(
    backend: EngineProcess, undrafted: dict[str, Any], drafted: dict[str, Any], index: int
) -> None:
    with_drafter = backend.run(drafted, make_requests(), settings=DENSE).outputs[index]
    if (refusal := FEATURES[index].refusal) is not None:
        assert refusal in with_drafter["error"]
        return
    assert_alike(with_drafter, backend.run(undrafted, make_requests(), settings=DENSE).outputs[index])


def test_features_that_shape_the_output_do_so_in_sparse_requests_too(
    backend: EngineProcess, drafted: dict[str, Any]
) -> None:
    reply = backend.run(drafted, make_requests(), settings=SPARSE)
    first = {
        feature.name: output["completions"][0]
        for feature, output in zip(FEATURES, reply.outputs, strict=True)
        if feature.refusal is None
    }
    assert reply.counts["source_draft"] > 0
    city = json.loads(first["structured output (JSON schema)"]["text"])
    assert isinstance(city["is_capital"], bool)
    assert first["structured output (choice)"]["text"] in ("Paris", "Rome")
    assert set(first["allowed_token_ids"]["tokens"]) <= set(range(200, 900))
    assert all(len(position) >= 3 for position in first["logprobs"]["logprobs"])
    assert " the" not in first["bad_words"]["text"]
    assert reply.pool_after == reply.pool_before


def test_custom_logits_processors_work_without_a_drafter_and_are_refused_with_one(
    backend: EngineProcess, undrafted: dict[str, Any], drafted: dict[str, Any]
) -> None:
    request = random_requests([40], 16, extra_args={"even_tokens_only": True})
    processor = {"custom_logits_processor": True}
    reply = backend.run(undrafted | processor, request, settings=SPARSE)
    assert reply.counts["switches"] == 1
    assert all(token % 2 == 0 for token in reply.tokens[0])
    with pytest.raises(EngineStartError, match=CUSTOM_PROCESSORS_REFUSAL):
        backend.run(drafted | processor, request, settings=SPARSE)


@pytest.mark.parametrize("has_drafter", [False, True], ids=["no-drafter", "eagle3"])
def test_lora_adapters_give_the_tokens_of_stock_vllm(
    backend: EngineProcess, stock: EngineProcess, tmp_path: Path, has_drafter: bool
) -> None:
    model = write_tiny_model(tmp_path / "model")
    adapter = str(write_tiny_lora(tmp_path / "adapter", model))
    drafter = {
        "method": "eagle3",
        "model": str(write_tiny_eagle3(tmp_path / "eagle3", model)),
        "num_speculative_tokens": 1,
    }
    engine: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    # Apart: on CPU vLLM gives the adapter to requests without one that run beside it.
    plain = random_requests([37, 120], 24)
    adapted = [request | {"lora": adapter} for request in plain]
    stocks = [stock.run(engine | {"block_size": 32}, requests) for requests in (plain, adapted)]
    assert stocks[0].tokens != stocks[1].tokens
    if has_drafter:
        engine["speculative_config"] = drafter
    for requests, expected in zip((plain, adapted), stocks, strict=True):
        ours = backend.run(engine | {"block_size": 16}, requests, settings={"budget_blocks": 33})
        assert ours.tokens == expected.tokens


# Model runner V2, the one on GPUs, has samplers of its own. Triton's interpreter cannot run its kernels for top_p and
# for structured outputs.
V2_FEATURES = [
    Feature(name="greedy decoding", params={}),
    Feature(name="temperature, seed", params={"temperature": 0.9, "seed": 1}),
    Feature(
        name="presence, frequency and repetition penalties",
        params={"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    ),
    Feature(name="min_p", params={"temperature": 0.9, "seed": 3, "min_p": 0.2}, refusal="min_p and logit_bias"),
    Feature(name="logit_bias", params={"logit_bias": {"28": 8.0}}, refusal="min_p and logit_bias"),
    Feature(name="logprobs", params={"logprobs": 3}),
    Feature(name="prompt_logprobs", params={"prompt_logprobs": 2}),
    Feature(name="stop_token_ids, min_tokens", params={"stop_token_ids": list(range(0, 256, 3)), "min_tokens": 12}),
    Feature(name="bad_words", params={"bad_words": ["w7", "w8 w9"], "detokenize": True}),
    Feature(name="allowed_token_ids", params={"allowed_token_ids": list(range(20, 90))}),
    Feature(name="n > 1", params={"temperature": 0.9, "seed": 4, "n": 2}),
    Feature(name="custom logits processors", params={"extra_args": {"even_tokens_only": True}}),
]


@pytest.fixture(scope="session")
def undrafted_v2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("features-v2") / "model")
    write_word_tokenizer(model, 256)
    return {
        "model": str(model),
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 16,
        "custom_logits_processor": True,
    }


@pytest.fixture(scope="session")
def drafted_v2(undrafted_v2: dict[str, Any]) -> dict[str, Any]:
    model = Path(undrafted_v2["model"])
    drafter = write_tiny_eagle3(model.parent / "eagle3", model)
    return undrafted_v2 | {
        "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 1}
    }


def v2_requests() -> list[dict[str, Any]]:
    prompts = random_requests([100 + index for index in range(len(V2_FEATURES))], 14)
    return [
        request | {"params": request["params"] | feature.params}
        for request, feature in zip(prompts, V2_FEATURES, strict=True)
    ]


@pytest.mark.parametrize("index", range(len(V2_FEATURES)), ids=[feature.name for feature in V2_FEATURES])
def test_a_feature_works_on_model_runner_v2_with_and_without_a_drafter_as_in_stock_vllm(
    backend_v2: EngineProcess,
    stock_v2: EngineProcess,
    undrafted_v2: dict[str, Any],
    drafted_v2: dict[str, Any],
    index: int,
) -> None:
    expected = stock_v2.run(undrafted_v2 | {"block_size": 32}, v2_requests()).outputs[index]
    assert expected["completions"][0]["tokens"]
    assert_alike(backend_v2.run(undrafted_v2, v2_requests(), settings=DENSE).outputs[index], expected)
    with_drafter = backend_v2.run(drafted_v2, v2_requests(), settings=DENSE).outputs[index]
    if (refusal := V2_FEATURES[index].refusal) is not None:
        assert refusal in with_drafter["error"]
        return
    assert_alike(with_drafter, expected)


def test_features_shape_the_output_of_sparse_requests_on_model_runner_v2_too(
    backend_v2: EngineProcess, drafted_v2: dict[str, Any]
) -> None:
    reply = backend_v2.run(drafted_v2, v2_requests(), settings=SPARSE)
    tokens = {
        feature.name: output["completions"][0]["tokens"]
        for feature, output in zip(V2_FEATURES, reply.outputs, strict=True)
        if feature.refusal is None
    }
    assert reply.counts["source_draft"] > 0
    assert reply.counts["sparse_rows"] > 0
    assert set(tokens["allowed_token_ids"]) <= set(range(20, 90))
    assert 7 not in tokens["bad_words"]
    assert len(tokens["stop_token_ids, min_tokens"]) >= 12
    assert all(token % 2 == 0 for token in tokens["custom logits processors"])
    assert reply.pool_after == reply.pool_before


if __name__ == "__main__":
    DOCUMENT.write_text(render())
