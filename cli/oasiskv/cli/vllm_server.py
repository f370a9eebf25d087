"""The process that `server` starts: vLLM's own API server, which ends with the process that started it."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run vLLM's server with this process's arguments; vLLM stops its engine processes when it gets the signal."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
