"""The tiny models are whole, vary, and depend on what lies far back; engines load them in the engine's own tests."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from oasiskv.engine.testing import Architecture, write_tiny_draft_model, write_tiny_eagle3, write_tiny_model

ARCHITECTURES = get_args(Architecture)


def load(path: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype="auto")
    assert {kind: names for kind, names in info.items() if names} == {}
    return model


def shapes(path: Path) -> dict[str, list[int]]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict


def random_prompt(num_tokens: int) -> torch.Tensor:
    return torch.randint(256, (1, num_tokens), generator=torch.Generator().manual_seed(0))


def greedy(model: Any, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    mask = torch.ones_like(prompt)
    ids: list[int] = model.generate(prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)[0].tolist()
    return ids[prompt.shape[1] :]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_goes_on_and_varies(tmp_path: Path, architecture: Architecture) -> None:
    model = load(write_tiny_model(tmp_path, architecture=architecture))
    output = greedy(model, random_prompt(100), 64)
    assert len(output) == 64
    assert len(set(output)) >= 32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_output_depends_on_the_first_block_of_a_long_prompt(tmp_path: Path, architecture: Architecture) -> None:
    model = load(write_tiny_model(tmp_path, architecture=architecture))
    prompt = random_prompt(320)
    other = prompt.clone()
    other[:, :16] = 255 - prompt[:, :16]
    with torch.no_grad():
        logits, other_logits = model(prompt).logits[0, -1], model(other).logits[0, -1]
    # Far above what the order of additions changes in float32, some 1e-5.
    assert (logits - other_logits).abs().max() > 0.05


def test_sizes_are_those_asked_for(tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path,
        architecture="qwen3",
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        head_dim=64,
        hidden_size=48,
        vocab_size=99,
        max_positions=77,
    )
    model = load(tmp_path)
    assert model(torch.arange(99)[None]).logits.shape == (1, 99, 99)
    assert model.config.max_position_embeddings == 77
    found = shapes(tmp_path)
    assert found["model.layers.2.self_attn.q_proj.weight"] == [384, 48]
    assert found["model.layers.2.self_attn.k_proj.weight"] == [192, 48]
    assert "model.layers.3.input_layernorm.weight" not in found


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    same, again, other = (
        (write_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("same", 0), ("again", 0), ("other", 1))
    )
    assert same == again
    assert same != other


def test_a_draft_model_shares_the_vocabulary_and_differs_in_what_it_says(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", architecture="qwen3_moe", vocab_size=200, max_positions=600)
    draft = write_tiny_draft_model(tmp_path / "draft", target)
    model = load(draft)
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (200, 600)
    prompt = random_prompt(50) % 200
    assert greedy(model, prompt, 16) != greedy(load(target), prompt, 16)


@pytest.mark.parametrize(("num_layers", "aux_layers"), [(1, [0, 1]), (2, [0, 1, 2]), (5, [0, 2, 5])])
def test_an_eagle3_head_reads_hidden_states_that_the_target_has(
    tmp_path: Path, num_layers: int, aux_layers: list[int]
) -> None:
    target = write_tiny_model(tmp_path / "target", architecture="qwen3", num_layers=num_layers)
    head = write_tiny_eagle3(tmp_path / "head", target)
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == aux_layers
    found = shapes(head)
    assert found["fc.weight"] == [64, 64 * len(aux_layers)]
    # The layer sees the embedding beside the hidden state, and has the target's heads without a Qwen3 norm.
    assert found["midlayer.self_attn.q_proj.weight"] == [128, 128]
    assert found["midlayer.self_attn.k_proj.weight"] == [64, 128]
    assert "midlayer.self_attn.q_norm.weight" not in found
    assert found["lm_head.weight"] == [256, 64]
