"""The process that lets peers reach the pool one-sidedly: it holds the pool and nothing else worth reading or breaking.

Over TCP, UCX lets whoever reaches its port read and write the whole process. So that is a process of its own, without
keys, identifiers or leases: `python -m oasiskv.services.staging.agent`, started by `data_plane`.
"""

import argparse
import json
import mmap
import os
import secrets
import sys

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import OasisError, UnsupportedError
from oasiskv.services.nixl import NixlAgent


def main() -> int:
    """Offer the memory, print how to reach it, and end when standard input does: that is, with the service."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.services.staging.agent", description=__doc__)
    parser.add_argument("--blocks-fd", type=int, required=True, help="the blocks, to read and write")
    parser.add_argument("--generations-fd", type=int, required=True, help="their generations, to read")
    parser.add_argument("--devices", default="", help="network device for UCX; all by default")
    args = parser.parse_args()
    # UCX writes its log to standard output: that becomes standard error, and the answer goes where it was.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            offer = _offer(args.blocks_fd, args.generations_fd, args.devices)
        except OasisError as error:
            print(json.dumps({"error": str(error)}), file=answer)
            return 1
        print(json.dumps(offer), file=answer)
    sys.stdin.buffer.read()
    # At once, without UCX's farewells: peers must notice, and no memory is worth a wait.
    os._exit(0)


def _offer(blocks_fd: int, generations_fd: int, devices: str) -> dict[str, object]:
    agent = NixlAgent(f"oasiskv-staging-{secrets.token_hex(8)}", devices)
    blocks = _map(blocks_fd, mmap.PROT_READ | mmap.PROT_WRITE)
    agent.register(blocks)
    generations = _map(generations_fd, mmap.PROT_READ)
    generations_address = generations.ctypes.data
    try:
        agent.register(generations)
    except UnsupportedError as error:  # a device may insist on memory that it could write
        print(f"generations cannot be read one-sidedly, peers ask for them: {error}", file=sys.stderr)
        generations_address = 0
    _KEPT.append(agent)
    return {
        "metadata": agent.metadata().hex(),
        "blocks_address": blocks.ctypes.data,
        "generations_address": generations_address,
    }


_KEPT: list[NixlAgent] = []


def _map(fd: int, protection: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=protection), np.uint8)


if __name__ == "__main__":
    sys.exit(main())
