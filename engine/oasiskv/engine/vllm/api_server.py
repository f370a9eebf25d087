"""The process that `oasiskv serve` starts: vLLM's own API server, which ends with the process that started it."""

import os
import signal
import threading
import time

POLL_S = 1.0
STOP_TIMEOUT_S = 10.0


def end_with_parent() -> None:
    """End this process's group once its parent is gone, killed perhaps, so that no engine stays behind.

    A signal at the parent's death would not do: while vLLM loads, its main thread takes none for a long time.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os.killpg(0, signal.SIGTERM)
        time.sleep(STOP_TIMEOUT_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="oasiskv-parent", daemon=True).start()


def main() -> None:
    """Run vLLM's server with this process's arguments."""
    end_with_parent()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
