"""Names of a prompt's blocks in staging, by what they contain: equal for equal tokens, whoever computes them."""

import hashlib
from collections.abc import Sequence

import numpy as np


def block_keys(ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the content keys of the complete blocks that a token follows.

    Each names all tokens up to the end of its block and the one behind it, on which the block's last row in an EAGLE-3
    drafter's layer depends. So they are the blocks of a prompt that need not be computed where they are held: its last
    token always is.
    """
    tokens = np.asarray(ids, "<u4")
    keys, key = [], b""
    for end in range(block_size, len(ids), block_size):
        key = hashlib.blake2b(key + tokens[end - block_size : end + 1].tobytes(), digest_size=24).digest()
        keys.append(key)
    return keys
