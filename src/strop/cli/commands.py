"""The command line: ``strop init``, ``strop grpo`` and the other kinds of training, ``strop eval``, ``strop plot``, ``strop doctor``,
``strop cluster check``, ``strop config``.

Options and ``a.b=c`` overrides may be given in any order. Heavy packages are imported only when needed, so that ``--help`` and errors in
a configuration are fast. Exit codes: 0 success, 1 failure, 2 error in the arguments or the configuration, 130 interrupted, 143 stopped by
SIGTERM or the time limit and can be continued.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from strop import __version__
from strop.cli.cluster_command import cluster
from strop.cli.config_command import config
from strop.cli.doctor_command import doctor
from strop.cli.eval_command import evaluate
from strop.cli.init_command import init
from strop.cli.plot_command import plot
from strop.cli.train_command import TRAINING, train_run

COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    "init": init,
    **{section: partial(train_run, section) for section in TRAINING},
    "eval": evaluate,
    "plot": plot,
    "doctor": doctor,
    "cluster": cluster,
    "config": config,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``strop`` command. Return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    if not arguments:
        parser.print_help()
        return 0
    options = parser.parse_args(arguments)
    return COMMANDS[options.command](options.arguments, f"strop {shlex.join(arguments)}")


def run_script(command: str, default_config: Path) -> int:
    """Run ``strop COMMAND`` for a script of examples/, with ``default_config`` if no ``--config`` is given."""
    arguments = sys.argv[1:]
    typed = f"python {shlex.join([sys.argv[0], *arguments])}"
    if command == "eval":
        return evaluate(arguments, typed, default_config)
    return train_run(command, arguments, typed, default_config)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop",
        description="Strop post-trains language models.",
        epilog="`strop COMMAND --help` shows the options of a command.\n\n"
        "  strop init grpo\n"
        "  strop grpo --config examples/configs/quickstart.yaml\n"
        "  strop grpo --config examples/configs/grpo_math_1B.yaml --dry-run policy.model_name=Qwen/Qwen2.5-0.5B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"strop {__version__}")
    parser.add_argument(
        "command",
        choices=COMMANDS,
        metavar="COMMAND",
        help="init (write a starter), train: "
        + ", ".join(f"{name} ({meaning})" for name, meaning in TRAINING.items())
        + "; eval (evaluate a model), plot (plot the metrics of a run), doctor (diagnose a run), "
        "cluster check (check nodes before a run), config (list all keys)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser
