"""Every rule of prediction in a real engine, against a plain model that follows the rule token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oasiskv.core.config import LookaheadConfig
from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_eagle3, write_tiny_model
from oasiskv.engine.tiny_worker import WorkingSetModel, best_blocks

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
MARGIN = 1e-3
"""Two logits closer than this may change places: the engine sums in another order."""
SETTINGS = {"budget_blocks": 6, "fetch_ratio": 0, "min_cap": 2, "debug_verify": True, "debug_poison": True}


class PlainModel:
    """A llama in eager torch, one token at a time, whose layers attend to working sets in plain Python.

    Args:
        folder: The model.
        config: The rule, how to score and how many to fetch.
    """

    def __init__(self, folder: Path, config: LookaheadConfig) -> None:
        self.sizes = json.loads((folder / "config.json").read_text())
        self.weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
        self.config = config

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Return greedy tokens, and how far the likeliest one was ahead each time."""
        layers = self.sizes["num_hidden_layers"]
        self._sets: dict[tuple[int, int], WorkingSetModel] = {}
        self._known = 0
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._values: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._queries: list[torch.Tensor] = [torch.empty(0)] * layers
        tokens, margins = list(prompt), []
        logits = torch.empty(0)
        for position, token in enumerate(prompt):
            logits = self._step(token, position, is_prompt=True)
        for _ in range(num_tokens):
            best, second = logits.topk(2).values.tolist()
            margins.append(best - second)
            tokens.append(int(logits.argmax()))
            logits = self._step(tokens[-1], len(tokens) - 1, is_prompt=False)
        return tokens[len(prompt) :], margins

    def _step(self, token: int, position: int, *, is_prompt: bool) -> torch.Tensor:
        hidden = self.weights["model.embed_tokens.weight"][token]
        num_complete = position // BLOCK
        for layer in range(self.sizes["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attention(normed, layer, position, num_complete, is_prompt=is_prompt)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate, up = self._linear(normed, f"{name}.mlp.gate_proj"), self._linear(normed, f"{name}.mlp.up_proj")
            hidden = hidden + self._linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")
        if not is_prompt:
            self._known = num_complete
        return self._linear(self._norm(hidden, "model.norm"), "lm_head")

    def _attention(
        self, normed: torch.Tensor, layer: int, position: int, num_complete: int, *, is_prompt: bool
    ) -> torch.Tensor:
        name, size = f"model.layers.{layer}.self_attn", self.sizes["head_dim"]
        query, key, value = (self._linear(normed, f"{name}.{part}_proj").view(-1, size) for part in "qkv")
        query, key = self._rotate(query, position), self._rotate(key, position)
        self._keys[layer].append(key)
        self._values[layer].append(value)
        keys, values = torch.stack(self._keys[layer]), torch.stack(self._values[layer])
        grouped = query.view(self.sizes["num_key_value_heads"], -1, size)
        out = []
        for head, own in enumerate(grouped):
            held = list(range(position + 1))
            if not is_prompt:
                held = self._working_set(layer, head, own, keys[:, head], position, num_complete)
            scores = own @ keys[held, head].T * size**-0.5
            out.append(torch.softmax(scores, -1) @ values[held, head])
        self._queries[layer] = query
        return self._linear(torch.cat(out).flatten(), f"{name}.o_proj")

    def _working_set(
        self, layer: int, head: int, own: torch.Tensor, keys: torch.Tensor, position: int, num_complete: int
    ) -> list[int]:
        """Return the tokens to attend to in this step, and choose those of the next one."""
        config, before = self.config, self._queries[layer].view(self.sizes["num_key_value_heads"], *own.shape)[head]
        if (layer, head) not in self._sets:
            chosen = best_blocks(keys, before, num_complete, BLOCK, config)
            self._sets[layer, head] = WorkingSetModel.start(chosen, position)
        elif num_complete > self._known:
            self._sets[layer, head].complete(num_complete - 1, config.sink_blocks, position)
        held = self._sets[layer, head]
        chosen = best_blocks(keys, own, num_complete, BLOCK, config)
        cap = 0 if config.prediction == "resident" else config.first_cap
        if config.prediction == "on-demand":
            held.select(chosen, cap, position)
        attended = [block * BLOCK + token for block in held.slots for token in range(BLOCK)]
        attended += range(num_complete * BLOCK, position + 1)
        if config.prediction != "on-demand":
            held.select(chosen, cap, position)
        return attended

    def _rotate(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = heads.shape[-1] // 2
        angle = position * self.sizes["rope_theta"] ** (-torch.arange(half) / half)
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(values.pow(2).mean() + self.sizes["rms_norm_eps"])
        normed: torch.Tensor = values * scale * self.weights[f"{name}.weight"]
        return normed

    def _linear(self, values: torch.Tensor, name: str) -> torch.Tensor:
        product: torch.Tensor = self.weights[f"{name}.weight"] @ values
        return product


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("predictions") / "model")


@pytest.fixture(scope="session")
def head(folder: Path) -> Path:
    return write_tiny_eagle3(folder.parent / "head", folder)


@pytest.mark.parametrize(
    ("prediction", "has_drafter"),
    [("lookahead", False), ("previous", True), ("on-demand", False), ("resident", False)],
)
def test_tokens_are_those_of_a_plain_model_that_follows_the_rule(
    prediction: str, has_drafter: bool, folder: Path, head: Path, backend: EngineProcess
) -> None:
    engine: dict[str, Any] = {"model": str(folder), "skip_tokenizer_init": True, "max_model_len": 512}
    if has_drafter:
        engine["speculative_config"] = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 1}
    settings = SETTINGS | {"prediction": prediction}
    requests = random_requests([199, 240, 328], 40)
    reply = backend.run(engine | {"block_size": BLOCK}, requests, settings=settings)
    plain = PlainModel(folder, LookaheadConfig.from_mapping(settings))
    num_equal = 0
    for request, got in zip(requests, reply.tokens, strict=True):
        expected, margins = plain.generate(request["prompt"], len(got))
        pairs = enumerate(zip(got, expected, strict=True))
        where = next((place for place, (mine, wanted) in pairs if mine != wanted), len(got))
        print(f"{prediction}: equal up to {where} of {len(got)}; least margin {min(margins):.2e}")
        assert where == len(got) or margins[where] < MARGIN
        num_equal += where
    assert num_equal > 100
    assert reply.counts["sparse_rows"] >= 3 * 38
    assert (reply.counts["fetched"] == 0) == (prediction == "resident")
    assert reply.counts["source_draft"] == 0
    # Another rule gives other tokens, so that these say something.
    if prediction == "on-demand":
        other = PlainModel(folder, LookaheadConfig.from_mapping(SETTINGS | {"prediction": "previous"}))
        assert other.generate(requests[2]["prompt"], 40)[0] != reply.tokens[2]
