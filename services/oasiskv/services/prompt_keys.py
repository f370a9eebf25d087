"""Names of a prompt's blocks in staging, by what they contain: equal for equal tokens, whoever computes them."""

import hashlib
from collections.abc import Sequence

import numpy as np


def block_keys(ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the content keys of a prompt's complete blocks: each names all tokens up to the end of its block."""
    tokens = np.asarray(ids, "<u4")
    keys, key = [], b""
    for first in range(0, len(ids) // block_size * block_size, block_size):
        key = hashlib.blake2b(key + tokens[first : first + block_size].tobytes(), digest_size=24).digest()
        keys.append(key)
    return keys


def num_reusable(num_tokens: int, block_size: int) -> int:
    """Return how many of a prompt's blocks need not be computed where they are held; its last token always is."""
    return (num_tokens - 1) // block_size
