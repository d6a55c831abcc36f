"""``strop plot``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.cli.log_folder import find_log_folder
from strop.cli.output import USAGE_ERROR

COMPARISON = Path("comparison.png")


def plot(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop plot``. Return its exit code."""
    options = make_parser().parse_args(arguments)
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


def make_parser() -> argparse.ArgumentParser:
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
        from strop.monitoring.plot import plot_run

        return plot_run(folders[0], options.output)
    from strop.monitoring.plot import find_metrics, plot_runs

    default = find_metrics(folders[0]).parent / "curves.png" if len(folders) == 1 else COMPARISON
    settings = [_read_settings(find_metrics(folder).parent) for folder in folders]
    return plot_runs(folders, settings, options.output or default, metrics=options.metric, group_by_seed=options.group_by_seed)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run by dotted keys; none if it has no configuration that can be read."""
    from strop.config.source import yaml_text
    from strop.monitoring.plot import flatten_settings

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
