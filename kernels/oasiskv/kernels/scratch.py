"""Device memory in which a launch keeps what its programs need on the way: allocated once and kept, not per launch."""

from dataclasses import dataclass, field

import torch

from oasiskv.core.errors import UnsupportedError

_MAX_STREAMS = 128
_MAX_COUNTERS = 1 << 14


@dataclass(slots=True)
class _Device:
    counters: torch.Tensor
    """`int32[_MAX_STREAMS, _MAX_COUNTERS]`, zero between launches."""
    words: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Per stream; outgrown ones stay, since captured graphs name them."""


_devices: dict[torch.device, _Device] = {}


def scratch(device: torch.device, num_words: int, num_counters: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(words, counters)`: `int32[num_words or more]` of anything and `int32[num_counters or more]` of zeros.

    Launches on one stream share the memory, one after the other, and leave the counters at zero. Launches on different
    streams never share, so they may overlap.

    Args:
        device: Where.
        num_words: Words that the launch needs.
        num_counters: Counters that the launch needs.

    Raises:
        UnsupportedError: A device's first call is under graph capture, or too much is asked for. Nothing changed.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    state = _devices.get(device)
    if state is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("kernels: expected a first launch outside graph capture, got one under capture")
        state = _Device(torch.zeros(_MAX_STREAMS, _MAX_COUNTERS, dtype=torch.int32, device=device))
        _devices[device] = state
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams count on the zeros; once per process
    held = state.words.get(stream)
    if num_counters > _MAX_COUNTERS or (held is None and len(state.words) == _MAX_STREAMS):
        raise UnsupportedError(
            f"kernels: expected at most {_MAX_COUNTERS} pairs of row and head and {_MAX_STREAMS} streams, "
            f"got {num_counters} pairs and {len(state.words)} streams before this one"
        )
    if held is None:
        held = state.words[stream] = []
    if not held or held[-1].numel() < num_words:
        held.append(torch.empty(num_words, dtype=torch.int32, device=device))
    return held[-1], state.counters[list(state.words).index(stream)]
