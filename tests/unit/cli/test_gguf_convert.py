"""The converted folder against transformers' own reading of the same GGUF."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oasiskv.cli.gguf_convert import convert_gguf
from oasiskv.core.errors import UnsupportedError

TEXTS = ["the thread  of the Ruth, and 1 Samuel", "48213", " 7", "x\n\ty", "čaj ½", "<|im_start|>the<|im_end|>\n", ""]


@pytest.fixture(scope="module")
def folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny_gguf, folder)
    return folder


def test_every_weight_and_every_number_of_the_configuration_equals_the_reference(tiny_gguf: Path, folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected = reference.state_dict()
    got = converted.state_dict()
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=0, msg=name)
    names = [
        "rope_parameters",
        "max_position_embeddings",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "eos_token_id",
    ]
    assert {name: getattr(converted.config, name) for name in names} == {
        name: getattr(reference.config, name) for name in names
    }
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, reference(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_the_text_back(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_merges_words_and_keeps_digits_apart(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the the 12") == ["the", "Ġthe", "Ġ", "1", "2"]
    # Without the rule for digits the two spaces would part, for the second would join the word of the digit.
    assert tokenizer.tokenize("1  2") == ["1", "ĠĠ", "2"]


def test_special_tokens_and_the_chat_template_come_along(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.model_max_length == 512
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(rendered) == ["<|im_start|>", "the", "<|im_end|>"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "qwen3"}, "general.architecture: expected llama, got qwen3"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre: expected smollm, got llama-bpe"),
        ({"extra": "blk.0.attn_q.bias"}, "tensor: .*got blk.0.attn_q.bias"),
    ],
)
def test_an_unknown_gguf_is_refused_and_nothing_is_written(
    write_gguf: Callable[..., None], tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    gguf = tmp_path / "other.gguf"
    write_gguf(gguf, **fields)
    with pytest.raises(UnsupportedError, match=f"^{message}$"):
        convert_gguf(gguf, tmp_path)
    assert os.listdir(tmp_path) == ["other.gguf"]
