"""``strop data check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.cli.commands import Command
from strop.cli.output import (
    OVERRIDES_HELP,
    USAGE_ERROR,
    RunParser,
    plain_warnings,
    print_config_error,
    print_interrupted,
    print_warnings,
)

EPILOG = (
    "Exit codes: 0 nothing is lost and nothing leaks, 1 errors (with --strict, warnings too), 2 the check could not be made: the "
    "configuration or the arguments are wrong."
)


def data(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop data check``. Return its exit code."""
    options = make_data_parser().parse_intermixed_args(arguments)
    from strop.config import ConfigError

    try:
        return _check(options)
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        return print_interrupted("Nothing was written.")


def make_data_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop data",
        description="Read the data of a configuration as its run would, without a model, and say what would be lost, leak or mislead.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["check"], help="what to do")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML configuration of training or of an evaluation")
    parser.add_argument(
        "--against",
        action="append",
        metavar="NAME",
        help="an evaluation set whose questions must not be trained on: a built-in name, a file, OWNER/NAME; several with commas, or none "
        "(default: the validation data, and the built-in evaluation sets that are on this machine)",
    )
    parser.add_argument("--rows", type=_count, metavar="N", help="look at N rows of each entry, drawn at random (default: all)")
    parser.add_argument("--strict", action="store_true", help="let warnings fail the check, too")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _check(options: argparse.Namespace) -> int:
    from strop.config.load.load import load_training_or_evaluation

    loaded = load_training_or_evaluation(options.config, options.overrides)
    print_warnings(loaded)
    from strop.extensions.checks.data_check import DataCheckOptions, check_data

    asked = DataCheckOptions(rows=options.rows, against=_list_names(options.against), progress=_make_progress())
    try:
        with plain_warnings():
            report = check_data(loaded.config, asked)
    except ValueError as error:  # DataError and EnvironmentConfigError
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        import json

        print(json.dumps(report.as_dict(), indent=1))
    else:
        import shutil

        from strop.extensions.checks.data_report import format_report

        terminal = sys.stdout.isatty()
        print(format_report(report, width=shutil.get_terminal_size((130, 24)).columns if terminal else 130, colour=terminal))
    if report.status == "unchecked":
        return USAGE_ERROR
    return 1 if report.status == "error" or (options.strict and report.status == "warning") else 0


def _list_names(given: Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return tuple(name for names in given for name in names.split(",") if name and name != "none")


def _make_progress() -> Any:
    """Return what says on a terminal what is being read."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(text, file=sys.stderr)


DATA = Command(data, "check data before a run: strop data check", group="check")
