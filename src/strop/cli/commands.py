"""The command line: one file for each command.

Options and ``a.b=c`` overrides may be given in any order. Heavy packages are imported only when needed, so that ``--help`` and errors in
a configuration are fast. Exit codes: 0 success, 1 failure, 2 error in the arguments or the configuration, 130 interrupted, 141 nobody
reads the output, 143 stopped by SIGTERM or the time limit and can be continued.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop import __version__
from strop.cli.train_command import TRAINING
from strop.monitoring.console.message_style import discard_output
from strop.user_code import suggest_names

BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Command:
    """What ``strop NAME`` calls (module:function), which is imported when it is, and its line in ``strop --help``."""

    target: str
    meaning: str
    first: tuple[str, ...] = ()  # arguments before those of the command line

    def run(self, *arguments: Any) -> int:
        """Call the command with its arguments and the whole command line. Return its exit code."""
        module, _, name = self.target.partition(":")
        code: int = getattr(importlib.import_module(module), name)(*self.first, *arguments)
        return code


GROUPS: dict[str, dict[str, Command]] = {
    "start": {
        "init": Command("strop.cli.init_command:init", "write a starter: configuration, sample data, a reward or a tool"),
        "config": Command("strop.cli.config_command:config", "list every key with its default and what it does"),
        "translate": Command("strop.cli.translate_command:translate", "print a recipe of another library in Strop's keys"),
    },
    "train": {
        section: Command("strop.cli.train_command:train_run", meaning, (section,)) for section, meaning in TRAINING.items()
    },
    "look": {
        "view": Command("strop.cli.view_command:view", "show runs in the browser: curves, rollouts, tokens"),
        "rollouts": Command("strop.cli.rollouts_command:rollouts", "read what a run sampled, turn by turn, with rewards"),
        "ledger": Command(
            "strop.cli.explain.ledger_command:ledger", "say what each term of the loss was at each token of a rollout"
        ),
        "replay": Command("strop.cli.explain.replay_command:replay", "train a step again, as it was or with other settings"),
        "plot": Command("strop.cli.plot_command:plot", "draw the metrics of one run or several"),
        "report": Command("strop.cli.reports.report_command:report", "write a report of a run as one HTML file"),
    },
    "use": {
        "eval": Command("strop.cli.eval_command:evaluate", "evaluate a run, a checkpoint or a model"),
        "compare": Command("strop.cli.compare_command:compare", "say whether one run is better than another, on the same tasks"),
        "export": Command("strop.cli.export_command:export", "write a checkpoint as a Hugging Face folder"),
        "serve": Command("strop.cli.serve_command:serve", "answer OpenAI's HTTP API with a checkpoint"),
    },
    "check": {
        "doctor": Command("strop.cli.checks.doctor_command:doctor", "say whether a run is alive, and what went wrong"),
        "sandbox": Command("strop.cli.checks.sandbox_command:sandbox", "check or serve what runs programs that a model wrote"),
        "env": Command("strop.cli.checks.env_command:env", "check tasks and rewards without a model: strop env check"),
        "data": Command("strop.cli.checks.data_command:data", "check data before a run: strop data check"),
        "cluster": Command("strop.cli.checks.cluster_command:cluster", "check the nodes before a run: strop cluster check"),
        "plan": Command("strop.cli.plan_command:plan", "say whether a run fits: memory of devices and nodes, disk"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``strop`` command. Return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    if options.command not in COMMANDS:
        parser.error(f"there is no command {options.command!r}{suggest_names(options.command, COMMANDS)}")
    return _heed_broken_pipe(lambda: COMMANDS[options.command].run(options.arguments, f"strop {shlex.join(arguments)}"))


def _heed_broken_pipe(command: Callable[[], int]) -> int:
    """Run a command. If nobody reads its output any more (``strop ... | head``), return what a shell reports of SIGPIPE."""
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    return code


def run_script(command: str, default_config: Path) -> int:
    """Run ``strop COMMAND`` for a script of examples/, with ``default_config`` if no ``--config`` is given."""
    arguments = sys.argv[1:]
    typed = f"python {shlex.join([sys.argv[0], *arguments])}"
    return _heed_broken_pipe(lambda: COMMANDS[command].run(arguments, typed, default_config))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop",
        usage="strop COMMAND [--help] ...",
        description=f"Strop post-trains language models.\n\n{_list_commands()}",
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
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}{command.meaning}" for name, command in group.items())])
        for title, group in GROUPS.items()
    )
