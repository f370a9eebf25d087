import argparse
import subprocess
import sys
from collections.abc import Callable

import pytest

from oasiskv.cli import main as frame
from oasiskv.core.errors import ConfigError


class FakeCommand:
    def __init__(self, work: Callable[[argparse.Namespace], int]) -> None:
        self.work = work

    def add_parser(self, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", /) -> None:
        subparsers.add_parser("fake").add_argument("--count", type=int, default=0)

    def run(self, args: argparse.Namespace, /) -> int:
        return self.work(args)


def run_fake(monkeypatch: pytest.MonkeyPatch, work: Callable[[argparse.Namespace], int], *argv: str) -> int:
    monkeypatch.setattr(frame, "COMMANDS", {"fake": FakeCommand(work)})
    return frame.main(["fake", *argv])


def test_the_exit_code_of_the_subcommand_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_fake(monkeypatch, lambda args: int(args.count), "--count", "3") == 3


def test_a_typed_error_becomes_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ConfigError("budget_blocks: expected at least 1, got 0")

    assert run_fake(monkeypatch, fail) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: budget_blocks: expected at least 1, got 0\n")


def test_an_interrupt_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert run_fake(monkeypatch, interrupt) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("num_lines", [1, 5000])
def test_a_reader_that_leaves_early_is_no_bug(num_lines: int) -> None:
    code = (
        "import sys; from oasiskv.cli import doctor, main; "
        f"doctor.CHECKS = (doctor.check_python,) * {num_lines}; sys.exit(main.main(['doctor']))"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.close()
    assert command.stderr.read() == b""
    command.stderr.close()
    assert command.wait() == 2


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_fake(monkeypatch, fail)


def test_every_command_is_registered_under_the_name_it_answers_to() -> None:
    actions = [a for a in frame.build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert [list(action.choices) for action in actions] == [list(frame.COMMANDS)]


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_a_missing_or_unknown_command_is_an_argument_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        frame.main(argv)
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_version_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        frame.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("oasiskv ")


def test_help_answers_without_importing_torch_or_vllm() -> None:
    code = "import sys; from oasiskv.cli.main import build_parser; build_parser().format_help(); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "transformers", "triton"} & set(result.stdout.split())


def test_the_module_runs_as_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "oasiskv.cli", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: oasiskv ")
