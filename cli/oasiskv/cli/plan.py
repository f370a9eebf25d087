"""What a server will take, from a model's configuration alone: blocks per request, bytes by tier, requests at a time.

`serve` makes the plan before anything is loaded, refuses what cannot work, and turns the rest into vLLM's flags.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from oasiskv.core.config import LookaheadConfig
from oasiskv.core.errors import ConfigError, UnsupportedError
from oasiskv.core.host_memory import HostPoolConfig, size
from oasiskv.core.layout import SparseLayout
from oasiskv.kernels.rows import SummaryLayout

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens per request for which the plan is printed, as far as the model reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the KV cache of a model depends on."""

    num_layers: int
    """Attention layers, those of a draft model included."""
    num_kv_heads: int
    """Of the whole model, over all workers."""
    head_dim: int
    dtype: str
    """Of the weights and of the KV cache: a key of `DTYPE_BYTES`."""
    max_positions: int
    """Tokens that the model was made for."""

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str = "auto", num_draft_layers: int = 0) -> Self:
        """Read it from the content of a `config.json`.

        Args:
            config: The model's configuration; of one with several parts, its text part is read.
            dtype: What the user wants; `auto` takes the configuration's.
            num_draft_layers: Layers of the draft model, whose heads are the same.

        Raises:
            UnsupportedError: A value is missing, so this is no decoder that the backend knows.
            ConfigError: There is no such dtype.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise UnsupportedError(f"model: expected text_config to be a mapping in its config.json, got {text!r}")

        def number(name: str) -> int:
            value = text.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnsupportedError(f"model: expected {name} of at least 1 in its config.json, got {value!r}")
            return value

        num_heads, num_layers = number("num_attention_heads"), number("num_hidden_layers")
        max_positions = number("max_position_embeddings")
        head_dim = number("head_dim") if text.get("head_dim") else number("hidden_size") // num_heads
        if dtype == "auto":
            dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype: expected auto or one of {', '.join(DTYPE_BYTES)}, got {dtype}")
        return cls(
            num_layers=num_layers + num_draft_layers,
            num_kv_heads=number("num_key_value_heads") if text.get("num_key_value_heads") else num_heads,
            head_dim=head_dim,
            dtype=dtype,
            max_positions=max_positions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The KV memory of one worker, counted in blocks of all its layers."""

    shape: ModelShape
    block_size: int
    num_workers: int
    """Tensor-parallel workers, each with a share of the KV heads, an engine pool and a host pool."""
    max_model_len: int
    max_num_seqs: int
    is_fp8_cache: bool = False
    """Whether the engine's cache is fp8, whatever the model computes in."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in the engine's cache."""
        return 1 if self.is_fp8_cache else DTYPE_BYTES[self.shape.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one worker, in the engine."""
        return self._block_bytes(self.dtype_bytes)

    def host_block_bytes(self, config: LookaheadConfig) -> int:
        """Bytes of one block in one worker, in host memory."""
        return self._block_bytes(1) if config.host_dtype == "fp8" else self.block_bytes

    def _block_bytes(self, dtype_bytes: int) -> int:
        return HostPoolConfig(
            num_blocks=1,
            num_layers=self.shape.num_layers,
            # Workers beyond the number of KV heads hold copies of one.
            num_kv_heads=max(1, self.shape.num_kv_heads // self.num_workers),
            block_size=self.block_size,
            head_dim=self.shape.head_dim,
            dtype_bytes=dtype_bytes,
            is_fp8_cache=self.is_fp8_cache,
        ).block_bytes

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest request, the one of a draft token included."""
        return self.dense_blocks(self.max_model_len) + 1

    def dense_blocks(self, num_tokens: int) -> int:
        """Engine blocks of a dense request, and host blocks of any request."""
        return -(-num_tokens // self.block_size)

    def layout(self, config: LookaheadConfig) -> SparseLayout:
        """Return which blocks a sparse request holds.

        Raises:
            UnsupportedError: Summary rows of the model's head_dim cannot be fp8.
        """
        summaries = SummaryLayout.of(config, self.block_size, self.shape.head_dim, self.dtype_bytes)
        return SparseLayout(budget_blocks=config.budget_blocks, rows_per_page=summaries.rows_per_page)

    def held_blocks(self, num_tokens: int, config: LookaheadConfig) -> int:
        """Engine blocks of a request that decodes with `num_tokens` in place, sparse if it may be."""
        layout = self.layout(config)
        if num_tokens // self.block_size < layout.least_complete:
            return self.dense_blocks(num_tokens)
        return layout.held_blocks(num_tokens, self.block_size)

    def default_budget_blocks(self) -> int:
        """128 blocks, or an eighth of the longest request where that is less: a small model shall be sparse too."""
        return max(2, min(128, self.max_model_len // 8 // self.block_size))

    def default_host_bytes(self, config: LookaheadConfig, most: int) -> int:
        """Bytes of host memory in one worker: all requests at their longest, or all workers together `most`.

        It is the longest request's at least, so that a limit below that is what the refusal is about.
        """
        longest_bytes = self.longest_blocks * self.host_block_bytes(config)
        return max(longest_bytes, min(self.max_num_seqs * longest_bytes, most // self.num_workers))

    def default_engine_bytes(self, config: LookaheadConfig) -> int:
        """Bytes for one longest prompt that prefills, and all other requests decoding at their longest."""
        others = (self.max_num_seqs - 1) * self.held_blocks(self.max_model_len, config)
        # vLLM keeps one block for itself.
        return (self.longest_blocks + others + 1) * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A server that can work: every size is known but that of an engine pool which the GPU's free memory decides."""

    pools: Pools
    config: LookaheadConfig
    engine_bytes: int | None
    """KV cache of one worker in the engine; None where vLLM measures it while loading."""
    guessed_engine_bytes: int | None = None
    """What it will be about, where it is not known; None where nothing is known."""

    def __post_init__(self) -> None:
        """Check that the longest request has a place in both tiers.

        Raises:
            ConfigError: It has not; the message names the setting to change.
        """
        pools, needed = self.pools, self.pools.longest_blocks * self.pools.block_bytes
        host_needed = pools.longest_blocks * pools.host_block_bytes(self.config)
        if pools.max_model_len > pools.shape.max_positions:
            raise ConfigError(
                f"--max-model-len: expected at most {pools.shape.max_positions}, for which the model was made, "
                f"got {pools.max_model_len}"
            )
        if self.config.host_pool_bytes < host_needed:
            raise ConfigError(
                f"--host-memory: expected at least {size(host_needed * pools.num_workers)}, "
                f"what {pools.max_model_len} tokens take, got {size(self.config.host_pool_bytes * pools.num_workers)}; "
                "raise it or lower --max-model-len"
            )
        if self.engine_bytes is not None and self.engine_bytes < needed + pools.block_bytes:
            raise ConfigError(
                f"--kv-cache-memory-bytes: expected at least {size(needed + pools.block_bytes)}, what a prompt of "
                f"{pools.max_model_len} tokens takes while it prefills, got {size(self.engine_bytes)}; "
                "raise it or lower --max-model-len"
            )

    @property
    def num_host_blocks(self) -> int:
        """Host blocks of the engine."""
        return self.config.host_pool_bytes // self.pools.host_block_bytes(self.config)

    @property
    def num_engine_blocks(self) -> int | None:
        """Engine blocks that requests can have, or about as many."""
        num_bytes = self.guessed_engine_bytes if self.engine_bytes is None else self.engine_bytes
        return None if num_bytes is None else max(0, num_bytes // self.pools.block_bytes - 1)

    def concurrency(self, num_tokens: int) -> dict[str, int | None]:
        """Requests of this length that each limit lets decode at a time, by the limit's name."""
        pools, engine = self.pools, self.num_engine_blocks
        dense, held = pools.dense_blocks(num_tokens), pools.held_blocks(num_tokens, self.config)
        return {
            "dense": None if engine is None else engine // dense,
            "engine": None if engine is None else engine // held,
            "host": self.num_host_blocks // dense,
            "seqs": pools.max_num_seqs,
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as a person reads it."""
        pools, config, shape = self.pools, self.config, self.pools.shape
        engine = "what vLLM finds free on the GPU"
        if self.engine_bytes is not None:
            engine = size(self.engine_bytes)
        elif self.guessed_engine_bytes is not None:
            engine = f"about {size(self.guessed_engine_bytes)}"
        cache = ", KV cache in fp8" if pools.is_fp8_cache else ""
        blocks = "" if self.num_engine_blocks is None else f" ({self.num_engine_blocks:,} blocks)"
        yield (
            f"model    {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, {shape.dtype}"
            f"{cache}; up to {pools.max_model_len:,} tokens, {pools.max_num_seqs} requests at a time"
        )
        rows = "; summaries as fp8" if config.summary_dtype == "fp8" else ""
        yield (
            f"budget   {config.budget_blocks} blocks of {pools.block_size} tokens per layer and KV head "
            f"({config.budget_blocks * pools.block_size:,} tokens), at most {config.first_cap} fetched a step{rows}"
        )
        units = " as fp8" if config.host_dtype == "fp8" else ""
        each = f"a worker, {pools.num_workers} workers" if pools.num_workers > 1 else ""
        yield (
            f"memory   engine {engine}{blocks}, host {size(config.host_pool_bytes)} "
            f"({self.num_host_blocks:,} blocks{units}) {each}".rstrip()
        )
        yield ""
        yield "         engine blocks a request   engine memory a request    host memory   requests at a time"
        yield "context      dense      sparse      dense      sparse         a request   dense  sparse   host holds"
        for num_tokens in self._contexts():
            yield self._row(num_tokens)

    def _contexts(self) -> list[int]:
        longest = self.pools.max_model_len
        return [*(context for context in CONTEXTS if context < longest), longest]

    def _row(self, num_tokens: int) -> str:
        pools, workers = self.pools, self.pools.num_workers
        dense, held = pools.dense_blocks(num_tokens), pools.held_blocks(num_tokens, self.config)
        dense_bytes, held_bytes = (count * pools.block_bytes * workers for count in (dense, held))
        host_bytes = dense * pools.host_block_bytes(self.config) * workers
        most = self.concurrency(num_tokens)
        limits = [most[name] for name in ("engine", "host", "seqs") if most[name] is not None]
        sparse = min(limit for limit in limits if limit is not None)
        return (
            f"{num_tokens:>7,}{dense:>11,}{held:>12,}{size(dense_bytes):>13}{size(held_bytes):>12}"
            f"{size(host_bytes):>18}{_count(most['dense']):>7}"
            f"{_count(None if most['engine'] is None else sparse):>8}{_count(most['host']):>13}"
        )


def budget_blocks_of(num_tokens: int, block_size: int) -> int:
    """Turn a budget in tokens into blocks, rounded up.

    Raises:
        ConfigError: It is not positive.
    """
    if num_tokens <= 0:
        raise ConfigError(f"--budget-tokens: expected at least 1, got {num_tokens}")
    return math.ceil(num_tokens / block_size)


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
