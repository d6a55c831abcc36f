"""``strop report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.log_folder import find_log_folder
from strop.cli.output import USAGE_ERROR, RunParser

REPORT_FILE = "report.html"


def report(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop report``. Return its exit code."""
    parser = make_parser()
    options, others = parser.parse_known_args(arguments)
    if others and not any(other.startswith("-") or "=" in other for other in others):
        parser.error(f"a report is of one run, found {others[0]} too: strop compare A B compares two")
    parser.parse_args(arguments)
    from strop.monitoring.pages.document import write_document
    from strop.runs.run_report.report_facts import read_report_facts
    from strop.runs.run_report.report_page import make_report

    try:
        facts = read_report_facts(find_log_folder(options.run))
        page = make_report(facts)
    except (OSError, ValueError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    target = options.output or facts.folder / REPORT_FILE
    try:
        write_document(target, page)
    except OSError as error:
        print(f"error: {target} cannot be written: {error.strerror or error}", file=sys.stderr)
        return USAGE_ERROR
    print(target)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop report",
        description="Write a report of a run as one HTML file that needs no network: configuration, curves, validation with intervals, "
        "samples before and after, mismatch, incidents, versions, and how to repeat it.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the file to write (default: {REPORT_FILE} in the log folder)"
    )
    return parser
