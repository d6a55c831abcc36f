"""``strop rollouts``, ``strop plot``, ``strop doctor`` and ``strop config``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, find_log_folder, removed_option

if TYPE_CHECKING:
    from strop.extensions.reading.rollout_view import SelectedRollouts


TEXT_LIMIT = 1500  # characters of a message, unless --full
TERMINAL_ROLLOUTS, STEPS_OF_A_TASK = 4, 20  # unless --limit
PIPE_WIDTH = 100  # columns without a terminal


def rollouts(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop rollouts``. Return its exit code."""
    options = make_rollouts_parser().parse_args(arguments)
    try:
        return _show(options)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is still buffered
        return 0


def make_rollouts_parser() -> argparse.ArgumentParser:
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
    from strop.extensions.reading.rollout_view import NoRollouts, RolloutSelection, select_rollouts
    from strop.monitoring.rollout_store.rollout_store import RolloutStore
    from strop.monitoring.rollout_store.validation_samples import ValidationSamples
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
    from strop.extensions.reading.rollout_view import format_rollout, show_rollout
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


COMPARISON = Path("comparison.png")


def plot(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop plot``. Return its exit code."""
    options = make_plot_parser().parse_args(arguments)
    for run in options.runs:
        if not run.exists():
            print(
                f"error: there is no folder {run}; give the log folder of a run, which contains metrics.jsonl{_list_beside(run)}",
                file=sys.stderr,
            )
            return USAGE_ERROR
    try:
        print(_draw(options))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def make_plot_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop plot",
        description="Plot the metrics of a run, or of several in one picture, to a PNG file.",
        epilog="Runs that differ only in their seed are one line, their mean, in a band from the lowest to the highest.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration"
    )
    parser.add_argument(
        "--metric", nargs="+", action="extend", default=[], metavar="NAME", help="metrics to plot, such as train/reward"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the PNG file to write (default: in the log folder; of several runs {COMPARISON})",
    )
    parser.add_argument(
        "--group-by-seed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether runs that differ in their seed are one line",
    )
    return parser


def _draw(options: argparse.Namespace) -> Path:
    folders = [find_log_folder(run) for run in options.runs]
    if len(folders) == 1 and not options.metric:
        from strop.extensions.reading.plot import plot_run

        return plot_run(folders[0], options.output)
    from strop.extensions.reading.plot import find_metrics, plot_runs

    default = find_metrics(folders[0]).parent / "curves.png" if len(folders) == 1 else COMPARISON
    settings = [_read_settings(find_metrics(folder).parent) for folder in folders]
    return plot_runs(folders, settings, options.output or default, metrics=options.metric, group_by_seed=options.group_by_seed)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run by dotted keys; none if it has no configuration that can be read."""
    from strop.config.source import yaml_text
    from strop.extensions.reading.plot import flatten_settings

    try:
        values = yaml_text.parse_value((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml_text.YamlError):
        return {}
    return flatten_settings(values) if isinstance(values, Mapping) else {}


def _list_beside(run: Path) -> str:
    """Return the nearest run names in the folder above, for an error."""
    from strop.user_code import suggest_names

    runs = [path.parent.name for path in run.parent.glob("*/metrics.jsonl")] if run.parent.is_dir() else []
    return suggest_names(run.name, runs) if runs else ""


def doctor(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop doctor``. Return 0 if the run is healthy, 1 if not, 2 if there is no such run."""
    parser = argparse.ArgumentParser(
        prog="strop doctor",
        description="Diagnose a run: whether it is alive, what waits for what and for how long, what went wrong, and how to fix it.",
        epilog="Exit codes: 0 running or finished, 1 there are problems, 2 there is no such run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, or a configuration (its logger.log_dir)")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    options = parser.parse_args(arguments)
    from strop.extensions.reading.doctor import RunNotFound, diagnose, format_diagnosis

    try:
        diagnosis = diagnose(find_log_folder(options.run))
    except (RunNotFound, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        import dataclasses
        import json

        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, ensure_ascii=False))
    else:
        print(format_diagnosis(diagnosis))
    return 0 if diagnosis.healthy else 1


def list_keys(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop config``. Return its exit code."""
    from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig
    from strop.extensions.reading.key_reference import render_annotated_yaml

    parser = argparse.ArgumentParser(
        prog="strop config", description="List every key with its type, default and description.", allow_abbrev=False
    )
    parser.add_argument(
        "schema", choices=(*TRAINING_RUNS, "eval"), nargs="?", default="grpo", help="command to list the keys of (default: grpo)"
    )
    options = parser.parse_args(arguments)

    print(render_annotated_yaml(TRAINING_RUNS.get(options.schema, EvalRunConfig)), end="")
    return 0


ROLLOUTS = Command(rollouts, "read what a run sampled, turn by turn, with rewards", group="look")
PLOT = Command(plot, "draw the metrics of one run or several", group="look")
DOCTOR = Command(doctor, "say whether a run is alive, and what went wrong", group="check")
CONFIG = Command(list_keys, "list every key with its default and what it does", group="start")
