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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import __version__, plugins
from strop.cli.output import (
    add_assumptions,
    make_run_parser,
    note_assumptions,
    plain_warnings,
    print_config_error,
    print_dry_run,
    print_interrupted,
    print_warnings,
    read_assumptions,
)
from strop.monitoring.message_style import discard_output
from strop.openmp import openmp_variables
from strop.packages import assume_packages
from strop.stopping import STOPPED_EXIT_CODE, RunStopped
from strop.user_code import UserCodeError, import_attribute, suggest_names

if TYPE_CHECKING:
    from strop.config import LoadedConfig, TrainingRunConfig

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


def train_run(section: str, meaning: str, arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run a training command. Return its exit code."""
    from strop.config import TRAINING_RUNS, ConfigError, load_config

    parser = make_run_parser(section, f"Train a language model: {meaning}.", default_config)
    add_assumptions(parser)
    options = parser.parse_intermixed_args(arguments)
    assumed = read_assumptions(parser, options)
    loaded: LoadedConfig[TrainingRunConfig] | None = None
    try:
        with nullcontext() if assumed is None else assume_packages():
            overrides = [*options.overrides, *(assumed.overrides if assumed else ())]
            has_gpus = None if assumed is None else True
            loaded = load_config(options.config, overrides, root=TRAINING_RUNS[section], has_gpus=has_gpus)
            print_warnings(loaded)
            from strop.runs.dry_run.examine import examine_loaded

            with plain_warnings():
                examination = examine_loaded(loaded, data=options.dry_run)
            if options.dry_run:
                if assumed is not None:
                    configured = load_config(options.config, options.overrides, root=TRAINING_RUNS[section], check=False)
                    for note in note_assumptions(assumed, configured.config):
                        print(f"warning: {note}", file=sys.stderr)
                return print_dry_run(loaded.config, examination, verbose=options.verbose, assumed=assumed)

        from strop.runs.train import run_training

        return run_training(loaded.config)
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        if loaded is None:
            return print_interrupted("The run had not started.")
        return print_interrupted(_format_resume_hint(loaded.config, command_line))
    except RunStopped as stopped:
        assert loaded is not None
        print(f"\n{stopped} {_format_resume_hint(loaded.config, command_line)}", file=sys.stderr)
        return STOPPED_EXIT_CODE


def training_command(section: str, meaning: str) -> Command:
    """Return ``strop SECTION``, which trains as ``strop.config.TRAINING_RUNS[SECTION]`` configures it."""
    return Command(train_run, meaning, (section, meaning), group="train")


def _format_resume_hint(config: TrainingRunConfig, command_line: str) -> str:
    saving = config.checkpointing
    if not saving.saving_enabled or saving.resume == "never":
        return "No checkpoints are saved, or checkpointing.resume is never, so the same command starts from the beginning."
    has_checkpoint = any(Path(saving.checkpoint_dir).glob("step_*"))
    where = (
        f"from the newest checkpoint in {saving.checkpoint_dir}"
        if has_checkpoint
        else f"from the beginning (no checkpoint in {saving.checkpoint_dir} yet)"
    )
    return f"Start the same command again to continue {where}:\n    {command_line}"


GROUPS: dict[str, dict[str, Command]] = {
    "start": {},
    "train": {
        "grpo": training_command("grpo", "GRPO and other policy gradients"),
        "ppo": training_command("ppo", "policy gradients with a critic"),
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
