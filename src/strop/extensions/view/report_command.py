"""``strop report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, RunParser, find_log_folder


def report(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop report``. Return its exit code."""
    parser = make_parser()
    options, others = parser.parse_known_args(arguments)
    if others and not any(other.startswith("-") or "=" in other for other in others):
        parser.error(f"a report is of one run, found {others[0]} too: strop compare A B compares two")
    parser.parse_args(arguments)
    from strop.config.source import yaml_text
    from strop.extensions.view.saved_view import save_view
    from strop.extensions.view.view_error import ViewError

    try:
        print(save_view(find_log_folder(options.run), options.output, yaml_text.parse_value))
    except (ViewError, ValueError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        named = f"{error.filename} cannot be written: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"error: {named}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop report",
        description="Save the view of a run as one HTML file that needs no server and no network: curves, times, configuration, incidents, "
        "what it ran on, and the rollouts and samples of its first and last step.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: report.html in the log folder)")
    return parser


REPORT = Command(report, "write a report of a run as one HTML file", group="look")
