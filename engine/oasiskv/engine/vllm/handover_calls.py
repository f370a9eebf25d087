"""What a service asks of its engine's workers, through vLLM's `collective_rpc`: handovers of requests."""

import importlib
from typing import Any

from oasiskv.core.errors import OasisError
from oasiskv.engine.runtime import Runtime


class HandoverCalls:
    """Mixed into the worker class; every call is one of a worker whose KV cache exists."""

    backend: Any
    """The worker's `WorkerBackend`."""

    @property
    def _runtime(self) -> Runtime:
        runtime: Runtime | None = self.backend.runtime
        assert runtime is not None
        return runtime

    def attach_staging(self, maker: str, arguments: dict[str, Any], way: str = "") -> None:
        """Take a way to staging.

        Args:
            maker: `module:function`, called with the arguments and the `CacheShape` of this process.
            arguments: Of the maker.
            way: Name that the leases of this way begin with; it takes the place of one of that name.

        Raises:
            OasisError: as the maker does, or the backend cannot hand requests over; what was attached before stays.
        """
        module, _, function = maker.partition(":")
        self._runtime.attach(getattr(importlib.import_module(module), function)(arguments, self._runtime.shape), way)

    def take_handover(self, lease: str) -> tuple[str, str]:
        """Say what became of the KV of a request that ended here.

        Returns:
            `"staged"` and this rank's receipt in hex; `"under way"`; or the name of an error's class, which is then
            final, and its message.
        """
        try:
            receipt = self._runtime.take_handover(lease)
            return ("under way", "") if receipt is None else ("staged", receipt.hex())
        except OasisError as error:
            return type(error).__name__, str(error)

    def probe_staging(self, lease: str, writes: bool) -> tuple[str, ...]:
        """Write a block of random bytes under a lease, or read one.

        Returns:
            `"done"`, the digest of this rank's bytes and the receipt of a write, both in hex; `"under way"`; or the
            name of an error's class, which is then final, and its message.
        """
        try:
            found = self._runtime.probe_staging(lease, writes=writes)
        except OasisError as error:
            return type(error).__name__, str(error)
        return ("under way", "") if found is None else ("done", found[0].hex(), found[1].hex())

    def handover_bytes(self) -> dict[str, int]:
        """Return this rank's bytes of handovers since the start."""
        counts = self._runtime.handover_counts()
        return {name: count for name, count in counts.items() if name.endswith("_bytes")}

    def kv_shape(self) -> dict[str, Any]:
        """Say what this rank's KV is, in the words of a `Fingerprint`."""
        shape = self._runtime.shape
        return {
            "dtype": str(shape.dtype).removeprefix("torch."),
            "block_size": shape.block_size,
            "num_layers": shape.num_layers,
            "num_target_layers": shape.num_target_layers,
            "num_kv_heads": shape.num_kv_heads * shape.tp_size,
            "head_dim": shape.head_dim,
        }
