"""The background on CUDA streams, joined at the end of every forward pass, so that one graph can hold both."""

import torch

from oasiskv.engine.pipeline import Stage


class StreamPipeline:
    """Predict and select on one stream, transfer on another, each layer forked from the foreground after its attention.

    The foreground joins both at the end of the pass: inside a captured graph nothing may stay forked. So the next
    step's layers find their transfers done, and no wait stands in a layer.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the streams; transfers go first where both have work."""
        self._scores = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._is_forked = False
        self._is_captured = False

    def submit(self, layer: int, stages: list[Stage]) -> None:
        """Fork a layer's work from the current stream."""
        self._scores.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._scores):
            for stage in stages[:-1]:
                stage()
        self._copies.wait_stream(self._scores)
        with torch.cuda.stream(self._copies):
            stages[-1]()
        self._is_forked = True
        self._is_captured = torch.cuda.is_current_stream_capturing()

    def wait(self, layer: int) -> bool:
        """Return False: the pass before was joined."""
        return False

    def end_pass(self) -> None:
        """Order the current stream after everything forked from it.

        A capture does nothing about work forked outside it, as when a piece of a pass is captured between layers.
        """
        if self._is_forked and self._is_captured == torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream()
            current.wait_stream(self._scores)
            current.wait_stream(self._copies)
            self._is_forked = False

    def fence(self) -> None:
        """Order the current stream after everything forked from it."""
        self.end_pass()

    def close(self) -> None:
        """Wait for the streams."""
        self._scores.synchronize()
        self._copies.synchronize()
