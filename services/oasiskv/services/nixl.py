"""One-sided transfers through NIXL: the few calls that the data plane needs, with our errors; optional to install."""

import contextlib
import functools
import importlib
import ipaddress
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oasiskv.core.errors import InvalidRequestError, PeerUnavailableError, TransferTimeoutError, UnsupportedError

# The same library, built for two versions of CUDA; either one runs without a GPU.
MODULES = ("nixl_cu13._bindings", "nixl_cu12._bindings")
# Microseconds that the progress thread waits for events. 0 would make it spin on a core all day long.
PROGRESS_WAIT_US = 1
POLL_S = 1e-4


@functools.cache
def load() -> Any:
    """Return NIXL's bindings.

    Raises:
        UnsupportedError: NIXL is not installed, or does not load on this machine.
    """
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise UnsupportedError(f"nixl: expected the package nixl-cu13 to load, got {'; '.join(reasons)}")


@functools.cache
def errors() -> tuple[type[Exception], ...]:
    """Return what NIXL raises; as `load` otherwise."""
    found = [getattr(load(), name) for name in dir(load()) if name.startswith("nixl") and name.endswith("Error")]
    return tuple(found)


def net_devices(address: str) -> str:
    """Return the network devices that UCX may use where a service has this `host:port`; empty for all of them.

    A service that only its own host reaches must not open a port to others by way of UCX.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return "lo" if is_loopback else ""


class NixlAgent:
    """This process's end of one-sided transfers over UCX. Any thread may call it."""

    def __init__(self, name: str, devices: str = "", num_lanes: int = 0) -> None:
        """Start; UCX chooses among the transports that `UCX_TLS` of the environment allows.

        Args:
            name: Name that no other agent has with which this one is to speak.
            devices: Network device to use; empty for all. `UCX_NET_DEVICES` of the environment goes before it.
            num_lanes: Threads that will start transfers and wait for them at a time, where others start none; each has
                an end of its own of every connection. 0 for memory that others read and write too.

        Raises:
            UnsupportedError: NIXL or UCX does not start here.
        """
        self._bindings = load()
        settings = self._bindings.nixlAgentConfig()
        # In a process that only waits for its own transfers, each wait moves them on; a thread of NIXL's would take as
        # much of a core beside every copy as the copy itself.
        settings.useProgThread = num_lanes == 0
        settings.pthrDelay = PROGRESS_WAIT_US
        settings.useListenThread = False
        # Transfers of two threads at a time; a strict agent would start them one after another.
        settings.syncMode = self._bindings.NIXL_THREAD_SYNC_RW
        try:
            self._agent = self._bindings.nixlAgent(name, settings)
            engine = {"engine_config": f"NET_DEVICES={devices}"} if devices else {}
            self._agent.createBackend("UCX", {"num_workers": str(max(1, num_lanes)), **engine})
        except errors() as cause:
            raise UnsupportedError(f"nixl: expected UCX to start, got {cause}; its log says more") from cause
        self._registered: list[tuple[int, int]] = []
        self._kept: list[NDArray[np.uint8]] = []

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let transfers read and write contiguous memory; it is kept alive as long as the agent.

        Raises:
            UnsupportedError: UCX cannot register it; the limit of locked memory may be too low for RDMA.
        """
        start, num_bytes = memory.ctypes.data, memory.nbytes
        row = np.array([[start, num_bytes, 0]], np.uint64)
        try:
            self._agent.registerMem(self._bindings.nixlRegDList(self._bindings.DRAM_SEG, row), [])
        except errors() as cause:
            raise UnsupportedError(f"nixl: expected {num_bytes} bytes to be registered, got {cause}") from cause
        self._registered.append((start, start + num_bytes))
        self._kept.append(memory)

    def require(self, memory: NDArray[np.uint8]) -> None:
        """Refuse contiguous memory that is not within what was registered.

        Raises:
            InvalidRequestError: It is not.
        """
        self._require(memory.ctypes.data, memory.ctypes.data + memory.nbytes)

    def metadata(self) -> bytes:
        """Return what another agent needs to reach this one and all that is registered so far."""
        found: bytes = self._agent.getLocalMD()
        return found

    def connect(self, metadata: bytes) -> str:
        """Learn of another agent and return its name.

        Raises:
            PeerUnavailableError: There is no way to it.
        """
        try:
            name = self._agent.loadRemoteMD(metadata)
        except errors() as cause:
            raise PeerUnavailableError(f"nixl: expected a way to the service's agent, got {cause}") from cause
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, remote: str) -> None:
        """Forget another agent; what is under way ends. Never fails."""
        with contextlib.suppress(*errors()):
            self._agent.invalidateRemoteMD(remote)

    def start(
        self,
        remote: str,
        *,
        is_read: bool,
        local: NDArray[np.uint64],
        remote_addresses: NDArray[np.uint64],
        num_bytes: int,
    ) -> "Transfer":
        """Begin to copy pieces between this process and another; pieces that lie side by side on both ends are joined.

        Args:
            remote: From `connect`.
            is_read: Whether bytes come here; they go there otherwise.
            local: `[n]`, addresses here, within registered memory.
            remote_addresses: `[n]`, addresses there.
            num_bytes: Of each piece.

        Raises:
            InvalidRequestError: A piece is not within registered memory; nothing is copied.
            PeerUnavailableError: The other side is away; some bytes may have been copied.
        """
        here, there, sizes = _joined(local, remote_addresses, num_bytes)
        self._require(int(here.min()), int((here + sizes).max()))
        rows = np.zeros((2, len(here), 3), np.uint64)
        rows[0, :, 0], rows[1, :, 0], rows[:, :, 1] = here, there, sizes
        bindings = self._bindings
        ends = [bindings.nixlXferDList(bindings.DRAM_SEG, side) for side in rows]
        operation = bindings.NIXL_READ if is_read else bindings.NIXL_WRITE
        try:
            handle = self._agent.createXferReq(operation, *ends, remote, "", [])
        except errors() as cause:
            raise PeerUnavailableError(f"nixl: expected a transfer to begin, got {cause}; nothing is copied") from cause
        return Transfer(self._agent, bindings, handle)

    def _require(self, first: int, last: int) -> None:
        if not any(start <= first and last <= end for start, end in self._registered):
            raise InvalidRequestError("buffer: expected memory within one that was registered")


class Transfer:
    """A copy under way."""

    def __init__(self, agent: Any, bindings: Any, handle: int) -> None:
        self._agent = agent
        self._bindings = bindings
        self._handle = handle
        self._status = self._try(lambda: agent.postXferReq(handle, ""))

    @property
    def has_ended(self) -> bool:
        """Whether it was over when it was last looked at, well or not; `wait` returns at once then."""
        return bool(self._status != self._bindings.NIXL_IN_PROG)

    def wait(self, timeout_s: float) -> None:
        """Return when all bytes are there.

        Raises:
            PeerUnavailableError: The other side is away; some bytes may have been copied.
            TransferTimeoutError: It is not over in time; it may still write until `NixlAgent.disconnect`.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while self._status == self._bindings.NIXL_IN_PROG:
                if time.monotonic() > deadline_s:
                    raise TransferTimeoutError(f"nixl: expected an end within {timeout_s} s; it may still write")
                time.sleep(POLL_S)
                self._status = self._try(lambda: self._agent.getXferStatus(self._handle))
            if self._status != self._bindings.NIXL_SUCCESS:
                raise PeerUnavailableError(f"nixl: expected a copy, got {self._status}; it may have copied a part")
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Give the transfer up, if it is not over. Never fails."""
        if self._handle:
            with contextlib.suppress(*errors()):
                self._agent.releaseXferReq(self._handle)
            self._handle = 0

    def _try(self, step: Any) -> Any:
        try:
            return step()
        except errors() as cause:
            self.cancel()
            raise PeerUnavailableError(f"nixl: expected a copy, got {cause}; it may have copied a part") from cause


def _joined(
    local: NDArray[np.uint64], remote: NDArray[np.uint64], num_bytes: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return fewer and longer pieces, `[m]` each: addresses here, addresses there, sizes."""
    step = np.uint64(num_bytes)
    is_first = np.ones(len(local), np.bool_)
    is_first[1:] = (local[1:] - local[:-1] != step) | (remote[1:] - remote[:-1] != step)
    firsts = np.flatnonzero(is_first)
    counts = np.diff(np.append(firsts, len(local))).astype(np.uint64)
    return local[firsts], remote[firsts], counts * step
