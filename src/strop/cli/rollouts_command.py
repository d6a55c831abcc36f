"""``strop rollouts``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.log_folder import find_log_folder
from strop.cli.output import USAGE_ERROR, removed_option

if TYPE_CHECKING:
    from strop.monitoring.rollout_view import SelectedRollouts

TEXT_LIMIT = 1500  # characters of a message, unless --full
TERMINAL_ROLLOUTS, STEPS_OF_A_TASK = 4, 20  # unless --limit
PIPE_WIDTH = 100  # columns without a terminal


def rollouts(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop rollouts``. Return its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        return _show(options)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop rollouts",
        description="Show stored rollouts: conversations turn by turn, with their rewards and endings.",
        epilog="Without --step the newest step is shown; --task without --step shows a sample of that task in every step.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the newest)")
    parser.add_argument("--task", metavar="ID", help="rollouts of this task only")
    parser.add_argument("--environment", metavar="NAME", help="rollouts of this environment only")
    parser.add_argument("--ending", metavar="WORD", help="rollouts with this ending: stop, length, context, turns or error")
    parser.add_argument("--flagged", action="store_true", help="rollouts flagged by the reward hacking monitor")
    parser.add_argument("--best", type=_count, metavar="K", help="the K rollouts of the highest reward")
    parser.add_argument("--worst", type=_count, metavar="K", help="the K rollouts of the lowest reward")
    parser.add_argument("--validation", action="store_true", help="samples of validations instead of training")
    parser.add_argument("--limit", type=_count, metavar="K", help="at most K rollouts")
    parser.add_argument("--full", action="store_true", help="do not shorten long messages")
    instead = "`strop view RUN` shows rollouts, their tokens and their images in the browser"
    parser.add_argument("--html", type=removed_option(instead), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, with tokens and log-probabilities")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rollouts; give 1 or more")
    return int(text)


def _show(options: argparse.Namespace) -> int:
    from strop.monitoring.rollout_store.rollout_store import RolloutStore
    from strop.monitoring.rollout_store.validation_samples import ValidationSamples
    from strop.monitoring.rollout_view import NoRollouts, RolloutSelection, select_rollouts
    from strop.safety.printable import make_printable

    try:
        folder = find_log_folder(options.run)
        if not folder.is_dir():
            raise NoRollouts(f"there is no folder {folder}; give the log folder of a run (logger.log_dir)")
        source = ValidationSamples(folder) if options.validation else RolloutStore(folder, "none")
        over_steps = options.task is not None and options.step is None
        default = STEPS_OF_A_TASK if over_steps else TERMINAL_ROLLOUTS
        fields = ("step", "task", "environment", "ending", "best", "worst", "flagged")
        selection = RolloutSelection(**{name: getattr(options, name) for name in fields}, limit=options.limit or default)
        if not source.steps():
            raise NoRollouts(_explain_empty(folder, options.validation))
        selected = select_rollouts(source, selection)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    for said in selected.damaged:
        print(f"warning: {make_printable(said)}", file=sys.stderr)
    _print_lines(_format_json(selected) if options.json else _format_text(selected, options))
    return 0


def _explain_empty(folder: Path, validation: bool) -> str:
    if validation:
        return f"no validation is stored in {folder / 'validation'}: the run has not validated yet (val_period, val_at_start)"
    return (
        f"no rollouts are stored in {folder / 'rollouts'}: the run has not finished a step, trains on recorded data, or has "
        "logger.rollouts=none"
    )


def _print_lines(parts: Iterator[str]) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    for part in parts:
        print(part.encode(encoding, errors="backslashreplace").decode(encoding), flush=True)


def _format_json(selected: SelectedRollouts) -> Iterator[str]:
    from strop.monitoring.rollout_store.rollout_store import encode_json

    yield from (encode_json(record, ascii_only=True) for record in selected.records)


def _format_text(selected: SelectedRollouts, options: argparse.Namespace) -> Iterator[str]:
    from strop.monitoring.rollout_view import format_rollout, show_rollout
    from strop.safety.printable import make_printable

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns if terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    yield f"{make_printable(selected.summary)}\n"
    for record in selected.records:
        shown = show_rollout(record, None if options.full else TEXT_LIMIT, selected.flags_of(record))
        yield format_rollout(shown, width=width, colour=colour, unfold=options.full)
    if (count := len(selected.records)) < selected.matching:
        yield f"shown: {count} of {selected.matching} rollouts; others with --limit, --step, --best or --worst, and in strop view"
