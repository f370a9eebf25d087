"""Turn a GGUF file of the llama architecture into a Hugging Face model folder; `model` fetches such files.

Weights are widened to float32 exactly as they are stored, so the folder computes what the GGUF computes.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray

from oasiskv.core.errors import UnsupportedError

Weight = NDArray[np.float32]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF into a folder, under the names that Hugging Face gives them.

    Raises:
        UnsupportedError: the architecture, the tokenizer or a tensor is not one that this module knows.
    """
    reader = GGUFReader(gguf)
    values = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if values.get(key) != expected:
            raise UnsupportedError(f"{key}: expected {expected}, got {values.get(key)}")
    config = _model_config(values)
    tensors = dict(_tensors(reader, config))
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    _write_safetensors(folder / "model.safetensors", tensors)
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "tokenizer.json", _tokenizer(values))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(values))
    _write_json(folder / "generation_config.json", special_ids)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: dict[str, Weight]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in tensors.items():
        start, end = end, end + weight.nbytes
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data must begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for weight in tensors.values():
            file.write(weight.data)


def _model_config(values: dict[str, Any]) -> dict[str, Any]:
    num_heads = values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.embedding_length"] // num_heads,
        "max_position_embeddings": values["llama.context_length"],
        "rope_theta": values["llama.rope.freq_base"],
        # GGUF stores this as float32, whose shortest decimal is the number that the authors wrote.
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Weight]]:
    for tensor in reader.tensors:
        # [out_features, in_features] float32, as torch stores a linear layer
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.removesuffix(".weight").split(".")
        if len(parts) == 1 and parts[0] in _TOP_NAMES:
            yield f"{_TOP_NAMES[parts[0]]}.weight", weight
        elif len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(parts[2])
            if num_heads is not None:
                weight = _split_rotary_pairs(weight, num_heads)
            yield f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", weight
        else:
            raise UnsupportedError(f"tensor: expected one of a llama model without biases, got {tensor.name}")


def _split_rotary_pairs(weight: Weight, num_heads: int) -> Weight:
    """Reorder the rows of a q or k projection from GGUF's rotary order to Hugging Face's.

    A rotary pair is two neighbouring rows of a head in GGUF, and two rows half a head apart in Hugging Face.
    """
    # [num_heads, pairs, 2, in_features] -> [num_heads, 2, pairs, in_features]
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    special = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == TokenType.CONTROL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        # "smollm" in a GGUF means: each digit on its own, then the byte-level words of GPT-2.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    tokens = values["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": values["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[values["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
        "chat_template": values["tokenizer.chat_template"],
    }
