"""`oasiskv cap replay`: read the logs of an adaptive cap and check that the rule chooses the same caps again."""

import argparse
import sys
from pathlib import Path

from oasiskv.core.cap import Logged, read_log, replay
from oasiskv.core.errors import ConfigError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `oasiskv cap`."""
    parser = subparsers.add_parser("cap", help="read logs of the cap that follows the host link")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    action = actions.add_parser("replay", help="give a log's inputs to the rule again and compare its caps")
    action.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of the folder that cap_log names")


def run(args: argparse.Namespace) -> int:
    """Print a line per log; return 1 if the rule now chooses other caps.

    Raises:
        ConfigError: a file is no log.
    """
    num_different = 0
    for path in args.files:
        try:
            logged = read_log(path.read_text().splitlines())
        except OSError as error:
            raise ConfigError(f"FILE: expected a log, got {error}") from error
        print(f"{path}: {_describe(logged)}")
        if (number := replay(logged)) is not None:
            num_different += 1
            print(f"error: {path}: the rule chooses another cap in step {number} of the log", file=sys.stderr)
    return 1 if num_different else 0


def _describe(logged: Logged) -> str:
    caps = [cap for _, cap in logged.steps]
    if not caps:
        return "no steps"
    changes = sum(later != before for before, later in zip([logged.limits.first, *caps], caps, strict=False))
    measured = [given.measured for given, _ in logged.steps if given.measured is not None]
    stalls = 1e3 * sum(one.stall_s for one in measured) / max(1, len(measured))
    return (
        f"{len(caps)} steps, cap {min(caps)} to {max(caps)}, last {caps[-1]}, {changes} changes; "
        f"waits {stalls:.3f} ms a step over {len(measured)} measurements"
    )
