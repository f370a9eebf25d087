"""Device memory in which the programs of one predict meet: allocated once, so that a launch allocates nothing."""

from dataclasses import dataclass, field

import torch

from oasiskv.core.errors import UnsupportedError

_MAX_STREAMS = 128
_MAX_PAIRS = 1 << 14
"""Most (row, KV head) pairs of one call."""


@dataclass(slots=True)
class _Device:
    arrivals: torch.Tensor
    """`int32[_MAX_STREAMS, _MAX_PAIRS]`, zero between launches: how many programs of a pair are done."""
    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Per stream, scores on their way to selection; outgrown ones stay, since captured graphs name them."""


_devices: dict[torch.device, _Device] = {}


def scratch(device: torch.device, num_pairs: int, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(arrivals, keys)`: `int32[at least num_pairs]` of zeros and `int32[at least num_words]` of anything.

    Two calls on one stream get the same memory; on different streams they never share, so predicts may overlap.

    Args:
        device: Where.
        num_pairs: (row, KV head) pairs of the call.
        num_words: Words of `keys` that the call needs.

    Raises:
        UnsupportedError: A device's first call is under graph capture, or the call is too large. Nothing changed.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    state = _devices.get(device)
    if state is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("predict: expected a first call outside graph capture, got one under capture")
        state = _Device(torch.zeros(_MAX_STREAMS, _MAX_PAIRS, dtype=torch.int32, device=device))
        _devices[device] = state
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams count on the zeros; once per process
    held = state.keys.get(stream)
    if num_pairs > _MAX_PAIRS or (held is None and len(state.keys) == _MAX_STREAMS):
        raise UnsupportedError(
            f"predict: expected at most {_MAX_PAIRS} pairs of row and head and {_MAX_STREAMS} streams, "
            f"got {num_pairs} pairs and stream {len(state.keys)}"
        )
    if held is None:
        held = state.keys[stream] = []
    if not held or held[-1].numel() < num_words:
        held.append(torch.empty(num_words, dtype=torch.int32, device=device))
    return state.arrivals[list(state.keys).index(stream)], held[-1]
