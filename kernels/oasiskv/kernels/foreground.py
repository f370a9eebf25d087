"""What `bench` runs the operations beside: the matrix products and the attention of a decode step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of the model whose step is imitated; the defaults are Qwen3-8B's."""

    num_layers: int = 36
    num_kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    budget: int = 128
    max_cap: int = 6
    hidden: int = 4096
    intermediate: int = 12288
    dtype: torch.dtype = torch.bfloat16
    """Of 16 bits."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of one (layer, block, KV head)."""
        return self.block_size * 2 * self.head_dim * 2


class Foreground:
    """The matrix products and the attention of a decode step with two tokens a row, in 16-bit numbers.

    Args:
        model: Sizes.
        num_rows: Requests in the batch.
        device: Where.
    """

    def __init__(self, model: Model, num_rows: int, device: torch.device) -> None:
        self.model, self.num_rows = model, num_rows
        width = model.num_kv_heads * model.head_dim
        self._sizes = (model.group * width, width, width)

        def weights(rows: int, columns: int) -> list[torch.Tensor]:
            shape = (model.num_layers, rows, columns)
            return list((torch.randn(shape, device=device, dtype=model.dtype) * 0.01).unbind())

        self._qkv = weights(sum(self._sizes), model.hidden)
        self._out = weights(model.hidden, model.group * width)
        self._up = weights(2 * model.intermediate, model.hidden)
        self._down = weights(model.hidden, model.intermediate)
        tokens = (model.budget + 1) * model.block_size
        shape = (num_rows, model.num_kv_heads, tokens, model.head_dim)
        self._keys = [torch.randn(shape, device=device, dtype=model.dtype) for _ in range(model.num_layers)]
        self._values = [torch.randn(shape, device=device, dtype=model.dtype) for _ in range(model.num_layers)]
        self.hidden = torch.randn(2 * num_rows, model.hidden, device=device, dtype=model.dtype)

    def layer(self, layer: int) -> None:
        """Run one layer in place."""
        model, x = self.model, self.hidden
        q = (x @ self._qkv[layer].T)[:, : self._sizes[0]]
        # The query heads of a group as rows of one product, as attention kernels for decoding do.
        q = q.view(self.num_rows, 2, model.num_kv_heads, model.group, model.head_dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(self.num_rows, model.num_kv_heads, 2 * model.group, model.head_dim)
        seen = torch.nn.functional.scaled_dot_product_attention(q, self._keys[layer], self._values[layer])
        x = x + seen.reshape(2 * self.num_rows, -1) @ self._out[layer].T
        gate, up = (x @ self._up[layer].T).chunk(2, -1)
        self.hidden.copy_(x + (torch.nn.functional.silu(gate) * up) @ self._down[layer].T).clamp_(-8, 8)
