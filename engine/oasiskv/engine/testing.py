"""Tiny random models on disk and processes that run real engines, for tests that need no network.

Models have no tokenizer: prompts are token ids. The weights are drawn so that attention is peaked and outweighs the
token itself: a wrong or missing block changes the output, and greedy output keeps varying.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors.torch import save_file

from oasiskv.core.errors import BlockNotFoundError, PeerUnavailableError
from oasiskv.engine.state import CacheShape

Architecture = Literal["llama", "qwen3", "qwen3_moe"]

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_QUERY_KEY_SCALE = 1.6
"""Standard deviation of queries and keys; that of the attention scores is its square."""
_ATTENTION_SCALE = 2.0
"""What attention adds to the residual stream, in units of the embedding."""
_LOGIT_SCALE = 3.0
"""Standard deviation of the logits."""
_MOE_CONFIG: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


class _Weights:
    """Draws the tensors of one checkpoint, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, name: str, out_features: int, in_features: int, scale: float = 1.0) -> None:
        """Add a layer whose outputs have the standard deviation `scale` where its inputs have 1."""
        weight = torch.randn(out_features, in_features, generator=self._generator)
        self.tensors[f"{name}.weight"] = weight * (scale / in_features**0.5)

    def embedding(self, name: str, num_rows: int, width: int) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(num_rows, width, generator=self._generator)

    def norm(self, name: str, width: int, scale: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = torch.full((width,), scale)

    def attention(self, name: str, config: dict[str, Any], in_features: int) -> None:
        head_dim, has_norms = config["head_dim"], config["model_type"] != "llama"
        query_width, key_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        # With norms on queries and keys, these decide the scale.
        scale = 1.0 if has_norms else _QUERY_KEY_SCALE
        self.linear(f"{name}.q_proj", query_width, in_features, scale)
        self.linear(f"{name}.k_proj", key_width, in_features, scale)
        self.linear(f"{name}.v_proj", key_width, in_features)
        self.linear(f"{name}.o_proj", config["hidden_size"], query_width, _ATTENTION_SCALE)
        if has_norms:
            self.norm(f"{name}.q_norm", head_dim, _QUERY_KEY_SCALE)
            self.norm(f"{name}.k_norm", head_dim, _QUERY_KEY_SCALE)

    def mlp(self, name: str, hidden_size: int, intermediate_size: int) -> None:
        self.linear(f"{name}.gate_proj", intermediate_size, hidden_size)
        self.linear(f"{name}.up_proj", intermediate_size, hidden_size)
        self.linear(f"{name}.down_proj", hidden_size, intermediate_size)

    def save(self, path: Path, config: dict[str, Any]) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return path


def write_tiny_model(
    path: Path,
    *,
    architecture: Architecture = "llama",
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    hidden_size: int = 64,
    vocab_size: int = 256,
    max_positions: int = 2048,
    seed: int = 0,
) -> Path:
    """Write a random float32 model without a tokenizer and without an end token into a folder, and return the folder.

    The attention of stock vLLM on CPU takes `head_dim` 32, 64, 80, 96, 112, 128 and some above.
    """
    config = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture == "qwen3_moe":
        config |= _MOE_CONFIG
    weights = _Weights(seed)
    weights.embedding("model.embed_tokens", vocab_size, hidden_size)
    for layer in range(num_layers):
        _add_layer(weights, f"model.layers.{layer}", config)
    weights.norm("model.norm", hidden_size)
    weights.linear("lm_head", vocab_size, hidden_size, _LOGIT_SCALE)
    return weights.save(path, config)


def _add_layer(weights: _Weights, name: str, config: dict[str, Any]) -> None:
    hidden_size = config["hidden_size"]
    weights.norm(f"{name}.input_layernorm", hidden_size)
    weights.attention(f"{name}.self_attn", config, hidden_size)
    weights.norm(f"{name}.post_attention_layernorm", hidden_size)
    if config["model_type"] != "qwen3_moe":
        weights.mlp(f"{name}.mlp", hidden_size, config["intermediate_size"])
        return
    weights.linear(f"{name}.mlp.gate", config["num_experts"], hidden_size)
    for expert in range(config["num_experts"]):
        weights.mlp(f"{name}.mlp.experts.{expert}", hidden_size, config["moe_intermediate_size"])


def write_tiny_draft_model(path: Path, target: Path, *, seed: int = 1) -> Path:
    """Write a random one-layer llama of a tiny model's sizes into a folder, and return the folder: its draft model."""
    config = _read_config(target)
    return write_tiny_model(
        path,
        num_layers=1,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        seed=seed,
    )


def write_word_tokenizer(folder: Path, num_words: int) -> None:
    """Write a tokenizer beside a model whose words are w0, w1 and so on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def write_tiny_eagle3(path: Path, target: Path, *, seed: int = 1) -> Path:
    """Write a random EAGLE-3 head for a tiny model into a folder, and return the folder.

    It reads the target's hidden states before its first, after its middle and after its last layer: unlike the engine's
    default choice these differ for any target of two layers or more. It has no embedding and so uses the target's.
    """
    target_config = _read_config(target)
    num_layers, hidden_size = target_config["num_hidden_layers"], target_config["hidden_size"]
    aux_layers = sorted({0, num_layers // 2, num_layers})
    # The head is a llama, whatever its target is.
    config = {name: value for name, value in target_config.items() if name not in _MOE_CONFIG} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target_config["vocab_size"],
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": aux_layers,
        "num_aux_hidden_states": len(aux_layers),
    }
    weights = _Weights(seed)
    weights.linear("fc", hidden_size, len(aux_layers) * hidden_size)
    weights.norm("midlayer.input_layernorm", hidden_size)
    weights.norm("midlayer.hidden_norm", hidden_size)
    # The layer attends with the embedding and the hidden state side by side.
    weights.attention("midlayer.self_attn", config, 2 * hidden_size)
    weights.norm("midlayer.post_attention_layernorm", hidden_size)
    weights.mlp("midlayer.mlp", hidden_size, config["intermediate_size"])
    weights.norm("norm", hidden_size)
    weights.linear("lm_head", config["vocab_size"], hidden_size, _LOGIT_SCALE)
    return weights.save(path, config)


def write_tiny_lora(path: Path, target: Path, *, rank: int = 8, seed: int = 1) -> Path:
    """Write a random adapter of a tiny model's queries and values into a folder, and return the folder."""
    config = _read_config(target)
    hidden_size, head_dim = config["hidden_size"], config["head_dim"]
    weights = _Weights(seed)
    for layer in range(config["num_hidden_layers"]):
        for module, num_heads in (("q", config["num_attention_heads"]), ("v", config["num_key_value_heads"])):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}_proj"
            weights.linear(f"{name}.lora_A", rank, hidden_size)
            weights.linear(f"{name}.lora_B", num_heads * head_dim, rank)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights.tensors, path / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter) + "\n")
    return path


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an engine process answered to a job; `engine.vllm.testing` says what each part holds."""

    outputs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    num_steps: int
    pool_before: dict[str, int]
    pool_after: dict[str, int]
    counts: dict[str, float]
    facts: dict[str, Any]
    handovers: list[list[Any]]

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of every completion, in the order of the requests."""
        return [completion["tokens"] for output in self.outputs for completion in output["completions"]]


