"""A Service's address on loopback for tests: each new connection goes to the pod that the Service leads to then."""

import contextlib
import socket
import socketserver
import threading
import time
import urllib.error
from collections.abc import Callable

CONNECT_S = 5.0
READY_S = 20.0
"""How long a connection waits for a ready pod; on a busy machine a probe may be late."""


class Forwarder:
    """Listens from the start until `stop`; connections that are there stay with their pod until it ends them.

    Args:
        address: Host and port to listen at.
        where: Returns `host:port` of a ready pod, or raises AssertionError where none is.
    """

    def __init__(self, address: tuple[str, int], where: Callable[[], str]) -> None:
        self._server = _Server(address, where)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="forwarder")
        self._thread.start()

    def stop(self) -> None:
        """Take no more, and wait for the connections that are there to be ended."""
        self._server.is_stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], where: Callable[[], str]) -> None:
        self.where = where
        self.is_stopping = threading.Event()
        super().__init__(address, _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        there = self._connect()
        if there is None:
            return  # who connected sees it end, and tries again
        with there:
            there.settimeout(None)
            back = threading.Thread(target=_pass_on, args=(there, self.request))
            back.start()
            _pass_on(self.request, there)
            back.join()

    def _connect(self) -> socket.socket | None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and not self.server.is_stopping.is_set():
            try:
                host, _, port = self.server.where().rpartition(":")
                return socket.create_connection((host, int(port)), CONNECT_S)
            except urllib.error.HTTPError as error:
                error.close()
            except (AssertionError, OSError):
                pass
            self.server.is_stopping.wait(0.1)
        return None


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**18):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
