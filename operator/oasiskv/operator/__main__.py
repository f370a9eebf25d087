"""`python -m oasiskv.operator`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from oasiskv.core.errors import OasisError
from oasiskv.operator import logs
from oasiskv.operator.client import ApiError
from oasiskv.operator.process import KINDS_S, RESYNC_S, Options, Process


def options(arguments: Sequence[str] | None = None) -> tuple[Options, str]:
    """Return what the command line says, and the level of logging."""
    parser = argparse.ArgumentParser(prog="python -m oasiskv.operator", description=__doc__)
    parser.add_argument("--namespace", action="append", default=[], help="work in this one; may be repeated")
    parser.add_argument("--read-nodes", action="store_true", help="look at nodes and all pods, to say what has room")
    parser.add_argument("--lease", default="oasiskv-operator", help="name of the lease that the writer holds")
    parser.add_argument("--health-address", default="0.0.0.0:8081", help="of /healthz and /readyz")
    parser.add_argument("--metrics-address", default="0.0.0.0:9400", help="of /metrics")
    parser.add_argument("--resync-seconds", type=float, default=RESYNC_S, help="how often all services are looked at")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    said = parser.parse_args(arguments)
    made = Options(
        lease=said.lease,
        lease_namespace=os.environ.get("POD_NAMESPACE", "default"),
        namespaces=tuple(dict.fromkeys(said.namespace)),
        reads_nodes=said.read_nodes,
        health_address=said.health_address,
        metrics_address=said.metrics_address,
        resync_s=said.resync_seconds,
        kinds_s=min(KINDS_S, said.resync_seconds),
    )
    return made, said.log_level


async def run(how: Options) -> int:
    """Run an operator to its end."""
    return await Process(how).run()


def main() -> int:
    """Run until a signal; return the exit code."""
    how, level = options()
    logs.configure(level)
    try:
        return asyncio.run(run(how))
    except (OasisError, ApiError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