class StagedFolder:
    """Staged blocks as files, one for each part: a staging service without a service.

    A lease that has a file `NAME.lost` can be neither written nor read, one with `NAME.lost-after-8` not after eight
    calls. What a request of one with `NAME.slow` begins with is read bit by bit, as often as `tick` is called.
    """

    _slow: ClassVar[deque[Callable[[], None]]] = deque()

    def __init__(self, arguments: Mapping[str, Any], shape: CacheShape) -> None:
        """Use a folder, `arguments["folder"]`."""
        self._folder = Path(arguments["folder"])
        self._num_calls: Counter[str] = Counter()
        self._num_fetches: Counter[str] = Counter()
        # The map, what is read whole, and the first set of each layer.
        self._num_first = 2 + shape.num_layers

    def put(self, lease: str, block_indices: Sequence[int], first_layer: int, data: torch.Tensor) -> "Future[None]":
        """Write the files."""
        return self._do(lease, block_indices, first_layer, data, lambda part, path: torch.save(part.clone(), path))

    def fetch(self, lease: str, block_indices: Sequence[int], first_layer: int, out: torch.Tensor) -> "Future[None]":
        """Read the files."""

        def read() -> "Future[None]":
            return self._do(lease, block_indices, first_layer, out, lambda part, path: part.copy_(torch.load(path)))

        self._num_fetches[lease] += 1
        if self._num_fetches[lease] > self._num_first or not (self._folder / f"{lease}.slow").exists():
            return read()
        done: Future[None] = Future()

        def end() -> None:
            failure = read().exception()
            done.set_result(None) if failure is None else done.set_exception(failure)

        self._slow.append(end)
        return done

    @classmethod
    def tick(cls) -> None:
        """End the oldest slow read of all folders of this process."""
        if cls._slow:
            cls._slow.popleft()()

    def receipt(self, lease: str) -> bytes:
        """Return nothing: a file is final when it is there."""
        return b""

    def forget(self, lease: str) -> None:
        """Leave the files."""

    def close(self) -> None:
        """Leave the files."""

    def _do(
        self,
        lease: str,
        block_indices: Sequence[int],
        first_layer: int,
        data: torch.Tensor,
        move: Callable[[torch.Tensor, Path], object],
    ) -> "Future[None]":
        done: Future[None] = Future()
        self._num_calls[lease] += 1
        is_lost_now = self._num_calls[lease] > 8 and (self._folder / f"{lease}.lost-after-8").exists()
        if is_lost_now or (self._folder / f"{lease}.lost").exists():
            done.set_exception(PeerUnavailableError("staging: expected an answer, got none; nothing was moved"))
            return done
        try:
            for place, index in enumerate(block_indices):
                for layer in range(data.shape[1]):
                    move(data[place, layer], self._folder / f"{lease}-{index}-{first_layer + layer}.pt")
            done.set_result(None)
        except FileNotFoundError as error:
            done.set_exception(BlockNotFoundError(f"block_index: expected one that was written, got {error.filename}"))
        return done


