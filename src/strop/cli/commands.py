"""The command line: one file for each command.

Options and ``a.b=c`` overrides may be given in any order. Heavy packages are imported only when needed, so that ``--help`` and errors in
a configuration are fast. Exit codes: 0 success, 1 failure, 2 error in the arguments or the configuration, 130 interrupted, 141 nobody
reads the output, 143 stopped by SIGTERM or the time limit and can be continued.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop import __version__
from strop.cli.checks.cluster_command import cluster
from strop.cli.checks.data_command import data
from strop.cli.checks.doctor_command import doctor
from strop.cli.checks.env_command import env
from strop.cli.checks.sandbox_command import sandbox
from strop.cli.compare_command import compare
from strop.cli.config_command import config
from strop.cli.eval_command import evaluate
from strop.cli.explain.ledger_command import ledger
from strop.cli.explain.replay_command import replay
from strop.cli.export_command import export
from strop.cli.init_command import init
from strop.cli.plan_command import plan
from strop.cli.plot_command import plot
from strop.cli.reports.report_command import report
from strop.cli.rollouts_command import rollouts
from strop.cli.serve_command import serve
from strop.cli.train_command import TRAINING, train_run
from strop.cli.translate_command import translate
from strop.cli.view_command import view
from strop.monitoring.console.message_style import discard_output
from strop.user_code import suggest_names

BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Command:
    """What ``strop NAME`` calls, with its arguments and the whole command line, and its line in ``strop --help``."""

    run: Callable[[Sequence[str], str], int]
    meaning: str


GROUPS: dict[str, dict[str, Command]] = {
    "start": {
        "init": Command(init, "write a starter: configuration, sample data, a reward or a tool"),
        "config": Command(config, "list every key with its default and what it does"),
        "translate": Command(translate, "print a recipe of another library in Strop's keys"),
    },
    "train": {section: Command(partial(train_run, section), meaning) for section, meaning in TRAINING.items()},
    "look": {
        "view": Command(view, "show runs in the browser: curves, rollouts, tokens"),
        "rollouts": Command(rollouts, "read what a run sampled, turn by turn, with rewards"),
        "ledger": Command(ledger, "say what each term of the loss was at each token of a rollout"),
        "replay": Command(replay, "train a step again, as it was or with other settings"),
        "plot": Command(plot, "draw the metrics of one run or several"),
        "report": Command(report, "write a report of a run as one HTML file"),
    },
    "use": {
        "eval": Command(evaluate, "evaluate a run, a checkpoint or a model"),
        "compare": Command(compare, "say whether one run is better than another, on the same tasks"),
        "export": Command(export, "write a checkpoint as a Hugging Face folder"),
        "serve": Command(serve, "answer OpenAI's HTTP API with a checkpoint"),
    },
    "check": {
        "doctor": Command(doctor, "say whether a run is alive, and what went wrong"),
        "sandbox": Command(sandbox, "check or serve what runs programs that a model wrote"),
        "env": Command(env, "check tasks and rewards without a model: strop env check"),
        "data": Command(data, "check data before a run: strop data check"),
        "cluster": Command(cluster, "check the nodes before a run: strop cluster check"),
        "plan": Command(plan, "say what a run will need: memory, time, cost"),
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
    if command == "eval":
        return _heed_broken_pipe(lambda: evaluate(arguments, typed, default_config))
    return _heed_broken_pipe(lambda: train_run(command, arguments, typed, default_config))


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
