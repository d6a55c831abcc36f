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
from functools import partial
from pathlib import Path

from strop import __version__
from strop.cli.cluster_command import cluster
from strop.cli.config_command import config
from strop.cli.doctor_command import doctor
from strop.cli.eval_command import evaluate
from strop.cli.export_command import export
from strop.cli.init_command import init
from strop.cli.plot_command import plot
from strop.cli.rollouts_command import rollouts
from strop.cli.serve_command import serve
from strop.cli.train_command import TRAINING, train_run
from strop.monitoring.console.message_style import discard_output

BROKEN_PIPE = 141  # 128 + SIGPIPE

COMMANDS: dict[str, Callable[[Sequence[str], str], int]] = {
    "init": init,
    **{section: partial(train_run, section) for section in TRAINING},
    "eval": evaluate,
    "rollouts": rollouts,
    "export": export,
    "serve": serve,
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
    return _heed_broken_pipe(lambda: COMMANDS[options.command](options.arguments, f"strop {shlex.join(arguments)}"))


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
        + "; eval (evaluate a model), export (write a checkpoint as a Hugging Face folder), serve (OpenAI's HTTP API for a "
        "checkpoint), rollouts (read what a run sampled), plot (plot the metrics of runs), doctor (diagnose a run), "
        "cluster check (check nodes before a run), config (list all keys)",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    return parser