def random_requests(
    lengths: Sequence[int], num_tokens: int, *, vocab_size: int = 256, prompt_seed: int = 0, **params: Any
) -> list[dict[str, Any]]:
    """Return requests with random prompts of these lengths, which each generate so many tokens.

    Args:
        lengths: Prompt tokens of each request.
        num_tokens: Tokens to generate.
        vocab_size: Of the model.
        prompt_seed: Of the prompts.
        **params: Further sampling parameters.
    """
    draw = random.Random(prompt_seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return [{"prompt": prompt, "params": {"max_tokens": num_tokens} | params} for prompt in prompts]


def random_traffic(num_requests: int, seed: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Return requests that arrive at random steps, a quarter aborted, and steps before which all are preempted."""
    draw = random.Random(seed)
    requests: list[dict[str, Any]] = []
    step = 0
    for index in range(num_requests):
        step += draw.choice([0, 0, 1, 2, 5])
        request = random_requests([draw.randrange(1, 500)], draw.randrange(1, 60), prompt_seed=index)[0]
        request["at"] = step
        if draw.random() < 0.25:
            request["abort_at"] = step + draw.randrange(1, 40)
        requests.append(request)
    return requests, sorted(draw.sample(range(2, step + 20), num_requests // 10))


class EngineStartError(Exception):
    """An engine did not start; the message lists the error and its causes, outermost first."""


class EngineProcess:
    """A process that runs one vLLM engine after the other, see `engine.vllm.testing`; started with the first job.

    Args:
        log: File for everything that vLLM prints.
        use_v2: Run model runner V2, by Triton's interpreter.
    """

    def __init__(self, log: Path, *, use_v2: bool = False) -> None:
        """Remember how to start."""
        self._log = log
        self._arguments = ["--v2"] if use_v2 else []
        self._process: subprocess.Popen[str] | None = None
        self._replies: dict[str, dict[str, Any]] = {}

    def run(self, engine: dict[str, Any], requests: list[dict[str, Any]], **job: Any) -> Reply:
        """Run requests to their end. The same job again gets the same reply without running.

        Args:
            engine: Arguments of vLLM's `LLM`.
            requests: Each with `prompt`, token ids, or `chat`, messages; and optionally `params`, sampling parameters
                over greedy decoding; `at` and `abort_at`, steps; `lora`, a folder; `tools`.
            **job: `settings` of the backend, which runs stock without; `sample=True` to look at every step;
                `preempt_at`, steps before which all running requests are preempted; `reject_drafts=True` to
                reject drafts in a stock engine; `kv_scales`, of K and V in an fp8 cache; `staged`, a folder in
                the place of a staging service; `take`, leases whose handover is taken at the end.

        Raises:
            EngineStartError: the engine refused to start.
        """
        reply = self.ask(engine=engine, requests=requests, **job)
        if "start_error" in reply:
            raise EngineStartError("\n".join(reply["start_error"]))
        return Reply(**reply)

    def ask(self, **job: Any) -> dict[str, Any]:
        """Send any job and return its answer."""
        line = json.dumps(job, sort_keys=True)
        if line not in self._replies:
            self._replies[line] = self._ask(line)
        return self._replies[line]

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if answer := process.stdout.readline():
                reply: dict[str, Any] = json.loads(answer)
                return reply
        except BaseException:
            # An answer that comes later would be taken for that of the next job.
            self.close()
            raise
        code = process.wait()
        self.close()
        tail = "\n".join(self._log.read_text().splitlines()[-40:])
        raise RuntimeError(f"the engine process ended with exit code {code}:\n{tail}")

    def _start(self) -> "subprocess.Popen[str]":
        with self._log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "oasiskv.engine.vllm.testing", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
            self._process = None
