"""The `oasiskv` command: picks the subcommand, runs it, and turns its errors into one line and an exit code."""

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import NoReturn, Protocol

from oasiskv.cli import bench, cap, demo, doctor, evaluate, model, serve, trace, up
from oasiskv.core.errors import OasisError

EXIT_ERROR = 2
"""A typed error, and what argparse itself exits with."""

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


class Command(Protocol):
    """A module with one subcommand; it imports torch and vLLM inside `run` only, so that `--help` answers at once."""

    def add_parser(self, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", /) -> None:
        """Add the parser of the subcommand, under the name it has in `COMMANDS`."""

    def run(self, args: argparse.Namespace, /) -> int:
        """Do the work and return the exit code.

        Raises:
            OasisError: the work could not be done; `main` prints it.
        """


COMMANDS: MappingProxyType[str, Command] = MappingProxyType(
    {
        "bench": bench,
        "cap": cap,
        "doctor": doctor,
        "eval": evaluate,
        "model": model,
        "run": demo,
        "serve": serve,
        "trace": trace,
        "up": up,
    }
)
"""Every subcommand by its name, in the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Raises:
        SystemExit: argparse printed help, the version or what is wrong with the arguments.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is left goes nowhere, or Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OasisError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments as every other error is said: in one line, the setting first."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        kinds = {"int": "an integer", "float": "a number", "Path": "a path"}
        message = re.sub(r"^argument ([^/: ]+)[^: ]*: ", r"\1: ", message)
        if (found := re.fullmatch(r"(.*): invalid (\w+) value: (.*)", message)) is not None:
            message = f"{found[1]}: expected {kinds.get(found[2], found[2])}, got {found[3]}"
        self.exit(EXIT_ERROR, f"error: {message}; see {self.prog.partition(' [')[0]} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser: argparse.ArgumentParser = Parser(
        prog="oasiskv", description="Long-context LLM decode from host memory: lookahead sparse attention for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"oasiskv {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def version() -> str:
    """Return the installed version, or say that nothing is installed and the code runs from its folders."""
    try:
        return importlib.metadata.version("oasiskv")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
