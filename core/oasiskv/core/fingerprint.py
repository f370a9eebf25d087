"""What the bytes of a staged host block mean; peers of one pool must agree on it, field by field."""

from dataclasses import dataclass, fields
from typing import ClassVar

from oasiskv.core.errors import ConfigError, UnsupportedError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LAYOUT = "RLHTKV"
KV_REVISION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Model, shape and order of bytes of a staged block: `[tp_size, num_layers, heads of a rank, block_size, K|V]`.

    One layer of one rank is a part; its bytes are contiguous. A part is what is checked and what crosses the network.
    """

    MAX_PART_BYTES: ClassVar[int] = 64 * 2**20

    model_hash: str
    """Hash of the weights and of everything else that shapes K and V; compared as it is."""

    dtype: str
    """Type of K and V: bfloat16, float16 or float32."""

    block_size: int
    """Tokens per block."""

    num_layers: int
    """Layers with a KV cache."""

    num_kv_heads: int
    """KV heads of the model, over all ranks."""

    head_dim: int
    """Width of K, and of V, per token and KV head."""

    tp_size: int = 1
    """Tensor-parallel ranks of the engine with most; each has `num_kv_heads / tp_size` heads. An engine of fewer ranks
    holds those of several in each of its own."""

    layout: str = LAYOUT
    """Order of the bytes: rank, layer, KV head, token, then K and V of the token side by side."""

    kv_revision: int = KV_REVISION
    """Revision of what OasisKV stores, raised when the same fields come to mean other bytes."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: A field is out of its range, or a part would be larger than a message may be.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise ConfigError(f"{field.name}: expected a positive integer, got {value!r}")
        if not self.model_hash:
            raise ConfigError("model_hash: expected a text that is not empty, got ''")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.num_kv_heads % self.tp_size:
            raise ConfigError(
                f"num_kv_heads: expected a multiple of tp_size, which is {self.tp_size}, got {self.num_kv_heads}"
            )
        if self.part_bytes > self.MAX_PART_BYTES:
            raise ConfigError(
                f"block_size: expected parts of at most {self.MAX_PART_BYTES} bytes, got {self.part_bytes}"
            )

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number of K or V."""
        return DTYPE_BYTES[self.dtype]

    @property
    def part_bytes(self) -> int:
        """Bytes of one layer of one rank of a block."""
        return self.num_kv_heads // self.tp_size * self.block_size * 2 * self.head_dim * self.dtype_bytes

    @property
    def num_parts(self) -> int:
        """Parts of a block; that of a rank and layer has the index `rank * num_layers + layer`."""
        return self.tp_size * self.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_parts * self.part_bytes

    def require(self, other: "Fingerprint") -> None:
        """Refuse a fingerprint that differs from this one.

        Raises:
            UnsupportedError: A field differs; the message begins with its name and lists all that differ.
        """
        differences = [
            f"{field.name}: expected {getattr(self, field.name)!r}, got {getattr(other, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
        if differences:
            raise UnsupportedError("; ".join(differences))
