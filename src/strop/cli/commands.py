"""The command line.

Options and ``a.b=c`` overrides may be given in any order. Heavy packages are imported only when needed, so that ``--help`` and errors in
a configuration are fast. Exit codes: 0 success, 1 failure, 2 error in the arguments or the configuration, 130 interrupted, 141
the reader of the output is gone, 143 stopped by SIGTERM or the time limit and can be continued.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop import __version__, plugins
from strop.cli.train_command import TRAINING
from strop.monitoring.message_style import discard_output
from strop.openmp import openmp_variables
from strop.user_code import UserCodeError, import_attribute, suggest_names

BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Command:
    """The function called by ``strop NAME``, and its line in ``strop --help``.

    ``target``: a function of the arguments and of the whole command line that returns an exit code, or ``module:function``, which is
    imported when it is called. An extension declares one in the entry points ``strop.commands``.
    """

    target: str | Callable[..., int]
    meaning: str
    first: tuple[str, ...] = ()  # arguments before those of the command line
    group: str = "more"  # heading of ``strop --help``

    def run(self, *arguments: Any) -> int:
        """Call the command with its arguments and the whole command line. Return its exit code."""
        function: Callable[..., int] = self.target if callable(self.target) else import_attribute(self.target)
        return function(*self.first, *arguments)


GROUPS: dict[str, dict[str, Command]] = {
    "start": {
        "config": Command("strop.cli.train_command:config", "list every key with its default and what it does"),
    },
    "train": {
        section: Command("strop.cli.train_command:train_run", meaning, (section,)) for section, meaning in TRAINING.items()
    },
    "look": {},
    "use": {},
    "check": {},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def find_command(name: str) -> Command | None:
    """Return a command of Strop or of an extension; None if there is none of this name."""
    return COMMANDS.get(name) or (plugins.load("commands", name) if name in plugins.declared("commands") else None)


def list_commands() -> dict[str, dict[str, Command]]:
    """Return all commands by heading and name. An extension that cannot be imported is left out, with a warning."""
    groups = {title: dict(group) for title, group in GROUPS.items()}
    for name in plugins.declared("commands"):
        try:
            command: Command = plugins.load("commands", name)
        except UserCodeError as error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        groups.setdefault(command.group, {})[name] = command
    return groups


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``strop`` command. Return its exit code."""
    os.environ.update(openmp_variables())  # before a command imports torch
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.description = f"{parser.description}\n\n{_list_commands()}"
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    command = find_command(options.command)
    if command is None:
        known = [*COMMANDS, *plugins.declared("commands")]
        parser.error(f"there is no command {options.command!r}{suggest_names(options.command, known)}")
    return _heed_broken_pipe(lambda: command.run(options.arguments, f"strop {shlex.join(arguments)}"))


def _heed_broken_pipe(command: Callable[[], int]) -> int:
    """Run a command. If the reader of its output is gone (``strop ... | head``), return the exit code that shells use for
    SIGPIPE.
    """
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    return code


def run_script(command: str, default_config: Path) -> int:
    """Run ``strop COMMAND`` for a script of examples/, with ``default_config`` if no ``--config`` is given."""
    os.environ.update(openmp_variables())
    arguments = sys.argv[1:]
    typed = f"python {shlex.join([sys.argv[0], *arguments])}"
    found = find_command(command)
    assert found is not None
    return _heed_broken_pipe(lambda: found.run(arguments, typed, default_config))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop",
        usage="strop COMMAND [--help] ...",
        description="Strop post-trains language models.",
        epilog="`strop COMMAND --help` shows the options of a command.\n\n"
        "  strop init grpo\n"
        "  strop grpo --config grpo.yaml --dry-run\n"
        "  strop grpo --config grpo.yaml policy.model_name=Qwen/Qwen2.5-0.5B-Instruct",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"strop {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser


def _list_commands() -> str:
    groups = list_commands()
    width = max(len(name) for group in groups.values() for name in group) + 2
    return "\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}{command.meaning}" for name, command in group.items())])
        for title, group in groups.items()
    )
